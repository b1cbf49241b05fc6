"""What ranks get back after a restart, where they did not hold the same."""

from __future__ import annotations

import keras

from tests.helpers.ranks import shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_checkpoint import check
from tests.parallel.checkpoint_runs import Run
from tfscale import runtime


@sizes(2, timeout_s=120)
def case_a_callback_that_one_rank_has():
    """Horovod's idiom: rank 0 alone saves models, and all ranks lower the learning rate."""

    def plateau(first):
        lower = keras.callbacks.ReduceLROnPlateau("loss", patience=2, mode="max", min_lr=1e-9)
        return [*first, lower]

    with shared_folder() as folder:

        def callbacks(data):
            is_first = runtime.rank() == 0
            return plateau([keras.callbacks.ModelCheckpoint(folder / "m.keras")] * is_first)

        # Two epochs without progress end with the third, in which both runs go on.
        check(Run(callbacks=callbacks), 12, 10)
