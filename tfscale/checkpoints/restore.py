"""Restore a model from a checkpoint, at the number of ranks that wrote it or another one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfscale.checkpoints.files import DamagedError, Part, UnreadableError
from tfscale.checkpoints.state import (
    Variables,
    group_of,
    groups_of,
    metric_states,
    restore_random_state,
    rule_of,
)
from tfscale.comm import collectives, runtime
from tfscale.comm.runtime import Sum
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange.local_sgd import AdaptiveInterval
from tfscale.fit import adapted_layers
from tfscale.fit.preparation import prepare
from tfscale.internals.optimizers import optimizers_of
from tfscale.optimizer.distributed import distributed_of

logger = logging.getLogger("tfscale")

Range = tuple[int, int]


class Reader:
    """The parts of a checkpoint, and what several of them make together.

    Attributes:
        parts: Of all ranks, in their order.
        groups: Ranks whose models were equal; one group but for local SGD.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        """Read nothing yet."""
        self.parts = parts
        self.groups: list[list[int]] = parts[0].info["groups"]

    @property
    def info(self) -> dict[str, Any]:
        """What rank 0 wrote beside its arrays."""
        return self.parts[0].info

    @property
    def source(self) -> int:
        """The rank whose own numbers this one takes over: rank 0 at another number of ranks."""
        return runtime.rank() if len(self.parts) == runtime.size() else 0

    def has(self, rank: int, name: str) -> bool:
        """Return whether a rank wrote an array of that name."""
        return name in self.parts[rank].arrays

    def get(self, rank: int, name: str) -> np.ndarray:
        """Return an array.

        Raises:
            DamagedError: There is none.
        """
        return self.parts[rank].arrays[name]

    def mean(self, ranks: Sequence[int], get: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the mean of what `get` returns for some ranks; the value itself if all are equal.

        Integers have no mean: the first rank's are taken.
        """
        values = [get(rank) for rank in ranks]
        first = values[0]
        is_integer = first.dtype.kind in "iub"
        if is_integer or all(np.array_equal(v, first, equal_nan=True) for v in values[1:]):
            return first
        return np.mean(np.asarray(values, np.float64), axis=0).astype(first.dtype)

    def slot(self, name: str, group: Sequence[int], want: Range | None) -> np.ndarray:
        """Return an optimizer's variable as a group held it, or a range of its flat elements.

        Args:
            name: "optimizer/variable", by number.
            group: Ranks that shared it; the first one wrote what each of them had.
            want: First element and the one after the last; None for all.

        Returns:
            An array; flat where ranks held ranges.

        Raises:
            DamagedError: Parts do not fit together.
        """
        if want is not None and want[0] == want[1]:
            return np.zeros(0)
        wholes = [(group[0], f"optimizer{name}")]
        pieces: list[tuple[int, int, int]] = []
        for rank in group:
            if self.has(rank, f"part{name}"):
                held = self.parts[rank].info["ranges"][name]
                if held is None:
                    wholes.append((rank, f"part{name}"))
                elif held[0] < held[1]:
                    pieces.append((*held, rank))
        for rank, whole in wholes:
            if self.has(rank, whole):
                if want is None:
                    return self.get(rank, whole)
                return self.parts[rank].slice(whole, *want)
        pieces.sort()
        if not pieces:
            raise DamagedError(f"no rank wrote optimizer variable {name}")
        first, last = want or (0, pieces[-1][1])
        arrays, reached = [], first
        for start, stop, rank in pieces:
            if start <= reached < min(stop, last):
                end = min(stop, last)
                arrays.append(self.parts[rank].slice(f"part{name}", reached - start, end - start))
                reached = end
        if reached != last:
            raise DamagedError(f"parts of optimizer variable {name} do not fit together")
        return np.concatenate(arrays)


class Restore:
    """Gives a built model this rank's share of a checkpoint.

    With the same ranks in the same groups each rank takes its own part and its group's. Otherwise
    parts are put together and cut again, models of groups and what ranks keep for themselves are
    averaged, and integers are the first rank's.
    """

    def __init__(self, model: keras.Model, reader: Reader) -> None:
        """Compare; nothing is changed but the phase of local SGD. Collective where that changes.

        Args:
            model: Built, its optimizers too.
            reader: The checkpoint.

        Raises:
            ConfigError: It comes from another model.
        """
        self._model = model
        self._reader = reader
        self._rank = runtime.rank()
        self._optimizers = optimizers_of(model)
        _require_same(reader.info, Variables.of(model).weights, self._optimizers)
        for optimizer in self._optimizers:
            distributed = distributed_of(optimizer)
            if distributed and distributed.waits_for_groups and len(reader.groups) > 1:
                distributed.start_groups()
                prepare(model)
                model.make_train_function(force=True)
        self._variables = Variables.of(model)  # slots of groups are new ones
        groups = groups_of(model)
        self._is_exact = reader.groups == groups
        self._scalars: list[tuple[Any, np.ndarray]] = []
        # The groups whose values count: this rank's, or the mean over all.
        own = [group_of(self._rank, groups)]
        self._groups: Sequence[Sequence[int]] = own if self._is_exact else reader.groups
        if not self._is_exact and len(reader.groups) > 1 and self._rank == 0:
            logger.warning("Groups are others than before: they begin with the average of those.")

    def run(self) -> None:
        """Take over weights, optimizer state, layers' state and random state.

        Raises:
            ExchangeError: A file cannot be read any more.
        """
        try:
            leaders = [group[0] for group in self._groups]
            for i, variable in enumerate(self._variables.weights):
                self._assign_mean(variable, leaders, f"weight/{i}")
            self._restore_own()
            adapted_layers.settle(self._model)
            for k, optimizer in enumerate(self._optimizers):
                self._restore_optimizer(k, optimizer)
                self._restore_average(f"average{k}", optimizer)
                self._restore_accumulator(k, optimizer)
        except (DamagedError, UnreadableError) as error:
            raise ExchangeError(
                "A checkpoint must stay where it is until all ranks have read it. Received: "
                f"{error}. Start the job again."
            ) from error
        if self._is_exact:
            restore_random_state(self._reader.parts[self._rank].info["random"])
        variables = (v for optimizer in self._optimizers for v in optimizer.variables)
        self._scalars = [(v, np.array(v.numpy())) for v in variables if tuple(v.shape) == ()]

    def finish(self) -> None:
        """Take over learning rates and counters once more, before the first step.

        The checkpoint was taken when all callbacks had begun the epoch. They have begun it again,
        and some of them change a rate relative to the present one.
        """
        if self._reader.info["is_end"]:  # they had not, and set what they begin with
            return
        for variable, value in self._scalars:
            variable.assign(value)

    def restore_metrics(self) -> None:
        """Restore the metrics of an epoch that was interrupted. Their variables exist."""
        states = metric_states(self._model)
        if self._reader.info["metrics"] != [[mode, list(v.shape)] for v, mode, _ in states]:
            logger.warning("The metrics are others than before: they begin again in this epoch.")
            return
        for i, (variable, mode, _) in enumerate(states):
            if self._is_exact:
                variable.assign(self._reader.get(self._rank, f"metric/{i}"))
            else:
                variable.assign(self._share(f"metric/{i}", mode))

    def _assign_mean(self, variable: Any, ranks: Sequence[int], name: str) -> None:
        variable.assign(self._reader.mean(ranks, lambda rank: self._reader.get(rank, name)))

    def _restore_own(self) -> None:
        """Restore the values of which each rank has its own."""
        n_ranks = len(self._reader.parts)
        source = self._rank % n_ranks
        for i, variable in enumerate(self._variables.local):
            variable.assign(self._reader.get(source, f"local/{i}"))
        for i, variable in enumerate(self._variables.state):
            ranks = [self._rank] if self._is_exact else range(n_ranks)
            self._assign_mean(variable, ranks, f"state/{i}")
        for i, variable in enumerate(self._variables.seeds):
            seed = self._reader.get(source, f"seed/{i}")
            if source != self._rank:  # a seed of its own, as many numbers in as the others
                seed = np.array([variable.numpy()[0], seed[1]], seed.dtype)
            variable.assign(seed)

    def _restore_optimizer(self, k: int, optimizer: Any) -> None:
        distributed = distributed_of(optimizer)
        kept = None if distributed is None else distributed.kept_state
        local = {id(v) for v in self._variables.local}
        shared = kept.shared if kept else frozenset()
        for i, variable in enumerate(optimizer.variables):
            if i not in shared and id(variable) not in local:
                self._assign_slot(variable, f"{k}/{i}", None)
        if kept:
            for i, (part, held) in kept.own_parts().items():
                self._assign_slot(part, f"{k}/{i}", held)
            kept.note_load()

    def _assign_slot(self, variable: Any, name: str, want: Range | None) -> None:
        def read(place: int) -> np.ndarray:
            return self._reader.slot(name, self._groups[place], want)

        value = self._reader.mean(range(len(self._groups)), read)
        variable.assign(np.reshape(value, tuple(variable.shape)))

    def _restore_accumulator(self, k: int, optimizer: Any) -> None:
        distributed = distributed_of(optimizer)
        accumulator = None if distributed is None else distributed.accumulator
        count = self._reader.info["accumulated"][k]
        if accumulator is None or not count:
            return
        n_sums = 0
        while self._reader.has(0, f"sum{k}/{n_sums}"):
            n_sums += 1
        names = [f"sum{k}/{i}" for i in range(n_sums)]
        if self._is_exact:
            sums = [self._reader.get(self._rank, name) for name in names]
        else:
            mode = "sum" if optimizer.options.op == Sum else "mean"
            sums = [self._share(name, mode) for name in names]
        accumulator.restore(count, sums)

    def _share(self, name: str, mode: str) -> np.ndarray:
        """Return this rank's share of what all ranks had, so that it reduces to the same."""
        values = np.asarray([part.arrays[name] for part in self._reader.parts])
        if mode != "sum":
            reduce: Any = {"mean": np.mean, "max": np.max, "min": np.min}[mode]
            return np.asarray(reduce(values, axis=0)).astype(values.dtype)
        total = np.sum(values.astype(np.float64), axis=0)
        if values.dtype.kind in "iub":
            return (total if self._rank == 0 else 0 * total).astype(values.dtype)
        return (total / runtime.size()).astype(values.dtype)

    def _restore_average(self, name: str, optimizer: Any) -> None:
        """Resume local SGD inside an interval, or begin one from the groups' average. Collective.

        They begin one where groups are others than before, or what they keep of the last average
        is: by another exchange inside, another compression or outer optimizer.
        """
        distributed = distributed_of(optimizer)
        average = None if distributed is None else distributed.group_average
        if average is None:
            return
        leader = self._groups[0][0]
        given = average.interval.numpy()  # an interval that does not adapt is the program's to say
        adapts = isinstance(optimizer.strategy.interval, AdaptiveInterval)
        if adapts and self._reader.has(leader, f"{name}/0"):
            average.interval.assign(self._reader.get(leader, f"{name}/0"))
        if not self._is_exact:  # all groups hold the average already
            average.start_from_here()
            return
        kept = self._kept_average(name, average, leader)
        fits = collectives.allreduce(np.int64(kept is not None), op=Sum, name="restored averages")
        if kept is not None and int(fits) == runtime.size():
            for variable, value in zip(average.variables, kept, strict=True):
                variable.assign(value)
            if not adapts:
                average.interval.assign(given)
            return
        average.average_now()
        optimizer.executor.publish()
        average.start_from_here()
        if average.across.size > 1 and self._rank == 0:
            text = "Groups average in another way than before: they begin with their average."
            logger.warning(text)

    def _kept_average(self, name: str, average: Any, leader: int) -> list[np.ndarray] | None:
        """Return a value for each of an average's variables, or None where others were written.

        Each rank has written what it keeps of a segment; what is equal in a group its first one.
        """
        reader = self._reader
        source = self._rank if reader.has(self._rank, f"{name}/0") else leader
        n = len(average.variables)
        names = [f"{name}/{i}" for i in range(n)]
        if not reader.has(source, names[-1]) or reader.has(source, f"{name}/{n}"):
            return None
        kept = [np.asarray(reader.get(source, each)) for each in names]
        shapes = [tuple(variable.shape) for variable in average.variables]
        return kept if [value.shape for value in kept] == shapes else None


def _require_same(info: dict[str, Any], weights: Sequence[Any], optimizers: Sequence[Any]) -> None:
    own = [[v.path, list(v.shape)] for v in weights]
    written = info["weights"]
    for i in range(max(len(own), len(written))):
        mine = own[i] if i < len(own) else None
        theirs = written[i] if i < len(written) else None
        if mine is None or theirs is None or mine[1] != theirs[1]:
            raise ConfigError(
                f"A run goes on with the model it began with. Received: weight {i} is {mine}; in "
                f"the checkpoint it is {theirs}. Build the same model, or pass another directory."
            )
    rules = [rule_of(optimizer) for optimizer in optimizers]
    if rules != info["rules"]:
        raise ConfigError(
            "A run goes on with the optimizer it began with. Received: "
            f"{_described(rules)}; the checkpoint has {_described(info['rules'])}. Compile with "
            "the same optimizer, and build those beside the compiled one before fit, or pass "
            "another directory."
        )


def _described(rules: Sequence[dict[str, Any]]) -> str:
    texts = []
    for rule in rules:
        slots = ", ".join(dict.fromkeys(rule["slots"]))
        texts.append(f"{rule['class']} with {rule['n']} variables ({slots})")
    return " and ".join(texts) or "none"
