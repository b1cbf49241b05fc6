"""Accumulate gradients of several backward passes before each exchange and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm.runtime import Sum
from tfscale.config import ConfigError
from tfscale.exchange.base import Exchange
from tfscale.exchange.shards import name_of
from tfscale.exchange.states import Saved, SavedStates, Scope, copy_of
from tfscale.internals.optimizers import averages_begin_within, iterations_of
from tfscale.internals.trace import run_either


class _Cycle:
    """Sums of gradients for one set of variables."""

    def __init__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        self.variables = list(variables)  # kept alive, so that their ids stay unique
        self.has_gradient = [g is not None for g in gradients]
        with tf.init_scope():
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.sums = [
                tf.Variable(tf.zeros(v.shape, g.dtype), trainable=False)
                for g, v in zip(gradients, variables, strict=True)
                if g is not None
            ]

    def require_same(self, gradients: Sequence[Any]) -> None:
        has_gradient = [g is not None for g in gradients]
        if has_gradient == self.has_gradient:
            return
        i = next(i for i, had in enumerate(self.has_gradient) if had != has_gradient[i])
        raise ConfigError(
            "backward_passes_per_step needs gradients of the same variables in all batches. "
            f"Received: {'a' if has_gradient[i] else 'no'} gradient of "
            f"{name_of(self.variables[i])}, unlike the first batch. Let all layers take part in "
            "the loss of each batch."
        )

    def drop(self, passes: int) -> int:
        n_dropped = int(self.count.numpy()) % passes
        self.count.assign_sub(n_dropped)
        for total in self.sums:
            total.assign(tf.zeros_like(total))
        return n_dropped


class Accumulator:
    """Sums gradients of `passes` batches and passes the sum on after the last one.

    The sums are reset by assignment, so that an infinite gradient of one cycle does not remain in
    the next. Sparse gradients are added as dense ones. Each set of trained variables, for example
    before and after some are frozen, has its own cycle.
    """

    def __init__(self, passes: int, is_mean: bool, op: str) -> None:
        """Sum over cycles of `passes` batches, or average with `is_mean`.

        `op` is how the exchange reduces the sums of the ranks: Average or Sum.
        """
        self.passes = passes
        self.is_mean = is_mean
        self.op = op
        self._cycles: dict[tuple[int, ...], _Cycle] = {}
        self._current: _Cycle | None = None
        self._restored: tuple[int, Sequence[np.ndarray]] | None = None

    @property
    def variables(self) -> list[tf.Variable]:
        """The sums; empty before the first batch."""
        return [total for cycle in self._cycles.values() for total in cycle.sums]

    def saved(self, scope: Scope) -> Saved:
        """Copy the number of batches and the sums of the last cycle; nothing before the first."""
        del scope
        cycle = self._current
        if cycle is None:
            return Saved()
        sums = {f"sum/{i}": copy_of(total) for i, total in enumerate(cycle.sums)}
        return Saved(sums, {"accumulated": int(cycle.count.numpy())})

    def restored(self, saved: SavedStates) -> None:
        """Resume the cycle that was saved, now or, if there are no sums yet, at the first batch."""
        count, n_sums = saved.of(0).info["accumulated"], len(saved.of(0).series("sum"))
        if count:
            mode = "sum" if self.op == Sum else "mean"
            sums = [saved.share(f"sum/{i}", mode) for i in range(n_sums)]
            self._restored = count, sums
            if self._current is not None:
                self._take_restored(self._current)

    def _take_restored(self, cycle: _Cycle) -> None:
        assert self._restored is not None
        (count, sums), self._restored = self._restored, None
        cycle.count.assign(count)
        for variable, value in zip(cycle.sums, sums, strict=True):
            variable.assign(value)

    @property
    def n_waiting(self) -> int:
        """Batches seen since the last exchange."""
        return sum(int(c.count.numpy()) % self.passes for c in self._cycles.values())

    @property
    def is_before_exchange(self) -> bool:
        """Whether the next batch is the last of the cycle of the variables trained last."""
        if self._current is None:
            return False
        return int(self._current.count.numpy()) % self.passes == self.passes - 1

    def drop_cycle(self, iterations: Any) -> None:
        """Drop the batches since the last exchange, also from the optimizer's `iterations`."""
        iterations.assign_sub(sum(cycle.drop(self.passes) for cycle in self._cycles.values()))

    def _cycle_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> _Cycle:
        key = tuple(map(id, variables))
        if key not in self._cycles:
            self._cycles[key] = _Cycle(gradients, variables)
            if self._restored is not None:
                with tf.init_scope():
                    self._take_restored(self._cycles[key])
        self._cycles[key].require_same(gradients)
        return self._cycles[key]

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        rule: Any,
        on_full: Callable[[list[Any]], None],
    ) -> None:
        """Add the gradients of one batch, of which some may be None.

        All batches of a cycle but the last advance the `iterations` of the optimizer `rule` here,
        which is taken back if the update is skipped. `on_full` is called in the graph with the sums
        (or means) after the last batch; it advances `iterations` once the reduced gradients have
        arrived.
        """
        self._current = cycle = self._cycle_of(gradients, variables)
        sums, count = cycle.sums, cycle.count
        iterations = iterations_of(rule)
        dense = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        added = [s.assign_add(g) for s, g in zip(sums, dense, strict=True)]
        places = iter(sums)
        targets = [None if g is None else next(places) for g in gradients]

        def full() -> None:
            factor = 1.0 / self.passes if self.is_mean else 1.0
            before = tf.convert_to_tensor(iterations)
            with averages_begin_within(rule, self.passes):
                on_full([None if t is None else t.read_value() * factor for t in targets])
            for total in sums:
                total.assign(tf.zeros_like(total))
            # A cycle whose update was skipped does not count, or averages would begin too late.
            iterations.assign_sub((self.passes - 1) * tf.cast(iterations == before, before.dtype))
            # A batch whose exchange was given up, because another rank stopped, does not count.
            with tf.control_dependencies([tf.convert_to_tensor(iterations)]):
                count.assign_add(1)

        def other() -> None:
            iterations.assign_add(1)
            count.assign_add(1)

        with tf.control_dependencies([] if tf.executing_eagerly() else [a.op for a in added]):
            is_last = tf.equal((count.read_value() + 1) % self.passes, 0)
        run_either(is_last, full, other)


def refuse_accumulating(rule: Any) -> None:
    """Raise a ConfigError if Keras would accumulate gradients, too."""
    steps = rule.gradient_accumulation_steps
    if steps:
        raise ConfigError(
            "backward_passes_per_step excludes Keras's gradient_accumulation_steps. Received: "
            f"both, the latter {steps}. Multiply backward_passes_per_step by it and leave it out."
        )


def refuse_replicated(exchange: Exchange) -> None:
    """Raise a ConfigError if dense layers would exchange activations in every pass."""
    if exchange.needs_prepared:
        raise ConfigError(
            "backward_passes_per_step must be 1 with this exchange. Received: "
            f"backward_passes_per_step with {exchange}. Use Chunked(replicated_dense=0) or "
            "Sharded(dense='weights')."
        )
