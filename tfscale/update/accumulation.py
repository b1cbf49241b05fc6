"""Several backward passes per exchange and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.errors import ConfigError


class Accumulator:
    """Adds up gradients of `passes` batches and hands the sum on after the last one.

    The sums are reset by assignment, so that an infinite gradient of one cycle is gone in the
    next. Sparse gradients are added as dense ones.
    """

    def __init__(self, passes: int, is_mean: bool) -> None:
        """Keep the length of a cycle.

        Args:
            passes: Batches per cycle.
            is_mean: Divide the sum by `passes`.
        """
        self._passes = passes
        self._is_mean = is_mean
        self._sums: list[tf.Variable] | None = None
        self._count: tf.Variable | None = None
        self._built_for: list[tuple[int, bool]] = []
        self._restored: tuple[int, Sequence[np.ndarray]] | None = None

    @property
    def variables(self) -> list[tf.Variable]:
        """The sums, once there are some."""
        return self._sums or []

    def state(self) -> tuple[int, list[np.ndarray]] | None:
        """Return the batches seen and the sums of this rank, or None before the first batch."""
        if self._sums is None or self._count is None:
            return None
        return int(self._count.numpy()), [np.array(v.numpy()) for v in self._sums]

    def restore(self, count: int, sums: Sequence[np.ndarray]) -> None:
        """Go on where `state` was taken, now or once the first batch has told which sums there are.

        Args:
            count: Batches seen.
            sums: This rank's.
        """
        self._restored = count, sums
        if self._sums is not None:
            self._take_restored()

    def _take_restored(self) -> None:
        assert self._sums is not None and self._count is not None and self._restored is not None
        (count, sums), self._restored = self._restored, None
        self._count.assign(count)
        for variable, value in zip(self._sums, sums, strict=True):
            variable.assign(value)

    @property
    def n_batches(self) -> int:
        """Batches seen since the first one."""
        return 0 if self._count is None else int(self._count.numpy())

    def drop_cycle(self) -> int:
        """Forget the batches of a cycle that has not ended, and return how many they were."""
        if self._sums is None or self._count is None:
            return 0
        n_dropped = self.n_batches % self._passes
        self._count.assign_sub(n_dropped)
        for total in self._sums:
            total.assign(tf.zeros_like(total))
        return n_dropped

    def copy_empty(self) -> Accumulator:
        """Return one of the same length at the beginning of a cycle."""
        return Accumulator(self._passes, self._is_mean)

    def _build(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with tf.init_scope():
            self._built_for = _described(gradients, variables)
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._sums = [
                tf.Variable(tf.zeros(v.shape, g.dtype), trainable=False)
                for g, v in zip(gradients, variables, strict=True)
                if g is not None
            ]
            if self._restored is not None:
                self._take_restored()

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        iterations: Any,
        on_full: Callable[[list[Any]], None],
    ) -> None:
        """Add the gradients of one batch.

        Args:
            gradients: One per variable; None stays None.
            variables: What they belong to.
            iterations: The optimizer's; advanced here by the other batches of a cycle.
            on_full: Called in the graph with the sums (or means) after the last batch of a cycle;
                it advances `iterations` once they have arrived.
        """
        if self._sums is None or self._built_for != _described(gradients, variables):
            # Layers were frozen or freed since: a cycle of other variables begins.
            self._build(gradients, variables)
        sums, count = self._sums, self._count
        assert sums is not None and count is not None
        dense = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        added = [s.assign_add(g) for s, g in zip(sums, dense, strict=True)]
        places = iter(sums)
        targets = [None if g is None else next(places) for g in gradients]

        def full() -> None:
            factor = 1.0 / self._passes if self._is_mean else 1.0
            on_full([None if t is None else t.read_value() * factor for t in targets])
            for total in sums:
                total.assign(tf.zeros_like(total))
            # A batch whose exchange was given up, because another rank stopped, does not count.
            with tf.control_dependencies([tf.convert_to_tensor(iterations)]):
                count.assign_add(1)

        def other() -> None:
            iterations.assign_add(1)
            count.assign_add(1)

        if tf.executing_eagerly():
            full() if (int(count) + 1) % self._passes == 0 else other()
            return
        with tf.control_dependencies([a.op for a in added]):
            is_last = tf.equal((count.read_value() + 1) % self._passes, 0)
        tf.cond(is_last, _as_branch(full), _as_branch(other))


def _described(gradients: Sequence[Any], variables: Sequence[Any]) -> list[tuple[int, bool]]:
    return [(id(v), g is None) for g, v in zip(gradients, variables, strict=True)]


def refuse_replicated(exchange: Any) -> None:
    """Raise where layers would exchange in every pass.

    Args:
        exchange: How gradients travel.

    Raises:
        ConfigError: Its dense layers exchange activations.
    """
    if getattr(exchange, "replicated_dense", 0) or (
        getattr(exchange, "dense", "") in ("partial", "replicated")
    ):
        raise ConfigError(
            "Dense layers exchange activations in every backward pass. Received: "
            f"backward_passes_per_step with {exchange}. Use Chunked(replicated_dense=0) or "
            "Sharded(dense='weights')."
        )


def _as_branch(body: Callable[[], None]) -> Callable[[], tf.Tensor]:
    def branch() -> tf.Tensor:
        body()
        return tf.constant(0)

    return branch
