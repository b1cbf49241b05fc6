"""Fixed shares of the data, shuffled inside: what [F] does and `GlobalBatches` does not.

Only here to be compared with. Which samples may meet in a batch is fixed for the whole training.
"""

import keras
import numpy as np

import tfscale
from datasets.pictures import LabelledPictures
from tfscale.internals.stack import current_pass

ORDERS = ("shards", "sorted_shards")


class FixedShards(keras.utils.PyDataset):
    """Every rank trains on its own share: the r-th n-th of the data.

    `shards` cuts the data as it comes, which is random in the published data sets.
    `sorted_shards` sorts it by class before, so that ranks see different classes: the worst case,
    and what comes of files that are sorted.

    The order of an epoch depends on the seed, the rank and the number of the epoch that `fit` is
    in, so that a run that resumes from a backup sees what it would have seen.
    """

    def __init__(self, data: LabelledPictures, batch_size: int, seed: int, order: str):
        """Take this rank's share.

        Args:
            data: All pictures.
            batch_size: Samples of a step, all ranks together; a multiple of their number.
            seed: Of the orders inside the share.
            order: One of `ORDERS`.

        Raises:
            ValueError: The batch cannot be shared out.
        """
        super().__init__()
        ranks, rank = tfscale.size(), tfscale.rank()
        if batch_size % ranks or batch_size > len(data.labels):
            raise ValueError(
                "batch_size must be a multiple of the number of ranks, and not above the number "
                f"of samples. Received: batch_size={batch_size}, ranks={ranks}."
            )
        rows = np.arange(len(data.labels))
        if order == "sorted_shards":
            rows = np.argsort(data.labels, kind="stable")
        share = len(rows) // ranks
        self._data = data
        self._share = rows[rank * share : (rank + 1) * share]
        self._seed = [seed, rank]
        self.batch_size = batch_size
        self._local_batch = batch_size // ranks
        self._rows = self._order(0)

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        current_pass().keep_order()
        return len(self._share) // self._local_batch

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's part of a step."""
        rows = self._rows[index * self._local_batch : (index + 1) * self._local_batch]
        return self._data.pictures[rows], self._data.labels[rows]

    def on_epoch_begin(self) -> None:
        """Shuffle inside the share."""
        caller = current_pass()
        caller.keep_order()  # Keras would shuffle the steps, too, differently after a resume
        self._rows = self._order(caller.epoch or 0)

    def _order(self, epoch: int) -> np.ndarray:
        """Return this rank's samples in the order of an epoch."""
        return np.random.default_rng([*self._seed, epoch]).permutation(self._share)
