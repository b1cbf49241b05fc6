"""A snapshot of a run: each rank copies its part; any number of ranks can resume from the parts."""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

from tfscale.checkpoints.files import DamagedError, Part, UnreadableError, empty_info
from tfscale.checkpoints.resumable import BestWeights, CallbackState, read_counters, resumables
from tfscale.checkpoints.variables import (
    MetricState,
    ModelState,
    TableState,
    distinct,
    group_of,
    mean_of,
)
from tfscale.comm import runtime
from tfscale.config import ConfigError, ExchangeError, settings
from tfscale.exchange.states import Range, Saved, SavedStates, Scope
from tfscale.fit.preparation import build_from_data, build_optimizer, prepare
from tfscale.internals.keras import global_seed_state, has_global_seed
from tfscale.internals.optimizers import optimizers_of
from tfscale.layers.sharded_embedding import sharded_embeddings
from tfscale.optimizer.distributed import groups_of
from tfscale.optimizer.resuming import OptimizerState, require_same_rules

logger = logging.getLogger("tfscale")


@dataclass
class Position:
    """A place in a run."""

    epoch: int = 0  # the epoch that runs, or comes next; counted from 0
    step: int = 0  # number of the next step within the epoch
    n_steps: int = 0  # training steps since the beginning of the run
    data: dict[str, int] | None = None  # state of the batches that are trained on


# Copies.


def take_snapshot(
    model: keras.Model, callbacks: Sequence[Any], position: Position, run: str, is_end: bool
) -> Part:
    """Copy this rank's part between two steps; a group's first rank copies what is equal in it."""
    groups, of_model = groups_of(model), ModelState(model)
    arrays: dict[str, np.ndarray] = {}
    info = {
        **empty_info(),
        "run": run,
        "step": position.n_steps,
        "size": runtime.size(),
        "groups": groups,
        "position": asdict(position),
        "is_end": is_end,
        "hosts": _place_on_host(),
        "keras_callbacks": read_counters(callbacks, is_end),
    }
    states = [
        *((None, state) for state in (of_model, TableState(model))),
        (None, MetricState(model, position.step > 0)),
        *enumerate(map(OptimizerState, optimizers_of(model))),
        (None, RandomState()),
        # The leader's rows of tables are no other rank's.
        (None, BestWeights(() if sharded_embeddings(model) else callbacks)),
        *enumerate(map(CallbackState, resumables(callbacks))),
    ]
    scope = of_model.scope(groups)
    for number, state in states:
        _add(info, arrays, number, state.saved(scope))
    return Part(info, arrays)


def _add(info: dict[str, Any], arrays: dict[str, Any], number: int | None, saved: Saved) -> None:
    """Add what a state has saved; that of one of several carries its number."""
    arrays |= {_numbered(name, number): array for name, array in saved.arrays.items()}
    for name, value in saved.info.items():
        info[name] = value if number is None else [*info[name], value]
    for name, entries in saved.entries.items():
        info[name] |= {f"{number}/{key}": entry for key, entry in entries.items()}


def _numbered(name: str, number: int | None) -> str:
    """Return "sum2/0" for "sum/0" of the third."""
    word, _, rest = name.partition("/")
    return name if number is None else f"{word}{number}/{rest}"


def is_broken(model: keras.Model) -> bool:
    """Return whether a trainable weight is not finite on this rank."""
    # A loss that is not finite is no proof: its step may have been skipped.
    weights = distinct(model.trainable_variables)
    return not all(np.all(np.isfinite(np.asarray(v.numpy()))) for v in weights)


def _place_on_host() -> list[int]:
    return [settings().ranks_per_host, runtime.local_rank(), runtime.local_size()]


