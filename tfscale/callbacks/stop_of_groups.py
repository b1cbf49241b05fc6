"""Stopping amid an interval of local SGD: all groups at the same step, behind an average."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfscale.fit.progress import progress_of
from tfscale.fit.unsynchronised import trains_apart

logger = logging.getLogger("tfscale")


class StopOfGroups(keras.callbacks.Callback):
    """Puts off a stop that one rank decided on until all ranks know of it.

    Groups exchange nothing between two averages, so a rank that stopped at once would leave the
    others some steps ahead. Its wish travels with the next average, behind which all stop; where
    the epoch ends before, they stop there. `LocalModels` puts this callback behind all others.
    """

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Put off a stop, or stop if that is agreed."""
        average = getattr(self.model.optimizer, "group_average", None)
        progress = progress_of(self.model)
        if progress.asks_each_step or progress.is_over:
            return
        if average is None:  # all ranks train together still, or average where epochs end
            if self.model.stop_training and trains_apart():
                logger.info("Training stops where the epoch ends.")
                self.model.stop_training = False
                progress.wants_to_stop = True
            return
        if bool(average.must_stop.numpy()):
            self.model.stop_training = True
        elif self.model.stop_training:
            logger.info("Training stops behind the next average of the groups.")
            self.model.stop_training = False
            average.wants_to_stop.assign(True)
