"""Nodes of tf.train.Checkpoint, which TensorFlow finds by private methods of objects.

Checked with TensorFlow 2.18 and 2.21: `tf.__internal__.tracking.Trackable`, its methods
`_trackable_children`, `_lookup_dependency`, `_serialize_to_tensors` and `_restore_from_tensors`;
`tensor_callable.Callable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint.tensor_callable import Callable as TensorCallable

_VALUE = "VARIABLE_VALUE"  # TensorFlow's name of the value of a variable in a checkpoint


class ValueNode(tf.__internal__.tracking.Trackable):
    """A node for a whole variable, whose value other functions read and restore."""

    def __init__(
        self, variable: Any, read: Callable[[], Any], restore: Callable[[np.ndarray], None]
    ) -> None:
        """`variable` has the dtype and the device of the value."""
        self._variable, self._read, self._restore = variable, read, restore

    def _serialize_to_tensors(self) -> dict[str, Any]:
        def read() -> tf.Tensor:
            return tf.convert_to_tensor(self._read())

        device = self._variable.value.device
        return {_VALUE: TensorCallable(read, tf.as_dtype(self._variable.dtype), device)}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> None:
        self._restore(np.asarray(restored_tensors[_VALUE]))


class ReplacingNode(tf.__internal__.tracking.Trackable):
    """An object in a checkpoint, with other objects in the place of some below it.

    `replaced` has objects by their `id`, each with what stands for it. The object is kept so that
    its id stays its own.
    """

    def __init__(self, owner: Any, replaced: dict[int, tuple[Any, Any]]) -> None:
        self._owner, self._replaced = owner, replaced

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        children = self._owner._trackable_children(save_type, **options)
        if save_type != "checkpoint":
            return children
        return {name: self._replace(child) for name, child in children.items()}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        del cached_dependencies
        return self._trackable_children().get(name)

    def _replace(self, child: Any) -> Any:
        is_known = id(child) in self._replaced or isinstance(child, tf.Module | tf.Variable)
        if not is_known and self._holds_replaced(child):
            self._replaced[id(child)] = child, ReplacingNode(child, self._replaced)
        return self._replaced.get(id(child), (child, child))[1]

    def _holds_replaced(self, owner: Any) -> bool:
        below = owner._trackable_children("checkpoint").values()
        return any(id(c) in self._replaced or self._holds_replaced(c) for c in below)


class Represented:
    """An object in whose place another one stands in checkpoints."""

    def in_checkpoint(self, restores: bool) -> Any:
        """Return the object that stands for this one, when it is saved or when it is restored."""

    def _trackable_children(self, save_type: str = "checkpoint", **options: Any) -> dict[str, Any]:
        return self.in_checkpoint(restores=False)._trackable_children(save_type, **options)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        values = self.in_checkpoint(restores=True)
        return values._lookup_dependency(name, cached_dependencies)
