"""Residuals of compressed gradients: what was not sent and is added to the next gradients."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import collectives, runtime
from tfscale.comm.backends.base import Group, Quantization, Quantized, Sparsity
from tfscale.comm.compression import (
    LossyCompressor,
    LowRankCompressor,
    QuantizedCompressor,
    SparseCompressor,
)
from tfscale.exchange.states import Saved, SavedStates, Scope, copy_of

logger = logging.getLogger("tfscale")

# Part of a training that is sent in more bits unless the user chose the first compressed step.
_LEAST_START, _START_SHARE = 500, 0.05

Update = tuple[tf.Variable, tf.Tensor]
Cuts = tuple[int, ...]  # where the part of each rank begins, and the end


@dataclass(frozen=True)
class Residual:
    """Variables of one exchanged parameter.

    The pending sum, in units of the reduced gradient, is `factor` times the sum of the ranks'
    `own`, plus the ranks' `owner` one after another.
    """

    parameter: Any  # kept alive, so that its id stays unique
    group: Group
    cuts: Cuts
    factor: float
    own: tf.Variable  # of this rank's gradient; zeros where another rank encodes it for the host
    owner: tf.Variable | None  # of this rank's part of the sum, flat; None if it is not rounded
    basis: Any = None  # of low rank: the second factor of the last sum; its scale does not matter

    def fold(self) -> None:
        """Move `owner` to `own`, which is encoded by the same rank; the pending sum stays."""
        if self.owner is not None:
            self.add(self.owner.numpy())
            self.owner.assign(tf.zeros_like(self.owner))

    def add(self, part: np.ndarray) -> None:
        """Add values to this rank's part of the pending sum."""
        value = np.array(self.own.numpy())
        begin, end = self.cuts[self.group.rank :][:2]
        value.reshape(-1)[begin:end] += np.reshape(part, -1) / self.factor
        self.own.assign(value)


@dataclass(frozen=True)
class Restored:
    """The residual of a parameter in a checkpoint: this rank's, or the pending sum of all ranks."""

    cuts: Cuts
    own: np.ndarray | None = None
    owner: np.ndarray | None = None
    basis: np.ndarray | None = None
    pending: np.ndarray | None = None


