"""Stopping where no exchange would tell the others: all ranks at the same step."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.data.keras_pass import put_last
from tfscale.fit import cycles
from tfscale.fit.progress import progress_of
from tfscale.fit.unsynchronised import trains_apart

logger = logging.getLogger("tfscale")


class StopOfGroups(keras.callbacks.Callback):
    """Puts off a stop that one rank decided on until all ranks know of it.

    Groups exchange nothing between two averages, so a rank that stopped at once would leave the
    others some steps ahead. Its wish travels with the next average, behind which all stop; where
    the epoch ends before, they stop there. In cycles of `backward_passes_per_step` a rank stops
    before the batch that exchanges, which tells the others. `put_off_stops` puts this callback
    behind all others.
    """

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Put off a stop, or stop if that is agreed."""
        average = getattr(self.model.optimizer, "group_average", None)
        progress = progress_of(self.model)
        if progress.asks_each_step or progress.is_over:
            return
        if average is None:  # all ranks train together still, or average where epochs end
            self._wait_for_exchange()
            return
        if bool(average.must_stop.numpy()):
            self.model.stop_training = True
        elif self.model.stop_training:
            logger.info("Training stops behind the next average of the groups.")
            self.model.stop_training = False
            average.wants_to_stop.assign(True)

    def _wait_for_exchange(self) -> None:
        progress = progress_of(self.model)
        is_apart = trains_apart()
        may_stop = not is_apart and cycles.may_stop(self.model)
        if may_stop or runtime.num_given_up():  # it is told, or was
            self.model.stop_training = self.model.stop_training or progress.wants_to_stop
        elif self.model.stop_training:
            if is_apart and not progress.wants_to_stop:
                logger.info("Training stops where the epoch ends.")
            self.model.stop_training = False
            progress.wants_to_stop = True


def put_off_stops(model: keras.Model) -> None:
    """Put a `StopOfGroups` behind the callbacks of the `fit` that begins."""
    stop = StopOfGroups()
    stop.set_model(model)
    put_last(stop)
