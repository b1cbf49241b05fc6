"""The learning rate of a run with growing batches: a number, or a schedule that can be scaled."""

from __future__ import annotations

from typing import Any

import keras

from tfscale.callbacks.rate import Rate
from tfscale.internals.optimizers import update_rule
from tfscale.scalable_schedule import ScalableSchedule


class AdaptiveRate:
    """Sets the learning rate relative to the initial one.

    Args:
        model: A compiled model, whose rate is a number or a `ScalableSchedule`.
        momentum_correction: See `Rate`.
    """

    def __init__(self, model: keras.Model, momentum_correction: bool) -> None:
        self._optimizer = model.optimizer
        rate = update_rule(self._optimizer)._learning_rate
        self._schedule = rate if type(rate) is ScalableSchedule else None
        self._rate = Rate(model, momentum_correction)
        self._initial: float | None = None  # read when the rate is first set, after any warm-up
        self._last: float | None = None  # that was set here

    def begin_as(self, former: AdaptiveRate | None) -> None:
        """Begin with the initial rate of an earlier `fit`, unless the rate was changed since."""
        if former is not None and former._last == self._rate.value():
            self._initial = former._initial

    def set(self, scale: float, stretch: float) -> None:
        """Set the rate for the steps that come.

        Args:
            scale: Relative to the initial rate, or to what the schedule says.
            stretch: Present batch size over the first one; schedules go on by as many steps.
        """
        if self._schedule is None:
            if self._initial is None:
                self._initial = self._rate.value()
            self._rate.set(self._initial * scale)
            self._last = self._rate.value()
            return
        before = self._schedule.state()
        if before[:2] != [scale, stretch]:
            # What Keras asks the schedule with: micro-batches, where it accumulates gradients.
            step = int(keras.ops.convert_to_numpy(update_rule(self._optimizer)._iterations))
            self._schedule.rescale(scale, stretch, step)
            if scale != before[0]:
                self._rate.correct(scale / before[0])

    def value(self) -> float:
        """Return the present rate."""
        return self._rate.value()

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes."""
        schedule = None if self._schedule is None else self._schedule.state()
        return {"initial": self._initial, "schedule": schedule}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._initial = state["initial"]
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.restore(state["schedule"])
