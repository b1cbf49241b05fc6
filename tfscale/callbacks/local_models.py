"""Local SGD between epochs: when groups part, how long they stay apart, what others see of them."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from tfscale.callbacks.base import BeforeValidation
from tfscale.comm import collectives, runtime
from tfscale.comm.runtime import Sum
from tfscale.exchange.local_sgd import AdaptiveInterval, LocalSGD
from tfscale.fit.preparation import prepare
from tfscale.internals.keras import steps_until
from tfscale.internals.optimizers import optimizer_of
from tfscale.optimizer.distributed import distributed_of

logger = logging.getLogger("tfscale")


class LocalModels(BeforeValidation):
    """Show validation, callbacks and files the average of the groups' models.

    Before `fit` validates, the groups' parameters are averaged into a copy, which stays in the
    model until the next epoch begins; then each group goes on with its own. After training all
    ranks hold the average. The callback also starts groups that begin later
    (`LocalSGD(start=...)`) and sets an interval that adapts.

    Collective: all ranks must pass it to `fit`, at the same place. The callback
    `BroadcastGlobalVariablesCallback` contains one; without local SGD it does nothing.
    """

    shows_averages = True

    def __init__(self) -> None:
        super().__init__()
        self._own: list[np.ndarray] | None = None
        self._highest_rate: float | None = None
        self._first_loss: float | None = None
        self._backup: dict[str, Any] | None = None

    @property
    def _strategy(self) -> Any:
        distributed = distributed_of(optimizer_of(self.model))
        strategy = None if distributed is None else distributed.strategy
        return strategy if isinstance(strategy, LocalSGD) and not runtime.is_single() else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget an earlier `fit`."""
        super().on_train_begin(logs)
        self._own, self._first_loss, self._highest_rate = None, None, None
        if self._strategy is not None:
            self.session.stop_together()
        if self._backup is not None:
            self._highest_rate, self._first_loss = self._backup["rate"], self._backup["loss"]
            self._backup = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Go on with the own model; form groups if that is due."""
        super().on_epoch_begin(epoch, logs)
        if self._strategy is None or self.session.is_over:
            return  # with the average in the model, if another rank has stopped
        self._restore()
        start = self._strategy.start
        if self._waits and isinstance(start, int) and epoch >= start:
            self._start_groups()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Form groups behind an epoch's first step at a lower rate, which all have set by then."""
        super().on_train_batch_end(batch, logs)
        is_first = steps_until(self.model, batch) <= self.model.steps_per_execution
        if not is_first or self.is_void or not self._waits:
            return
        if self._strategy.start == "after_first_decay":
            has_decayed = np.int64(self._has_decayed())
            if int(collectives.allreduce(has_decayed, op=Sum, name="decays of the rate")):
                self._start_groups()

    @property
    def _waits(self) -> bool:
        return self._strategy is not None and self.model.optimizer.waits_for_groups

    def _start_groups(self) -> None:
        self.model.optimizer.start_groups()
        prepare(self.model)
        self.model.make_train_function(force=True)

    def act(self) -> None:
        """Put the average into the model."""
        average = self.session.group_average
        if self._strategy is not None and average is not None:
            self._own = self.model.optimizer.show_average()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adapt the interval."""
        super().on_epoch_end(epoch, logs)
        strategy = self._strategy
        if strategy is not None:  # a rate that was trained with: that of a warm-up rises first
            self._highest_rate = max(self._rate(), self._highest_rate or 0.0)
        average = self.session.group_average
        if strategy is None or average is None or self.is_void:
            return
        if isinstance(strategy.interval, AdaptiveInterval) and logs and "loss" in logs:
            loss = float(collectives.allreduce(np.float64(logs["loss"]), name="loss"))
            if self._first_loss is None and math.isfinite(loss) and loss > 0:
                self._first_loss = loss
            interval = int(average.interval.numpy())
            new = strategy.interval.after(interval, loss, self._first_loss or loss)
            logger.info("Loss %.4g: groups average every %d steps.", loss, new)
            average.interval.assign(new)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the average in all ranks' models."""
        super().on_train_end(logs)
        average = self.session.group_average
        if self._own is not None and average is not None:
            average.start_from_here()
        self._own = None

    def backup_state(self) -> dict[str, Any]:
        """Return what coming decisions are compared with."""
        return {"rate": self._highest_rate, "loss": self._first_loss}

    def restore_state(self, state: dict[str, Any], epoch: int) -> None:
        """Go on from a backup when training begins."""
        del epoch
        self._backup = state

    def _restore(self) -> None:
        if self._own is not None:
            self.model.optimizer.set_own(self._own)
            self._own = None

    def _rate(self) -> float:
        return float(np.asarray(self.model.optimizer.learning_rate))

    def _has_decayed(self) -> bool:
        highest = self._highest_rate
        return highest is not None and self._rate() < 0.999 * highest
