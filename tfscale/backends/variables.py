"""Parameters that are gathered, and what backends do that cannot leave a gather under way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfscale.backends.base import Call, ReduceOp, Scaling
from tfscale.plan.segments import SegmentedBucket

if TYPE_CHECKING:
    from tfscale.backends.base import Backend


def raw_variable(variable: Any) -> Any:
    """Return TensorFlow's variable behind one of Keras's, without waiting for its value.

    Args:
        variable: A Keras variable, or a TensorFlow variable, which is returned as it is.
    """
    return variable._value if isinstance(variable, keras.Variable) else variable


def gather_and_assign(
    backend: Backend,
    pieces: Sequence[tf.Tensor],
    variables: Sequence[Any],
    layout: SegmentedBucket,
    call: Call,
) -> None:
    """Do what `post_gather` does where nothing may be left under way: wait, then assign.

    Args:
        backend: Who gathers.
        pieces: This rank's pieces, as `layout.pieces` names them.
        variables: One per entry of `layout.indices`.
        layout: How the variables are cut.
        call: Who takes part.
    """
    flat = [tf.reshape(piece, [-1]) for piece in pieces]
    own = tf.concat(flat, 0) if flat else tf.zeros([0], layout.dtype)
    gathered, _ = backend.allgather(own, call)
    parts: dict[int, list[tf.Tensor]] = {index: [] for index in layout.indices}
    begin = 0
    for rank in range(call.group.size):
        for piece in layout.pieces(rank):
            parts[piece.variable].append(gathered[begin : begin + piece.count])
            begin += piece.count
    raw = [raw_variable(v) for v in variables]
    # A gather posted before would give the variables its values after these.
    backend.await_variables([v.handle for v in raw], is_write=True)
    for index, shape, variable in zip(layout.indices, layout.shapes, raw, strict=True):
        if math.prod(shape) > 0:
            variable.assign(tf.reshape(tf.concat(parts[index], 0), shape))


class WaitingBackend:
    """The operations on shards, made of those that every backend has; waits in each."""

    def scatter_reduce(
        self: Any,
        tensors: Sequence[tf.Tensor],
        counts: Sequence[int],
        call: Call,
        op: ReduceOp,
        scaling: Scaling,
    ) -> tf.Tensor:
        """Reduce the elements of all tensors; keep those of this member, though all travel."""
        flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
        begin = sum(counts[: call.group.rank])
        reduced = self.allreduce([flat], call, op, scaling)[0]
        return reduced[begin : begin + counts[call.group.rank]]

    def post_gather(
        self: Any,
        pieces: Sequence[tf.Tensor],
        variables: Sequence[Any],
        layout: SegmentedBucket,
        call: Call,
    ) -> None:
        """Give variables the values that the members' pieces make up; waits for them."""
        gather_and_assign(self, pieces, variables, layout, call)

    def await_variables(self, handles: Sequence[tf.Tensor], is_write: bool = False) -> None:
        """Nothing is ever under way."""

    def num_pending(self) -> int:
        """Nothing is ever under way."""
        return 0

    def drain(self) -> None:
        """Nothing is ever under way."""