class Residuals:
    """The residuals of one optimizer.

    New values are kept by a step after its update, or not if the step is skipped.
    """

    def __init__(self, compression: LossyCompressor) -> None:
        """Create without variables: they are created when a gradient is first exchanged."""
        self.compression = compression
        self.n_steps: tf.Variable | None = None  # exchanges, if the first ones have more bits
        self._start: tf.Variable | None = None  # the first compressed one
        self._first_step = self._first_of_few = 0  # the values with which they are created
        self.expect(0)
        self._of: dict[int, Residual] = {}  # by the id of the parameter
        self._restored: dict[int, Restored] = {}

    @property
    def all(self) -> list[Residual]:
        """The residuals of all parameters."""
        return list(self._of.values())

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of all residuals."""
        return [v for r in self.all for v in (r.own, r.owner, r.basis) if v is not None]

    def expect(self, n_steps: int) -> None:
        """Record how many steps a `fit` will have; 0 if that is not known."""
        chosen = self.compression.start_step
        share = max(_LEAST_START, int(_START_SHARE * n_steps))
        self._first_of_few = share if chosen is None else chosen
        # A later fit must not return to 16 bits.
        start = self._start
        if self.n_steps is not None and start is not None and self.n_steps.numpy() < start.numpy():
            start.assign(self._first_of_few)

    # In the traced step

    def quantization(
        self,
        parameters: Sequence[Any],
        cuts: Sequence[Cuts],
        group: Group,
        factor: float,
        rounds_sum: bool,
    ) -> Quantization:
        """Return how to quantise the gradients of some parameters in this step.

        `cuts` are those of each parameter; `factor` is applied to the sum, which is quantised
        before it is sent if `rounds_sum`.
        """
        assert isinstance(self.compression, QuantizedCompressor)
        kept: list[Residual] = []
        if self.compression.error_feedback:
            pairs = zip(parameters, cuts, strict=True)
            kept = [self.of(p, group, c, factor, rounds_sum) for p, c in pairs]
        return Quantization(
            self.bits(),
            self.compression.block,
            tuple(cuts),
            [residual.own.read_value() for residual in kept],
            [residual.owner.read_value() for residual in kept if residual.owner is not None],
        )

    def coding(self, cuts: Sequence[Cuts]) -> Quantization | Sparsity:
        """Return how sums that are posted send parameters with these cuts.

        They read and write the variables of `kept`: see `Backend.post_coded`.
        """
        how = self.compression
        if isinstance(how, SparseCompressor):
            return Sparsity(how.share, how.chunk, how.decay, tuple(cuts))
        assert isinstance(how, QuantizedCompressor)
        return Quantization(self.bits(), how.block, tuple(cuts))

    def find(self, parameter: Any) -> Residual | None:
        """Return the residual of a parameter, if there is one."""
        return self._of.get(id(parameter))

    def kept(self, parameters: Sequence[Any]) -> list[tf.Variable]:
        """Return the variables of some parameters: first each `own`, then each `owner`."""
        residuals = [self._of[id(p)] for p in parameters if id(p) in self._of]
        owners = [r.owner for r in residuals if r.owner is not None]
        return [r.own for r in residuals] + owners

    def updates(self, parameters: Sequence[Any], sums: Quantized) -> list[Update]:
        """Return the residuals' next values after an exchange."""
        if not self.compression.error_feedback:
            return []
        kept = [self._of[id(p)] for p in parameters]
        owners = [residual.owner for residual in kept if residual.owner is not None]
        pairs = list(zip([residual.own for residual in kept], sums.errors, strict=True))
        return pairs + list(zip(owners, sums.owner_errors, strict=True))

    def alone(self, parameter: Any, gradient: Any, group: Group) -> tuple[Any, list[Update]]:
        """Add the pending sum of a checkpoint to a gradient that only this rank has."""
        is_known = id(parameter) in self._restored or id(parameter) in self._of
        if group.rank < 0 or not is_known:
            return gradient, []
        count = int(np.prod(parameter.shape))
        pending = self.of(parameter, group, (0, count), 1.0).own
        return gradient + tf.cast(pending, gradient.dtype), [(pending, tf.zeros_like(pending))]

    def count_step(self) -> list[Update]:
        """Return the update of the number of exchanges."""
        return [] if self.n_steps is None else [(self.n_steps, self.n_steps + 1)]

    def of(
        self, parameter: Any, group: Group, cuts: Cuts, factor: float, rounds_sum: bool = False
    ) -> Residual:
        """Return the residual of a parameter in the function that is traced; see `Residual`."""
        residual = self._of.get(id(parameter))  # perhaps of all ranks, which now form groups
        is_same = residual and residual.cuts == cuts and (residual.owner is not None) == rounds_sum
        if residual is not None and is_same and residual.group.id == group.id:
            return residual
        begin, end = cuts[group.rank :][:2]
        with tf.init_scope(), tf.device("CPU:0"):
            if residual is None:
                rounding = tf.Variable(tf.zeros(parameter.shape), trainable=False)
            else:  # the exchange has changed, or the group
                residual.fold()
                rounding = residual.own
            owner = tf.Variable(tf.zeros([end - begin]), trainable=False) if rounds_sum else None
            basis = residual.basis if residual else self._first_basis(tuple(parameter.shape))
            self._of[id(parameter)] = Residual(
                parameter, group, cuts, factor, rounding, owner, basis
            )
            self._take_restored(self._of[id(parameter)])
        return self._of[id(parameter)]

    def _first_basis(self, shape: tuple[int, ...]) -> tf.Variable | None:
        """Create random columns, equal on all ranks, if gradients are sent as factors."""
        if not isinstance(self.compression, LowRankCompressor):
            return None
        start = np.random.default_rng(0).normal(size=self.compression.second_factor(shape))
        return tf.Variable(start, dtype=tf.float32, trainable=False)

    def has_begun(self) -> Any:
        """Return whether gradients of this step are compressed, as a tensor; True if all are."""
        if self.compression.start_step == 0:
            return True
        if self.n_steps is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self.n_steps = tf.Variable(self._first_step, dtype=tf.int64, trainable=False)
                self._start = tf.Variable(self._first_of_few, dtype=tf.int64, trainable=False)
        return self.n_steps >= self._start

    def bits(self) -> tf.Tensor:
        """Return the bits per value in this step."""
        assert isinstance(self.compression, QuantizedCompressor)
        return tf.where(self.has_begun(), self.compression.bits, 16)

    # Checkpoints

    def saved(self, scope: Scope) -> Saved:
        """Copy this rank's residuals of the weights in the scope."""
        places = scope.places
        arrays: dict[str, np.ndarray] = {}
        entries: dict[str, Any] = {}
        for residual in self.all:
            if id(residual.parameter) in places:
                name = str(places[id(residual.parameter)])
                entries[name] = [list(residual.cuts), residual.factor]
                kept = {"residual": residual.own, "owner": residual.owner, "basis": residual.basis}
                kept_variables = {
                    key: variable for key, variable in kept.items() if variable is not None
                }
                arrays |= {f"{key}/{name}": copy_of(v) for key, v in kept_variables.items()}
        n_steps = 0 if self.n_steps is None else int(self.n_steps.numpy())
        return Saved(arrays, {"n_quantized": n_steps}, {"residuals": entries})

    def restored(self, saved: SavedStates) -> None:
        """Restore what was left for later steps. Collective if there is any.

        Each rank takes its own; or the sum is cut again if ranks or hosts have changed.
        """
        entries, of_rank = saved.of(0).entries.get("residuals"), saved.own
        if not entries:
            return
        is_same = np.int64(saved.is_exact and saved.is_same_host)
        n_same = collectives.allreduce(is_same, op=runtime.Sum, name="restored residuals")
        is_exact = int(n_same) == runtime.size()
        states = []
        for name, (cuts, _) in entries.items():
            kept = {key: of_rank.find(f"{key}/{name}") for key in ("owner", "basis")}
            if is_exact:
                state = Restored(tuple(cuts), of_rank.arrays[f"residual/{name}"], **kept)
            else:
                left = pending_in(saved, name)
                state = Restored(tuple(cuts), basis=kept["basis"], pending=left)
            states.append((saved.scope.weights[int(name)], state))
        self.restore(states, saved.of(0).info["n_quantized"])
        if not is_exact and runtime.rank() == 0:
            logger.info("Ranks or hosts are others than before: residuals are cut again.")

    def restore(self, states: Sequence[tuple[Any, Restored]], n_steps: int) -> None:
        """Restore parameters' residuals, now or when they are created; others become zero."""
        self._first_step = n_steps
        if self.n_steps is not None:
            self.n_steps.assign(n_steps)
        for residual in self.all:
            for variable in (residual.own, residual.owner):
                if variable is not None:
                    variable.assign(tf.zeros_like(variable))
        self._restored = {id(parameter): state for parameter, state in states}
        for residual in self.all:
            self._take_restored(residual)

    def _take_restored(self, residual: Residual) -> None:
        state = self._restored.pop(id(residual.parameter), None)
        if state is None:
            return
        if residual.basis is not None and np.shape(state.basis) == tuple(residual.basis.shape):
            residual.basis.assign(state.basis)  # not if the columns are others than before
        if state.pending is not None:
            begin, end = residual.cuts[residual.group.rank :][:2]
            residual.add(state.pending.reshape(-1)[begin:end])
            return
        residual.own.assign(state.own)
        if state.owner is not None and state.cuts == residual.cuts and residual.owner is not None:
            residual.owner.assign(state.owner)
        elif state.owner is not None:  # the exchange is another than before
            replace(residual, cuts=state.cuts).add(state.owner)


