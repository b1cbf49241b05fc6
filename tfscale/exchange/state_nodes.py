"""A sharded optimizer as tf.train.Checkpoint sees it: with the variables of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as TensorCallable

from tfscale.exchange.kept_state import KeptState

_VALUE = "VARIABLE_VALUE"  # what TensorFlow calls the value of a variable in a checkpoint


class _Slot(tf.__internal__.tracking.Trackable):
    """A variable of the optimizer, whole: gathered when it is saved, cut when it is restored."""

    def __init__(self, kept: KeptState, variable: Any) -> None:
        self._kept, self._variable = kept, variable

    @property
    def _index(self) -> int:
        return self._kept.state.number(self._variable)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        def read() -> tf.Tensor:
            return tf.convert_to_tensor(self._kept.read("writing a checkpoint")[self._index])

        device = self._variable.value.device
        return {_VALUE: TensorCallable(read, tf.as_dtype(self._variable.dtype), device)}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        self._kept.load([np.asarray(restored_tensors[_VALUE])], self._index, keeps=False)


class _Node(tf.__internal__.tracking.Trackable):
    """An object of the optimizer's, a list of slots for example."""

    def __init__(self, nodes: StateNodes, wrapped: Any) -> None:
        self._nodes, self._wrapped = nodes, wrapped

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        return self._nodes.children(self._wrapped, save_type, **options)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        del cached_dependencies
        return self._trackable_children().get(name)


class StateNodes:
    """Puts complete variables in the place of parts, and the model's in the place of pieces."""

    def __init__(self, kept: KeptState) -> None:
        """Find what must be replaced.

        Args:
            kept: The complete state of an optimizer that was built on pieces.
        """
        self._replaced: dict[int, Any] = dict(kept.state.whole_variables())
        for variable in kept.state.parts:
            self._replaced[id(variable)] = _Slot(kept, variable)
        self._nodes: dict[int, tuple[Any, _Node]] = {}

    def children(self, owner: Any, save_type: str, **options: Any) -> dict[str, Any]:
        """Return the children of one of the optimizer's objects, replaced where needed.

        Args:
            owner: The optimizer, or an object below it.
            save_type: Of TensorFlow; saved models get what is there.
            **options: Of TensorFlow.
        """
        found = owner._trackable_children(save_type, **options)
        if save_type != "checkpoint":
            return found
        return {name: self._replace(child) for name, child in found.items()}

    def _replace(self, child: Any) -> Any:
        if id(child) in self._replaced:
            return self._replaced[id(child)]
        if isinstance(child, tf.Module | tf.Variable) or not self._holds_parts(child):
            return child
        # The child is kept with its node, so that its id stays its own.
        return self._nodes.setdefault(id(child), (child, _Node(self, child)))[1]

    def _holds_parts(self, owner: Any) -> bool:
        below = owner._trackable_children("checkpoint").values()
        return any(id(c) in self._replaced or self._holds_parts(c) for c in below)
