"""One process: nothing to exchange, no thread, no MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tensorflow as tf

from tfscale.comm.backends.base import Call, MarkKind, ReduceOp, Scaling, WaitingBackend


class SingleBackend(WaitingBackend):
    """The backend of a job with one rank. Results are the inputs, scaled where asked for."""

    name = "single"
    has_marks = True
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    cross_rank = 0
    cross_size = 1

    def __init__(self) -> None:
        """Start without any group but that of the one rank."""
        self._n_groups = 1

    def allreduce(
        self, tensors: Sequence[tf.Tensor], call: Call, op: ReduceOp, scaling: Scaling
    ) -> list[tf.Tensor]:
        """Scale each tensor."""
        factor = scaling.prescale * scaling.postscale
        if factor == 1.0:
            return [tf.identity(t) for t in tensors]
        return [tf.cast(tf.cast(t, tf.float64) * factor, t.dtype) for t in tensors]

    def allgather(self, tensor: tf.Tensor, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the tensor and its number of rows."""
        return tf.identity(tensor), tf.shape(tensor, tf.int64)[:1]

    def alltoall(
        self, tensor: tf.Tensor, splits: tf.Tensor, call: Call
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the tensor and its number of rows."""
        return tf.identity(tensor), tf.identity(splits)

    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        """Return the tensor."""
        return tf.identity(tensor)

    def reducescatter(
        self, tensor: tf.Tensor, call: Call, op: ReduceOp, scaling: Scaling
    ) -> tf.Tensor:
        """Scale the tensor."""
        return self.allreduce([tensor], call, op, scaling)[0]

    def add_group(self, ranks: Sequence[int]) -> int:
        """Count groups."""
        self._n_groups += 1
        return self._n_groups - 1

    def mark(self, kind: MarkKind) -> None:
        """Nobody to tell."""

    def num_given_up(self) -> int:
        """Nothing is ever given up."""
        return 0

    def start_incarnation(self, number: int) -> None:
        """Nothing is left on the wire."""

    def abort(self, code: int) -> None:
        """End this process."""
        sys.exit(code)

    def fail(self, why: str) -> None:
        """There is no other rank."""

    def close(self) -> bool:
        """Nothing to leave."""
        return True