def pending_in(saved: SavedStates, name: str) -> np.ndarray:
    """Return the sum that was left for later steps; its mean over groups, which have their own."""
    totals = []
    for group in saved.groups:
        parts = [part for part in map(saved.of, group) if name in part.entries["residuals"]]
        factor = parts[0].entries["residuals"][name][1]
        total = factor * np.sum([np.float64(p.arrays[f"residual/{name}"]) for p in parts], axis=0)
        owners = [p.arrays[f"owner/{name}"] for p in parts if f"owner/{name}" in p.arrays]
        totals.append(total + np.concatenate(owners).reshape(total.shape) if owners else total)
    return np.mean(totals, axis=0)


def pending_change(
    saved: SavedStates, weight: int, count: int, is_in_flight: bool = False
) -> np.ndarray | None:
    """Return the change of a weight, flat, that groups had not sent in averages; None without.

    What was in flight counts as sent where it still is in flight.
    """
    total: np.ndarray | None = None
    for rank in range(saved.size):
        of_rank = saved.of(rank)
        entry = of_rank.entries.get("pending", {}).get(str(weight))
        if entry is None:
            continue
        factor, start, owned, rest, owner, sent, mean, common, at = entry
        total = np.zeros(count) if total is None else total
        values = _flat(of_rank, rest)
        n = len(values)
        if sent >= 0 and not is_in_flight:
            # The weights still have this change, so nothing of it was sent.
            change = _flat(of_rank, sent)[at : at + n] - _flat(of_rank, common)
            values = values + _flat(of_rank, mean)[at : at + n] - change
        total[start : start + n] += factor * values
        if owner >= 0:
            part = _flat(of_rank, owner)
            total[owned : owned + len(part)] += part
    return total


def _flat(saved: Saved, number: int) -> np.ndarray:
    return np.asarray(saved.arrays[f"average/{number}"], np.float64).reshape(-1)


def keep(updates: Iterable[Update]) -> None:
    """Assign the residuals of a step that is not skipped."""
    for variable, value in updates:
        variable.assign(value)


def rescale(updates: Iterable[Update], factor: tf.Tensor) -> None:
    """Multiply residuals after the scale of the loss, and so of gradients, has changed."""
    for variable, _ in updates:
        if variable.dtype.is_floating:
            variable.assign(variable * factor)