class RandomState:
    """The states of the global generators of Python, numpy and Keras, as JSON."""

    def saved(self, scope: Scope) -> Saved:
        """Copy the states of this rank's generators."""
        del scope
        of_numpy: Any = np.random.get_state(legacy=False)
        of_numpy["state"]["key"] = of_numpy["state"]["key"].tolist()
        # Keras's own would draw its seed from Python's if it were made here.
        of_keras = global_seed_state().numpy().tolist() if has_global_seed() else None
        states = {"python": random.getstate(), "numpy": of_numpy, "keras": of_keras}
        return Saved(info={"random": states})

    def restored(self, saved: SavedStates) -> None:
        """Restore them, unless ranks are others than before."""
        if not saved.is_exact:
            return
        state = saved.own.info["random"]
        if state.get("keras") is not None:
            global_seed_state().assign(state["keras"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(state["numpy"])


# Reads.


class Reader:
    """The parts of a checkpoint, and values combined from several parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts  # in rank order
        self.info = parts[0].info
        # Ranks whose models were equal; one group except under local SGD.
        self.groups: list[list[int]] = self.info["groups"]

    @property
    def source(self) -> int:
        """The rank whose counters this one restores: rank 0 if the number of ranks has changed."""
        return runtime.rank() if len(self.parts) == runtime.size() else 0

    def share(self, name: str, mode: str) -> np.ndarray:
        """Return this rank's share of a metric's state; all shares reduce to the saved total."""
        values = np.asarray([part.arrays[name] for part in self.parts])
        if mode != "sum":
            reduce: Any = {"mean": np.mean, "max": np.max, "min": np.min}[mode]
            return np.asarray(reduce(values, axis=0)).astype(values.dtype)
        total = np.sum(values.astype(np.float64), axis=0)
        if values.dtype.kind in "iub":
            return (total if runtime.rank() == 0 else 0 * total).astype(values.dtype)
        return (total / runtime.size()).astype(values.dtype)

    def slot(self, name: str, group: Sequence[int], want: Range | None) -> np.ndarray:
        """Return an optimizer variable of a group, or the range `want` of its flat elements.

        `name` is "optimizer/variable", by index. The first rank of the group wrote the variable if
        all had the whole; the result is flat if ranks held ranges.
        """
        if want is not None and want[0] == want[1]:
            return np.zeros(0)
        wholes = [(group[0], f"optimizer{name}")]
        pieces: list[tuple[int, int, int]] = []
        for rank in group:
            if f"part{name}" in self.parts[rank].arrays:
                held = self.parts[rank].info["ranges"][name]
                if held is None:
                    wholes.append((rank, f"part{name}"))
                elif held[0] < held[1]:
                    pieces.append((*held, rank))
        for rank, whole in wholes:
            part = self.parts[rank]
            if whole in part.arrays:
                return part.arrays[whole] if want is None else part.slice(whole, *want)
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


class _Numbered(Mapping[str, np.ndarray]):
    """Arrays of one of several states, without its number."""

    def __init__(self, arrays: Mapping[str, np.ndarray], number: int) -> None:
        self._arrays, self._number = arrays, number

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[_numbered(name, self._number)]

    def __contains__(self, name: object) -> bool:
        return _numbered(str(name), self._number) in self._arrays

    def __iter__(self) -> Iterator[str]:
        matches = (re.fullmatch(rf"(\D+){self._number}/(.*)", name) for name in self._arrays)
        return (f"{match[1]}/{match[2]}" for match in matches if match)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class StatesOf:
    """The copies of one state that all ranks have saved; see `exchange.states.SavedStates`."""

    reader: Reader
    number: int | None  # of one of several
    scope: Scope
    is_exact: bool
    groups: Sequence[Sequence[int]]

    @property
    def is_same_host(self) -> bool:
        """True if this rank has the same place among the ranks of its host."""
        return bool(self.reader.parts[self._source].info["hosts"] == _place_on_host())

    @property
    def is_end(self) -> bool:
        """True if training had ended."""
        return bool(self.reader.info["is_end"])

    @property
    def size(self) -> int:
        """The number of ranks that have saved."""
        return len(self.reader.parts)

    @property
    def _source(self) -> int:
        return runtime.rank() % self.size

    def of(self, rank: int) -> Saved:
        """Return a rank's copy of the state."""
        part, number = self.reader.parts[rank], self.number
        if number is None:
            return Saved(part.arrays, part.info)
        lists = {name: v for name, v in part.info.items() if isinstance(v, list)}
        names = {name: v for name, v in part.info.items() if isinstance(v, dict)}
        begin = f"{number}/"
        return Saved(
            _Numbered(part.arrays, number),
            {name: values[number] for name, values in lists.items() if number < len(values)},
            {
                name: {k.removeprefix(begin): v for k, v in of.items() if k.startswith(begin)}
                for name, of in names.items()
            },
        )

    @cached_property
    def own(self) -> Saved:
        """The copy of this rank, or of one in its place if there were fewer ranks."""
        return self.of(self._source)

    def share(self, name: str, mode: str) -> np.ndarray:
        """Return this rank's own array, or its share of all."""
        if self.is_exact:
            return self.own.arrays[name]
        return self.reader.share(_numbered(name, self.number), mode)

    def piece(self, name: str, rank: int, start: int, stop: int) -> np.ndarray:
        """Return some elements of a rank's flattened array; no others are read."""
        return self.reader.parts[rank].slice(_numbered(name, self.number), start, stop)

    def slot(self, name: str, want: Range | None) -> np.ndarray:
        """Return a slot, or a range of it; a mean over groups."""
        name = f"{self.number}/{name}"
        return mean_of([self.reader.slot(name, group, want) for group in self.groups])


class Restore:
    """Restore this rank's share of a checkpoint into a built model.

    If ranks and groups are the same as before, each rank takes its own part and its group's.
    Otherwise parts are joined and cut again, models of groups and values that differ between ranks
    are averaged, and integers are the first rank's.
    """

    def __init__(self, model: keras.Model, reader: Reader) -> None:
        """Compare a built model with a checkpoint, and start groups if the checkpoint has them.

        Values are not changed. Collective if groups start.
        """
        self._model, self._reader = model, reader
        self._scalars: list[tuple[Any, np.ndarray]] = []
        scope = ModelState(model).scope(groups_of(model))
        trained = reader.info.get("trained", [])  # older checkpoints have none
        states = [OptimizerState(optimizer) for optimizer in optimizers_of(model)]
        _require_same_weights(reader.info, scope.weights)
        for state, places in zip(states, trained, strict=False):
            state.build(scope, places)
        if not trained or None in trained[0]:
            build_optimizer(model)
        require_same_rules(states, reader.info["rules"])
        for state, places in zip(states, trained, strict=False):
            state.require_order(scope, places)
        if len(reader.groups) > 1 and any([state.start_groups() for state in states]):
            prepare(model)
            model.make_train_function(force=True)
        groups = groups_of(model)
        self._is_exact = reader.groups == groups
        # The groups whose values are read: this rank's, or all, to be averaged.
        own_group = [group_of(runtime.rank(), groups)]
        self._groups: Sequence[Sequence[int]] = own_group if self._is_exact else reader.groups
        self._model_state = ModelState(model)  # again: groups have new slots
        self._scope = self._model_state.scope(groups)
        if not self._is_exact and len(reader.groups) > 1 and runtime.rank() == 0:
            logger.warning("Groups are others than before: they begin with the average of those.")

    def _saved(self, number: int | None) -> StatesOf:
        return StatesOf(self._reader, number, self._scope, self._is_exact, self._groups)

    def run(self) -> None:
        """Restore weights, optimizer state, layers' state and random state."""
        optimizers = optimizers_of(self._model)
        try:
            self._model_state.restored(self._saved(None))
            TableState(self._model).restored(self._saved(None))
            for number, state in enumerate(map(OptimizerState, optimizers)):
                state.restored(self._saved(number))
            RandomState().restored(self._saved(None))
        except (DamagedError, UnreadableError) as error:
            raise ExchangeError(
                f"Could not read a checkpoint that is being restored. Received: {error}. Start "
                "the job again."
            ) from error
        variables = (v for optimizer in optimizers for v in optimizer.variables)
        self._scalars = [(v, np.array(v.numpy())) for v in variables if tuple(v.shape) == ()]

    def restore_metrics(self) -> None:
        """Restore the metrics of an interrupted epoch; Keras has reset them before it began."""
        try:
            build_from_data(self._model)  # their variables
        except ConfigError as error:
            logger.info("Metrics that only a step can build begin again: %s", error)
        MetricState(self._model).restored(self._saved(None))

    def finish(self) -> None:
        """Restore learning rates and counters a second time, before the first step.

        The checkpoint was taken after the callbacks' `on_epoch_begin`. It has run again since, and
        some callbacks change the learning rate relative to the present one.
        """
        if self._reader.info["is_end"]:  # taken before it: the values set by callbacks are right
            return
        for variable, value in self._scalars:
            variable.assign(value)


def _require_same_weights(info: dict[str, Any], weights: Sequence[Any]) -> None:
    described = [[v.path, list(v.shape)] for v in weights]
    for i, (mine, theirs) in enumerate(itertools.zip_longest(described, info["weights"])):
        if mine is None or theirs is None or mine[1] != theirs[1]:
            raise ConfigError(
                f"model must be that of the checkpoint. Received: weight {i} is {mine}; in the "
                f"checkpoint it is {theirs}. Build the same model, or pass another directory."
            )
