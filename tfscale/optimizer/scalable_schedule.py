"""Learning rate schedule that follows a change of the batch size."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
import wrapt

from tfscale.config import ConfigError


class ScalableSchedule(wrapt.ObjectProxy):
    """A LearningRateSchedule that follows samples instead of steps, times a factor.

    With a batch twice as large, an epoch has half as many steps, and a schedule that counts steps
    would be late. The wrapped schedule is therefore evaluated at step
    `progress + (step - since) * stretch`, where `stretch` is the present batch size over the first
    one and `progress` the value at step `since`, the last change. The result is multiplied by
    `scale`. Until `rescale` is called, the rate is that of the wrapped schedule.

    A transparent proxy: a saved model holds the schedule inside and loads without tfscale.

    ```python
    optimizer = keras.optimizers.SGD(tfscale.ScalableSchedule(schedule))
    ```

    Examples:
        >>> schedule = keras.optimizers.schedules.PiecewiseConstantDecay([100], [0.5, 0.25])
        >>> rate = tfscale.ScalableSchedule(schedule)
        >>> float(rate(60))
        0.5
        >>> rate.rescale(scale=2.0, stretch=2.0, step=50)  # the batch doubles after 50 steps
        >>> float(rate(60)), float(rate(80))  # as many samples as 70 and 110 steps had before
        (1.0, 0.5)
    """

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule) -> None:
        """Wrap a schedule.

        Args:
            schedule: Counted in steps of the first batch size.

        Raises:
            ConfigError: `schedule` is not a LearningRateSchedule, or is wrapped already.
        """
        is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
        if not is_schedule or type(schedule) is ScalableSchedule:
            raise ConfigError(
                "schedule must be a Keras LearningRateSchedule. Received: "
                f"{type(schedule).__name__}. A learning rate that is a number needs no wrapper."
            )
        super().__init__(schedule)
        # scale, stretch, since, progress at since: float64 counts steps exactly.
        self._self_values = tf.Variable([1.0, 1.0, 0.0, 0.0], dtype=tf.float64, trainable=False)

    def __call__(self, step: Any) -> Any:
        """Return the rate of a step.

        Args:
            step: Updates made so far.
        """
        values = tf.convert_to_tensor(self._self_values)
        progress = values[3] + (tf.cast(step, tf.float64) - values[2]) * values[1]
        rate = tf.convert_to_tensor(self.__wrapped__(tf.cast(progress, tf.float32)))
        return rate * tf.cast(values[0], rate.dtype)

    def rescale(self, scale: float, stretch: float, step: int) -> None:
        """Change `scale` and `stretch` from a step on.

        Args:
            scale: Factor of the rate.
            stretch: Present batch size over the first one, greater than 0.
            step: Updates made so far.
        """
        _, old_stretch, since, progress = self.state()
        progress += (step - since) * old_stretch
        self.restore([scale, stretch, float(step), progress])

    @property
    def scale(self) -> float:
        """The present factor of the rate."""
        return self.state()[0]

    def state(self) -> list[float]:
        """Return the values for `restore`."""
        return [float(value) for value in self._self_values.numpy()]

    def restore(self, state: list[float]) -> None:
        """Resume from a result of `state`."""
        self._self_values.assign(state)

    def __copy__(self) -> ScalableSchedule:
        """Wrap the same schedule, with `scale` and `stretch` reset."""
        return ScalableSchedule(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalableSchedule:
        """Wrap the same schedule, which has no state, with `scale` and `stretch` reset."""
        return ScalableSchedule(self.__wrapped__)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the schedule inside."""
        return self.__wrapped__.__reduce_ex__(protocol)
