"""Learning rates that follow the epoch: schedule, warm-up and scaling for large batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.callbacks.base import Callback
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.internals.keras import print_msg
from tfscale.internals.optimizers import n_updates, rate_of, update_rule
from tfscale.internals.traits import Phase
from tfscale.measure.growth import RATE_RULES, RateRule
from tfscale.optimizer.lars import LARS
from tfscale.optimizer.scalable_schedule import ScalableSchedule

Multiplier = Callable[[float], float]
# Update rules whose velocities sum up past steps, each multiplied by the rate of its time, and the
# name of that attribute. Muon's momentums sum up gradients, and are not among them.
_VELOCITIES: dict[type, str] = {
    keras.optimizers.SGD: "momentums",
    keras.optimizers.RMSprop: "_momentums",
    LARS: "velocities",
}


class LearningRateScheduleCallback(Callback):
    """Set the learning rate to `initial_lr * multiplier(epoch)` while training.

    With momentum, `velocity = momentum * velocity - lr * gradient` remembers the old learning rate.
    Momentum correction multiplies the velocities by `new_lr / old_lr` whenever the rate changes.
    For that update this equals scaling the momentum itself by the same factor and restoring it
    afterwards, and works in Keras 3, which reads the momentum when it traces the training function.
    (With Nesterov momentum the look-ahead term keeps the plain momentum.)

    Args:
        initial_lr: Learning rate that the multiplier refers to.
        multiplier: A number m, meaning m ** (epoch - start_epoch), or a function of the epoch.
        start_epoch: First epoch, counted from 0, in which the callback acts.
        end_epoch: First epoch in which it no longer acts; None for no end.
        staircase: Whether the rate changes at the first batch of each epoch only. Otherwise it
            changes before every batch, or once per execution under `steps_per_execution`, and the
            multiplier receives the epoch with its fraction at that batch. A number as multiplier
            is always a staircase.
        momentum_correction: Whether to correct the momentum; see above.
        steps_per_epoch: Batches per epoch where `staircase` is False; None uses the number that
            `fit` knows.

    Raises:
        ConfigError: When training begins, if the optimizer's learning rate is a schedule, or
            the number of steps per epoch is needed and unknown.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), section 3.

    Examples:
        >>> tfscale.init()
        >>> rates, optimizer = [], tfscale.DistributedOptimizer(keras.optimizers.SGD(0.5))
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer, "mse")
        >>> decay = tfscale.callbacks.LearningRateScheduleCallback(0.5, 0.1, start_epoch=1)
        >>> note = keras.callbacks.LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: rates.append(float(optimizer.learning_rate))
        ... )
        >>> options = dict(epochs=4, callbacks=[decay, note], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> [round(rate, 3) for rate in rates]
        [0.5, 0.5, 0.05, 0.005]
    """

    phase = Phase.DECIDE
    _rate: Rate

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Multiplier,
        start_epoch: int = 0,
        end_epoch: float | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        def powers_from_start(epoch: float) -> float:
            return float(multiplier) ** (epoch - start_epoch)  # type: ignore[arg-type]

        super().__init__()
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else powers_from_start
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse a learning rate that the callback cannot control."""
        super().on_train_begin(logs)
        self._rate = Rate(self.model, self.momentum_correction)
        rate = rate_of(update_rule(self.model.optimizer))
        if not isinstance(rate, keras.Variable):
            raise ConfigError(
                f"{type(self).__name__} sets the learning rate, so the optimizer's must be a "
                f"number. Received: learning_rate={rate!r}. Create the optimizer with a float, "
                "or use the LearningRateSchedule without this callback."
            )
        if not self.staircase:
            self._steps()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate, and correct the velocities if it changed."""
        super().on_train_batch_begin(batch, logs)
        is_over = self.end_epoch is not None and self.epoch >= self.end_epoch
        if self.epoch < self.start_epoch or is_over or (self.staircase and batch > 0):
            return
        self._set_rate_of_batch(batch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs as `lr`."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = self._rate.value()

    def _steps(self) -> int:
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not steps:
            raise ConfigError(
                f"{type(self).__name__} needs the number of batches per epoch. Received: "
                "steps_per_epoch=None and data of unknown length. Pass steps_per_epoch."
            )
        return int(steps)

    def _set_rate_of_batch(self, batch: int) -> None:
        fraction = 0.0 if self.staircase else batch / self._steps()
        self._rate.set(self.initial_lr * self.multiplier(self.epoch + fraction))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate linearly from `initial_lr / factor` to `initial_lr`.

    In batch b of epoch e the multiplier is `(x * (factor - 1) / warmup_epochs + 1) / factor` with
    x = e + (b + 1) / steps_per_epoch, so that the last batch of the warm-up has the rate
    `initial_lr`. Under `steps_per_execution` the rate changes once per execution, to that of its
    first batch, and is `initial_lr` after the last epoch of the warm-up. By default the factor is
    the number of ranks, so with one process the rate is always `initial_lr`. For local SGD with G
    groups pass `initial_lr=G * lr, factor=G`, or the square root of G in both places.

    Args:
        initial_lr: Learning rate after the warm-up, already scaled by the number of ranks.
        warmup_epochs: Length of the warm-up in epochs, greater than 0.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: Batches per epoch; None uses the number that `fit` knows.
        verbose: 1 prints a line on rank 0 when the warm-up is over.
        factor: Ratio of the final rate to the first one; None for the number of ranks.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), section 2.2.

    Examples:
        >>> tfscale.init()
        >>> rates, optimizer = [], tfscale.DistributedOptimizer(keras.optimizers.SGD(0.4))
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer, "mse")
        >>> warmup = tfscale.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=3, factor=4)
        >>> note = keras.callbacks.LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: rates.append(float(optimizer.learning_rate))
        ... )
        >>> options = dict(epochs=4, callbacks=[warmup, note], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> [round(rate, 3) for rate in rates]
        [0.2, 0.3, 0.4, 0.4]
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        factor: float | None = None,
    ) -> None:
        def multiplier(epoch: float) -> float:
            total = runtime.size() if factor is None else factor
            reached = min(epoch + 1.0 / self._steps(), warmup_epochs)  # may end within an epoch
            return (reached * (total - 1) / warmup_epochs + 1.0) / total

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End the warm-up, if this was its last epoch."""
        is_last = self.end_epoch is not None and epoch < self.end_epoch <= epoch + 1
        if is_last and self.model.steps_per_execution > 1:
            # Its last batch had the rate of the first one of its execution.
            self._set_rate_of_batch(self._steps() - 1)
        super().on_epoch_end(epoch, logs)
        if self.verbose and is_last and runtime.rank() == 0:
            rate = self._rate.value()
            print_msg(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class LearningRateScaling(LearningRateScheduleCallback):
    """Scale a small batch's learning rate to a fixed large batch, with a gradual warm-up.

    The target is `initial_lr * batch_size / base_batch_size` ("linear"), or `initial_lr` times the
    root of that ratio ("sqrt"), or `initial_lr` ("none"). In batch b of warm-up epoch e the rate is
    `initial_lr + (target - initial_lr) * (e + b / steps) / warmup_epochs`; under
    `steps_per_execution` it changes once per execution. A target below `initial_lr` holds from the
    beginning. The rate does not depend on the number of ranks.

    Collective: all ranks must pass it to `fit`, with the same arguments.

    Args:
        initial_lr: Learning rate that suits a batch of `base_batch_size`.
        base_batch_size: Samples over all ranks that `initial_lr` was chosen for.
        batch_size: Samples over all ranks in this run.
        rule: "linear", "sqrt" or "none".
        warmup_epochs: Length of the warm-up in epochs; 0 for none.
        decay_epochs: Epochs, counted from 0; from each of them on the rate is multiplied by 0.1.

    Raises:
        ConfigError: An argument is out of its range; see also `LearningRateScheduleCallback`.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), sections 2.1 and 2.2; root scaling:
        Hoffer et al., Train longer, generalize better (2017).

    Examples:
        >>> tfscale.init()
        >>> rates, optimizer = [], tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1))
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer, "mse")
        >>> settings = dict(base_batch_size=32, batch_size=128, warmup_epochs=2)
        >>> scaling = tfscale.callbacks.LearningRateScaling(0.1, **settings)
        >>> note = keras.callbacks.LambdaCallback(
        ...     on_epoch_end=lambda epoch, logs: rates.append(float(optimizer.learning_rate))
        ... )
        >>> options = dict(epochs=4, callbacks=[scaling, note], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> [round(rate, 3) for rate in rates]
        [0.1, 0.25, 0.4, 0.4]
    """

    def __init__(
        self,
        initial_lr: float,
        base_batch_size: int,
        batch_size: int,
        rule: RateRule = "linear",
        warmup_epochs: int = 5,
        decay_epochs: Sequence[int] = (),
    ) -> None:
        if rule not in RATE_RULES or warmup_epochs < 0 or base_batch_size < 1 or batch_size < 1:
            raise ConfigError(
                "rule must be 'linear', 'sqrt' or 'none', batch sizes at least 1 and "
                f"warmup_epochs at least 0. Received: rule={rule!r}, batch_size={batch_size}, "
                f"base_batch_size={base_batch_size}, warmup_epochs={warmup_epochs}."
            )
        target = RATE_RULES[rule](batch_size / base_batch_size)

        def multiplier(epoch: float) -> float:
            if epoch < warmup_epochs and target > 1.0:
                return 1.0 + (target - 1.0) * epoch / warmup_epochs
            return target * math.prod(0.1 for begin in decay_epochs if begin <= epoch)

        super().__init__(initial_lr, multiplier, staircase=False)


class Rate:
    """Reads and sets the learning rate, a number, of a compiled model, and corrects velocities."""

    def __init__(self, model: keras.Model, momentum_correction: bool) -> None:
        self._optimizer = model.optimizer
        self._corrects = momentum_correction
        self._scale_slots: Any = None
        self._slots: list[keras.Variable] = []  # that it scales

    def value(self) -> float:
        """Return the present rate."""
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    def set(self, rate: float) -> None:
        """Set the rate, and correct the velocities if it changed."""
        old = self.value()
        self._optimizer.learning_rate = rate
        new = self.value()
        if old != 0.0 and new != old:
            self.correct(new / old)

    def correct(self, factor: float) -> None:
        """Multiply the velocities by `factor`, if momentum correction is on."""
        slots = _velocities(update_rule(self._optimizer)) if self._corrects else []
        if not slots:
            return
        if [id(s) for s in slots] != [id(s) for s in self._slots]:  # a new plan makes new ones
            self._slots = slots

            @tf.function
            def scale_slots(by: tf.Tensor) -> None:
                for slot in slots:
                    slot.assign(slot.value * tf.cast(by, slot.value.dtype))

            self._scale_slots = scale_slots
        self._scale_slots(tf.constant(factor, tf.float64))


class AdaptiveRate(Rate):
    """Sets a learning rate, or scales a `ScalableSchedule`, relative to the initial rate.

    The initial rate of `former`, of an earlier `fit`, is kept unless the rate has changed.
    """

    def __init__(
        self, model: keras.Model, momentum_correction: bool, former: AdaptiveRate | None = None
    ) -> None:
        super().__init__(model, momentum_correction)
        rate = rate_of(update_rule(self._optimizer))
        if not isinstance(rate, keras.Variable) and type(rate) is not ScalableSchedule:
            raise ConfigError(
                "learning_rate must be a number with AdaptiveBatchSize, which changes it. "
                f"Received: learning_rate={type(rate).__name__}. Use a number, or "
                "tfscale.ScalableSchedule(schedule)."
            )
        self._schedule = rate if type(rate) is ScalableSchedule else None
        self._initial: float | None = None  # read when the rate is first set, after any warm-up
        self._last: float | None = None  # that was set here
        if former is not None and former._last == self.value():  # unchanged since an earlier `fit`
            self._initial = former._initial

    def rescale(self, scale: float, stretch: float) -> None:
        """Scale the initial rate; a schedule also advances by `stretch` steps per update."""
        if self._schedule is None:
            if self._initial is None:
                self._initial = self.value()
            self.set(self._initial * scale)
            self._last = self.value()
            return
        before = self._schedule.state()
        if before[:2] != [scale, stretch]:
            # Keras calls the schedule with the number of micro-batches if it accumulates gradients.
            self._schedule.rescale(scale, stretch, n_updates(update_rule(self._optimizer)))
            if scale != before[0]:
                self.correct(scale / before[0])

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`."""
        schedule = None if self._schedule is None else self._schedule.state()
        return {"initial": self._initial, "schedule": schedule}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume where `state` was taken."""
        self._initial = state["initial"]
        if self._schedule is not None and state["schedule"] is not None:
            self._schedule.restore(state["schedule"])


def _velocities(optimizer: Any) -> list[keras.Variable]:
    """Return the slots that contain learning rates of earlier steps; none before it is built."""
    name = next((name for rule, name in _VELOCITIES.items() if isinstance(optimizer, rule)), None)
    return list(getattr(optimizer, name, ())) if name and optimizer.momentum else []
