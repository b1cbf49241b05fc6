"""DistributedGradientTape: gradients reduced over all ranks, for custom training loops."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
import wrapt

from tfscale.comm.compression import Compression, refuse_quantized
from tfscale.comm.runtime import Average, ProcessSet, global_process_set
from tfscale.exchange.base import resolve
from tfscale.exchange.executor import Executor, Request
from tfscale.exchange.plan import GradientOptions


class DistributedGradientTape(wrapt.ObjectProxy):
    """A tf.GradientTape whose `gradient` returns gradients reduced over all ranks.

    All other attributes are those of the tape.

    Examples:
        >>> tfscale.init()
        >>> weight = tf.Variable([1.0, 2.0])
        >>> with tfscale.DistributedGradientTape(tf.GradientTape()) as tape:
        ...     loss = tf.reduce_sum(weight**2)
        >>> tape.gradient(loss, weight).numpy().tolist()  # the mean of all ranks' gradients
        [2.0, 4.0]
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: str = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        exchange: Any = "allreduce",
    ) -> None:
        """Wrap a tape; arguments as for `DistributedOptimizer`.

        Args:
            gradtape: The tape, before or after its `with` block.
            device_dense: Ignored; TensorFlow places the ops.
            device_sparse: Ignored.
            compression: The dtype on the wire.
            sparse_as_dense: Make sparse gradients dense before they are sent.
            op: Average or Sum.
            gradient_predivide_factor: Divides gradients before the sum.
            num_groups: Number of buckets of an allreduce; 0 chooses by size.
            groups: Number of buckets, or lists of variables that are sent together.
            process_set: The ranks that take part.
            scale_local_gradients: Divide gradients of local variables by the number of ranks.
            exchange: The strategy.

        Raises:
            ConfigError: An argument is invalid.
        """
        super().__init__(gradtape)
        refuse_quantized(compression, "a tape")
        options = GradientOptions(
            op=op,
            predivide=gradient_predivide_factor,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            num_groups=num_groups,
            groups=groups,
        )
        request = Request(resolve(exchange), options, process_set, scale_local_gradients)
        self._self_executor = Executor.of(request, request.strategy.whole())

    def __enter__(self) -> DistributedGradientTape:
        """Start recording."""
        self.__wrapped__.__enter__()
        return self

    def register_local_var(self, variable: Any) -> None:
        """Do not exchange the gradient of a variable."""
        self._self_executor.request.local.add(variable)

    def register_local_source(self, source: Any) -> None:
        """Do not exchange the gradient of a variable; Horovod's name of the method."""
        self.register_local_var(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return gradients reduced over all ranks.

        Args:
            target: Tensors to differentiate.
            sources: Variables, in any structure.
            output_gradients: As in TensorFlow.
            unconnected_gradients: As in TensorFlow.

        Returns:
            One gradient per source, in the same structure.

        Raises:
            ExchangeError: Communication failed.
        """
        flat = tf.nest.flatten(sources)
        # Keras's variables are no tape sources; the tensors in them are.
        raw = [v.value if isinstance(v, keras.Variable) else v for v in flat]
        gradients = self.__wrapped__.gradient(target, raw, output_gradients, unconnected_gradients)
        reduced = self._self_executor.reduce(gradients, flat)
        return tf.nest.pack_sequence_as(sources, reduced.gradients)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return local and shared gradients separately, as Horovod does.

        Args:
            target: Tensors to differentiate.
            sources: A list of variables.
            output_gradients: As in TensorFlow.
            use_generic_names: Ignored.

        Returns:
            Pairs of source and gradient: those of local sources, and the others, in order.

        Raises:
            ExchangeError: Communication failed.
        """
        del use_generic_names
        gradients = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, gradients, strict=True))
        is_local = self._self_executor.is_local
        return [p for p in pairs if is_local(p[0])], [p for p in pairs if not is_local(p[0])]


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **options: Any
) -> DistributedGradientTape:
    """Wrap a tape; the gradients of some layers stay local to each rank.

    Args:
        gradtape: The tape, before or after its `with` block.
        *args: As for `DistributedGradientTape`.
        local_layers: A layer or a list of layers whose gradients are not exchanged.
        **options: As for `DistributedGradientTape`.

    Returns:
        The wrapped tape.

    Raises:
        ConfigError: `local_layers` has objects that are not Keras layers.

    Examples:
        >>> tfscale.init()
        >>> layers = [keras.layers.Dense(units, use_bias=False) for units in (2, 1)]
        >>> model = keras.Sequential([keras.Input((3,)), *layers])
        >>> with tf.GradientTape() as plain:
        ...     loss = tf.reduce_sum(model(tf.ones([4, 3])))
        >>> tape = tfscale.PartialDistributedGradientTape(plain, local_layers=layers[1])
        >>> local, shared = tape.get_local_and_global_gradients(loss, model.trainable_variables)
        >>> [tuple(gradient.shape) for _, gradient in local + shared]
        [(2, 1), (3, 2)]
    """
    wrapped = DistributedGradientTape(gradtape, *args, **options)
    wrapped._self_executor.request.local.add_layers(local_layers)
    return wrapped
