"""Learning rates that follow the epoch, and the velocities that remember them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.callbacks.base import Callback
from tfscale.config import ConfigError
from tfscale.internals.keras import rate_of
from tfscale.internals.optimizers import update_rule
from tfscale.optimizer.lars import LARS

Multiplier = Callable[[float], float]
# Rules whose velocities add up steps, each times the rate of then. Muon's, which are called
# momentums too, add up gradients.
_WITH_RATES_INSIDE = (keras.optimizers.SGD, keras.optimizers.RMSprop, LARS)


class LearningRateScheduleCallback(Callback):
    """Set the learning rate to `initial_lr * multiplier(epoch)` while training.

    With momentum, `velocity = momentum * velocity - lr * gradient` remembers the old learning
    rate. Momentum correction multiplies the velocities by `new_lr / old_lr` whenever the rate
    changes. For that update this equals scaling the momentum itself by the same factor and
    restoring it afterwards, but it works although Keras 3 reads the momentum when it traces the
    training function. (With Nesterov momentum the look-ahead term keeps the plain momentum.)

    Args:
        initial_lr: Learning rate that the multiplier refers to.
        multiplier: A number m, meaning m ** (epoch - start_epoch), or a function of the epoch.
        start_epoch: First epoch, counted from 0, in which the callback acts.
        end_epoch: First epoch in which it does not act any more; None for no end.
        staircase: Whether the rate changes at the first batch of each epoch only. Otherwise it
            changes at every batch, or once per execution under `steps_per_execution`, and the
            multiplier is given fractions of epochs, those of the batch that comes. A multiplier
            that is a number is always a staircase.
        momentum_correction: Whether to correct the momentum; see above.
        steps_per_epoch: Batches per epoch where `staircase` is False; by default what `fit` knows.

    Raises:
        ConfigError: When training begins, if the optimizer's learning rate is a schedule, or
            the number of steps per epoch is needed and unknown.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), section 3.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Multiplier,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = _as_function(multiplier, start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._variable: Rate | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse what the callback cannot control."""
        super().on_train_begin(logs)
        self._variable = None
        rate = rate_of(update_rule(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                f"{type(self).__name__} sets the learning rate, so the optimizer's must be a "
                f"number. Received: learning_rate={rate!r}. Create the optimizer with a float, "
                "or use the LearningRateSchedule without this callback."
            )
        if not self.staircase:
            self._steps()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate, and correct the velocities where it changed."""
        super().on_train_batch_begin(batch, logs)
        is_over = self.end_epoch is not None and self._epoch >= self.end_epoch
        if self._epoch < self.start_epoch or is_over or (self.staircase and batch > 0):
            return
        self._set_rate_of_batch(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs as `lr`."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = self._rate()

    def _steps(self) -> int:
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ConfigError(
                f"{type(self).__name__} needs the number of batches per epoch. Received: "
                "steps_per_epoch=None and data of unknown length. Pass steps_per_epoch."
            )
        return int(steps)

    def _rate(self) -> float:
        return self._rate_of(self.model).value()

    def _rate_of(self, model: keras.Model) -> Rate:
        if self._variable is None:
            self._variable = Rate(model, self.momentum_correction)
        return self._variable

    def _set_rate_of_batch(self, batch: int) -> None:
        fraction = 0.0 if self.staircase else batch / self._steps()
        self._set_rate(self.initial_lr * self.multiplier(self._epoch + fraction))

    def _set_rate(self, rate: float) -> None:
        self._rate_of(self.model).set(rate)


def _as_function(multiplier: float | Multiplier, start_epoch: int) -> Multiplier:
    if callable(multiplier):
        return multiplier
    base = float(multiplier)
    return lambda epoch: base ** (epoch - start_epoch)


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
