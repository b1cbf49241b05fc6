"""What a `fit` changes of the data it trains on, and puts back at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import epochs_of_fit


@contextlib.contextmanager
def keep_settings(data: GlobalBatches) -> Iterator[None]:
    """Remember batch size and surplus ranks, which a `fit` that begins in here may change.

    They are put back by `put_back_settings`; at once where it does not begin. Where an earlier
    `fit` broke off, what that one began with counts.
    """
    data._epochs.keep()
    try:
        yield
    except BaseException:
        data._epochs.put_back()
        raise


def put_back_settings(data: GlobalBatches) -> None:
    """Return to the batch size and the surplus ranks of before, if they were kept.

    A batch size that was set outside of `fit` in the meantime stays.
    """
    data._epochs.put_back()


def serve_anew() -> None:
    """Let the running `fit` see which parts batches have by now.

    Keras looks at two batches when `fit` is called, before any callback may change the data.
    """
    epochs = epochs_of_fit()
    if epochs is not None:
        adapter = epochs.data_adapter
        adapter._output_signature = None
        epochs._distributed_dataset = adapter.get_tf_dataset()
