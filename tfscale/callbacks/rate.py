"""The learning rate of a compiled model, and the velocities that remember it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.internals.optimizers import update_rule
from tfscale.optimizers import LARS

# Rules whose velocities add up steps, each times the rate of then. Muon's, which are called
# momentums too, add up gradients.
_WITH_RATES_INSIDE = (keras.optimizers.SGD, keras.optimizers.RMSprop, LARS)


class Rate:
    """Reads and sets a learning rate that is a number.

    Args:
        model: A compiled model.
        momentum_correction: Multiply the velocities by new / old whenever the rate changes; see
            `LearningRateScheduleCallback`.
    """

    def __init__(self, model: keras.Model, momentum_correction: bool) -> None:
        self._optimizer = model.optimizer
        self._corrects = momentum_correction
        self._scale_slots: Any = None
        self._slots: list[keras.Variable] = []  # that it scales

    def value(self) -> float:
        """Return the present rate."""
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def set(self, rate: float) -> None:
        """Set the rate, and correct the velocities where it changed."""
        old = self.value()
        self._optimizer.learning_rate = rate
        new = self.value()
        if old != 0.0 and new != old:
            self.correct(new / old)

    def correct(self, factor: float) -> None:
        """Multiply the velocities, where that is wanted and there are any.

        Args:
            factor: New learning rate divided by the old one.
        """
        slots = _velocities(update_rule(self._optimizer)) if self._corrects else []
        if not slots:
            return
        if [id(s) for s in slots] != [id(s) for s in self._slots]:  # a change of plan makes others
            self._slots = slots

            @tf.function
            def scale_slots(by: tf.Tensor) -> None:
                for slot in slots:
                    slot.assign(slot.value * tf.cast(by, slot.value.dtype))

            self._scale_slots = scale_slots
        self._scale_slots(tf.constant(factor, tf.float64))


def _velocities(optimizer: Any) -> list[keras.Variable]:
    """Return the slots that contain learning rates of earlier steps."""
    if not isinstance(optimizer, _WITH_RATES_INSIDE) or not optimizer.momentum:
        return []
    names = ("momentums", "_momentums", "velocities")  # SGD, RMSprop, LARS
    return list(next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), ()))
