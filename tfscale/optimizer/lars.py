"""LARS: a learning rate for each layer, from the ratio of its weights to its gradient.

Examples:
    >>> tfscale.init()
    >>> optimizer = tfscale.DistributedOptimizer(tfscale.LARS(learning_rate=2.0))
    >>> optimizer.name, float(optimizer.learning_rate)
    ('lars', 2.0)
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from tfscale.config import ConfigError
from tfscale.internals.optimizers import index_of

__all__ = ["LARS"]


@keras.saving.register_keras_serializable(package="tfscale")
class LARS(keras.optimizers.Optimizer):
    """SGD with momentum whose step in each layer is in proportion to the layer's weights.

    `trust = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon)`, then
    `velocity = momentum * velocity + learning_rate * trust * (g + weight_decay * w)` and
    `w = w - velocity`. Trust is 1 if `|w|` or `|g|` is 0. For excluded variables trust is 1 and
    `weight_decay` is 0.

    Source: You, Gitman, Ginsburg: Large batch training of convolutional networks, 2017, eqs. 4-6.

    Examples:
        >>> optimizer = tfscale.LARS(0.5, momentum=0.0, trust_coefficient=0.1)
        >>> kernel, bias = keras.Variable([[3.0, 4.0]]), keras.Variable([1.0])
        >>> optimizer.apply([tf.constant([[0.0, 2.0]]), tf.constant([1.0])], [kernel, bias])
        >>> kernel.numpy().round(3).tolist()  # trust is 0.1 * 5 / 2
        [[3.0, 3.75]]
        >>> bias.numpy().tolist()  # of one dimension: no trust
        [0.5]
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float = 0.0,
        epsilon: float = 1e-9,
        exclude_one_dimensional: bool = True,
        name: str = "lars",
        **kwargs: Any,
    ) -> None:
        """Create the optimizer.

        Args:
            learning_rate: A number or a schedule.
            momentum: At least 0 and less than 1.
            trust_coefficient: How far a layer may move relative to its weights; above 0.
            weight_decay: L2 regularisation inside the trust ratio; 0 or more.
            epsilon: Keeps the ratio finite.
            exclude_one_dimensional: Leave biases and the scales of normalisation at trust 1.
            name: Name of the optimizer.
            **kwargs: Clipping, averaging and accumulation, as for every Keras optimizer.

        Raises:
            ConfigError: A constant is out of its range.
        """
        if not 0 <= momentum < 1 or not trust_coefficient > 0 or weight_decay < 0:
            raise ConfigError(
                "LARS needs 0 <= momentum < 1, trust_coefficient > 0 and weight_decay >= 0. "
                f"Received: momentum={momentum}, trust_coefficient={trust_coefficient}, "
                f"weight_decay={weight_decay}."
            )
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        # Not Keras's own weight_decay, which is decoupled from the gradient.
        self.decay = weight_decay
        self.epsilon = epsilon
        self.exclude_one_dimensional = exclude_one_dimensional

    def build(self, variables: list[Any]) -> None:
        """Create a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        velocity = self.velocities[index_of(self, variable)]
        if not (self.exclude_one_dimensional and len(variable.shape) < 2):
            weights = ops.convert_to_tensor(variable)
            size, slope = (ops.sqrt(ops.sum(ops.square(x))) for x in (weights, gradient))
            # One sum of three: TensorFlow may reorder two additions differently on each rank.
            terms = [slope, self.decay * size, ops.cast(self.epsilon, slope.dtype)]
            bound = ops.sum(ops.stack(terms))
            trust = ops.where(
                ops.logical_and(size > 0, slope > 0), self.trust_coefficient * size / bound, 1.0
            )
            gradient = ops.cast(trust, variable.dtype) * (gradient + self.decay * weights)
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        config = super().get_config()
        config.update(
            momentum=self.momentum,
            trust_coefficient=self.trust_coefficient,
            weight_decay=self.decay,
            epsilon=self.epsilon,
            exclude_one_dimensional=self.exclude_one_dimensional,
        )
        return config
