"""A snapshot of a run: each rank copies its part; any number of ranks can resume from the parts."""

from __future__ import annotations

import itertools
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from tfscale.checkpoints.files import DamagedError, Part, UnreadableError
from tfscale.checkpoints.resumable import kind_of, read_counters, resumables
from tfscale.checkpoints.variables import Variables, distinct, group_of, groups_of, metric_states
from tfscale.comm import collectives, runtime
from tfscale.comm.runtime import Sum
from tfscale.config import ConfigError, ExchangeError, settings
from tfscale.exchange.residuals import Restored
from tfscale.fit import adapted_layers
from tfscale.fit.preparation import build_optimizer, prepare
from tfscale.internals.keras import global_seed_state, has_global_seed
from tfscale.internals.optimizers import optimizers_of, trained_by, update_rule
from tfscale.optimizer.distributed import distributed_of
from tfscale.optimizer.state import KeptState

logger = logging.getLogger("tfscale")

Range = tuple[int, int]

_SHOWN = 4  # variables that an error names
_MASTER = "weight"  # begins the names of exact parts of weights


@dataclass
class Position:
    """A place in a run."""

    epoch: int = 0  # the epoch that runs, or comes next; counted from 0
    step: int = 0  # number of the next step within the epoch
    n_steps: int = 0  # training steps since the beginning of the run
    data: dict[str, int] | None = None  # state of the `GlobalBatches` that is trained on


# Copies.


def take_snapshot(
    model: keras.Model, callbacks: Sequence[Any], position: Position, run: str, is_end: bool
) -> Part:
    """Copy this rank's part between two steps; a group's first rank copies what is equal in it."""
    groups, rank = groups_of(model), runtime.rank()
    is_leader = group_of(rank, groups)[0] == rank
    variables, optimizers = Variables.of(model), optimizers_of(model)
    places = {id(v): i for i, v in enumerate(variables.weights)}
    metrics = metric_states(model) if position.step else []
    arrays: dict[str, np.ndarray] = {}
    info: dict[str, Any] = {
        "run": run,
        "step": position.n_steps,
        "size": runtime.size(),
        "groups": groups,
        "position": asdict(position),
        "is_end": is_end,
        "random": _read_random_state(),
        "weights": [[v.path, list(v.shape)] for v in variables.weights],
        "rules": [_rule_of(o) for o in optimizers],
        "trained": [_trained_by(o, places) for o in optimizers],
        "ranges": {},
        "accumulated": [],
        "residuals": {},  # of compressed gradients
        "n_quantized": [],
        "hosts": _place_on_host(),
        "metrics": [[mode, list(v.shape)] for v, mode, _ in metrics],
        "callbacks": [],
        "keras_callbacks": read_counters(callbacks, is_end),
    }

    def add(name: str, of: Sequence[Any]) -> None:
        arrays.update({f"{name}/{i}": _copy_of(variable) for i, variable in enumerate(of)})

    if is_leader:
        add("weight", variables.weights)
    add("state", variables.state)
    add("seed", variables.seeds)
    add("local", variables.local)
    add("metric", [variable for variable, _, _ in metrics])
    for k, optimizer in enumerate(optimizers):
        whole, parts = _slots_of(optimizer, variables.local)
        if is_leader:
            arrays |= {f"optimizer{k}/{i}": _copy_of(variable) for i, variable in whole.items()}
        for i, (part, held) in parts.items():
            arrays[f"part{k}/{i}"] = _copy_of(part)
            info["ranges"][f"{k}/{i}"] = held
        for name, _, piece, held in _masters_of(k, optimizer, variables.weights):
            arrays[f"part{name}"] = _copy_of(piece).reshape(-1)
            info["ranges"][name] = held
        distributed = distributed_of(optimizer)
        average = None if distributed is None else distributed.bound.average
        if average is not None and (is_leader or _kept_state_of(optimizer) is not None):
            add(f"average{k}", average.variables)
        accumulator = None if distributed is None else distributed.accumulator
        residuals = None if distributed is None else distributed.bound.executor.residuals
        for residual in residuals.all if residuals else ():
            if id(residual.parameter) not in places:  # no weight of the model
                continue
            name = f"{k}/{places[id(residual.parameter)]}"
            info["residuals"][name] = [list(residual.cuts), residual.factor]
            arrays[f"residual{name}"] = _copy_of(residual.own)
            kept = {"owner": residual.owner, "basis": residual.basis}
            arrays |= {key + name: _copy_of(v) for key, v in kept.items() if v is not None}
        n_steps = None if residuals is None else residuals.n_steps
        info["n_quantized"].append(0 if n_steps is None else int(n_steps.numpy()))
        count, sums = (accumulator and accumulator.state()) or (0, [])
        info["accumulated"].append(count)
        arrays |= {f"sum{k}/{i}": value for i, value in enumerate(sums)}
    for j, callback in enumerate(resumables(callbacks)):
        state = dict(callback.backup_state())
        own = state.pop("arrays", [])
        info["callbacks"].append({"kind": kind_of(callback), "state": state})
        if is_leader:
            arrays |= {f"callback{j}/{i}": np.array(array) for i, array in enumerate(own)}
    return Part(info, arrays)


def is_broken(model: keras.Model) -> bool:
    """Return whether a trainable weight is not finite on this rank."""
    # A loss that is not finite is no proof: its step may have been skipped.
    weights = distinct(model.trainable_variables)
    return not all(np.all(np.isfinite(np.asarray(v.numpy()))) for v in weights)


def _copy_of(variable: Any) -> np.ndarray:
    """Return a copy of a variable's value with memory of its own."""
    value = np.asarray(variable.numpy())
    return value if value.flags.owndata and value.flags.writeable else np.array(value)


def _slots_of(
    optimizer: Any, local: Sequence[Any]
) -> tuple[dict[int, Any], dict[int, tuple[Any, Range | None]]]:
    """Return the variables that are equal in a group, and this rank's parts, both by index.

    Local variables are left out. A part comes with its range of the flat variable; None for all.
    """
    kept = _kept_state_of(optimizer)
    shared = kept.shared if kept else frozenset()
    ids = {id(variable) for variable in local}
    known = enumerate(optimizer.variables)
    whole = {i: v for i, v in known if i not in shared and id(v) not in ids}
    return whole, kept.own_parts() if kept else {}


def _masters_of(
    k: int, optimizer: Any, weights: Sequence[Any]
) -> Iterator[tuple[str, Any, Any, Range]]:
    """Yield names, weights, and this rank's exact parts of weights that are gathered rounded."""
    distributed = distributed_of(optimizer)
    shards = None if distributed is None else distributed.bound.executor.shards
    places = {id(v): i for i, v in enumerate(weights)}
    if shards is None or not shards.rounds:
        return
    for index, piece in shards.pieces.items():
        variable, owned = shards.variables[index], shards.owned(index)
        if id(variable) in places:
            held = (owned.start, owned.stop) if owned else (0, 0)
            yield f"{k}/{_MASTER}{places[id(variable)]}", variable, piece, held


def _kept_state_of(optimizer: Any) -> KeptState | None:
    distributed = distributed_of(optimizer)
    return None if distributed is None else distributed.bound.kept


def _place_on_host() -> list[int]:
    return [settings().ranks_per_host, runtime.local_rank(), runtime.local_size()]


def _rule_of(optimizer: Any) -> dict[str, Any]:
    """Return class, number and kinds of variables of an optimizer, without layers' names."""
    names, inner = [], optimizer
    while inner is not None:
        names.append(inner.__class__.__name__)  # `type` would return the class of the proxy
        inner = getattr(inner, "inner_optimizer", None)
    slots = [_last_word(v.path) for v in optimizer.variables]
    return {"class": " of ".join(names), "n": len(slots), "slots": slots}


def _trained_by(optimizer: Any, places: dict[int, int]) -> list[int | None]:
    """Return the places of the weights that an optimizer was built on; None for other variables."""
    distributed = distributed_of(optimizer)
    rule = update_rule(optimizer)
    trained = trained_by(rule) if distributed is None else distributed.bound.variables
    return [places.get(id(variable)) for variable in trained]


def _last_word(path: str) -> str:
    """Return "momentum" for "adam/dense_3_kernel_momentum", "variable" for "variable_2"."""
    words = [word for word in re.split("[/_]", path) if not word.isdigit()]
    return words[-1] if words else ""


def _read_random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, numpy and Keras, as JSON."""
    of_numpy: Any = np.random.get_state(legacy=False)
    of_numpy["state"]["key"] = of_numpy["state"]["key"].tolist()
    # Keras's own would draw its seed from Python's if it were made here.
    of_keras = global_seed_state().numpy().tolist() if has_global_seed() else None
    return {"python": random.getstate(), "numpy": of_numpy, "keras": of_keras}


def _restore_random_state(state: dict[str, Any]) -> None:
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

    def get(self, rank: int, name: str) -> np.ndarray:
        """Return an array."""
        return self.parts[rank].arrays[name]

    def mean(self, ranks: Sequence[int], get: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return the mean of `get(rank)`; the first one for integers and if all are equal."""
        values = [get(rank) for rank in ranks]
        first = values[0]
        is_integer = first.dtype.kind in "iub"
        if is_integer or all(np.array_equal(v, first, equal_nan=True) for v in values[1:]):
            return first
        return np.mean(np.asarray(values, np.float64), axis=0).astype(first.dtype)

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

    def pending(self, name: str, groups: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the sum that compressed gradients have left for later steps; its mean over groups.

        Each group, whose ranks had equal models, has a sum of its own.
        """
        return np.mean([self._pending_of(name, group) for group in groups], axis=0)

    def _pending_of(self, name: str, group: Sequence[int]) -> np.ndarray:
        with_it = [self.parts[rank] for rank in group if name in self.parts[rank].info["residuals"]]
        factor = with_it[0].info["residuals"][name][1]
        own = [np.float64(part.arrays[f"residual{name}"]) for part in with_it]
        total = factor * np.sum(own, axis=0)
        owners = [p.arrays[f"owner{name}"] for p in with_it if f"owner{name}" in p.arrays]
        return total + np.concatenate(owners).reshape(total.shape) if owners else total

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
        self._model = model
        self._reader = reader
        self._rank = runtime.rank()
        self._optimizers = optimizers_of(model)
        weights = Variables.of(model).weights
        _require_same_weights(reader.info, weights)
        self._build_optimizers(reader.info.get("trained", []), weights)  # older ones have none
        _require_same_rules(reader.info, self._optimizers)
        _require_same_order(reader.info, self._optimizers, weights)
        for optimizer in self._optimizers:
            distributed = distributed_of(optimizer)
            if distributed and distributed.bound.is_waiting_for_groups and len(reader.groups) > 1:
                distributed.start_groups()
                prepare(model)
                model.make_train_function(force=True)
        self._variables = Variables.of(model)  # again: groups have new slots
        groups = groups_of(model)
        self._is_exact = reader.groups == groups
        self._scalars: list[tuple[Any, np.ndarray]] = []
        # The groups whose values are read: this rank's, or all, to be averaged.
        own = [group_of(self._rank, groups)]
        self._groups: Sequence[Sequence[int]] = own if self._is_exact else reader.groups
        if not self._is_exact and len(reader.groups) > 1 and self._rank == 0:
            logger.warning("Groups are others than before: they begin with the average of those.")

    def _build_optimizers(self, trained: Sequence[Any], weights: Sequence[Any]) -> None:
        """Build optimizers on what they had trained, as Keras does in the first step only.

        That may be a part of the weights, or in another order than the model's.
        """
        for optimizer, places in zip(self._optimizers, trained, strict=False):
            known = [weights[i] for i in places if i is not None]
            if known and len(known) == len(places) and not optimizer.built:
                optimizer.build(known)
        if not trained or None in trained[0]:
            build_optimizer(self._model)

    def run(self) -> None:
        """Restore weights, optimizer state, layers' state and random state."""
        try:
            leaders = [group[0] for group in self._groups]
            for i, variable in enumerate(self._variables.weights):
                self._assign_mean(variable, leaders, f"weight/{i}")
            self._restore_own()
            adapted_layers.refresh_all(self._model)
            for k, optimizer in enumerate(self._optimizers):
                self._restore_masters(k, optimizer)
                self._restore_optimizer(k, optimizer)
                self._restore_average(f"average{k}", optimizer)
                self._restore_accumulator(k, optimizer)
                self._restore_residuals(k, optimizer)
        except (DamagedError, UnreadableError) as error:
            raise ExchangeError(
                "A checkpoint must stay where it is until all ranks have read it. Received: "
                f"{error}. Start the job again."
            ) from error
        if self._is_exact:
            _restore_random_state(self._reader.parts[self._rank].info["random"])
        variables = (v for optimizer in self._optimizers for v in optimizer.variables)
        self._scalars = [(v, np.array(v.numpy())) for v in variables if tuple(v.shape) == ()]

    def finish(self) -> None:
        """Restore learning rates and counters a second time, before the first step.

        The checkpoint was taken after the callbacks' `on_epoch_begin`. It has run again since, and
        some callbacks change the learning rate relative to the present one.
        """
        if self._reader.info["is_end"]:  # taken before it: the values set by callbacks are right
            return
        for variable, value in self._scalars:
            variable.assign(value)

    def restore_metrics(self) -> None:
        """Restore the metrics of an interrupted epoch, once their variables exist."""
        states, saved = metric_states(self._model), self._reader.info["metrics"]
        if [shape for _, shape in saved] != [list(v.shape) for v, _, _ in states]:
            logger.warning("The metrics are others than before: they begin again in this epoch.")
            return
        # How they are reduced may be known only after the first step.
        for i, ((variable, _, _), (mode, _)) in enumerate(zip(states, saved, strict=True)):
            variable.assign(self._own_or_share(f"metric/{i}", mode))

    def _assign_mean(self, variable: Any, ranks: Sequence[int], name: str) -> None:
        variable.assign(self._reader.mean(ranks, lambda rank: self._reader.get(rank, name)))

    def _own_or_share(self, name: str, mode: str) -> np.ndarray:
        if self._is_exact:
            return self._reader.get(self._rank, name)
        return self._reader.share(name, mode)

    def _restore_own(self) -> None:
        """Restore the values that differ between ranks."""
        n_ranks = len(self._reader.parts)
        source = self._rank % n_ranks
        for i, variable in enumerate(self._variables.local):
            variable.assign(self._reader.get(source, f"local/{i}"))
        for i, variable in enumerate(self._variables.state):
            ranks = [self._rank] if self._is_exact else range(n_ranks)
            self._assign_mean(variable, ranks, f"state/{i}")
        for i, variable in enumerate(self._variables.seeds):
            seed = self._reader.get(source, f"seed/{i}")
            if source != self._rank:  # keep this rank's seed; restore the count of numbers drawn
                seed = np.array([variable.numpy()[0], seed[1]], seed.dtype)
            variable.assign(seed)

    def _restore_masters(self, k: int, optimizer: Any) -> None:
        """Restore exact weights: this rank's parts, or all of them if they are not rounded now."""
        weights, begin = self._variables.weights, f"{k}/{_MASTER}"
        own = {name: rest for name, *rest in _masters_of(k, optimizer, weights)}
        for name in {n for part in self._reader.parts for n in part.info["ranges"]}:
            if name in own:
                self._assign_slot(own[name][1], name, own[name][2])
            elif name.startswith(begin):
                self._assign_slot(weights[int(name.removeprefix(begin))], name, None)

    def _restore_optimizer(self, k: int, optimizer: Any) -> None:
        whole, parts = _slots_of(optimizer, self._variables.local)
        for i, variable in whole.items():
            self._assign_slot(variable, f"{k}/{i}", None)
        for i, (part, held) in parts.items():
            self._assign_slot(part, f"{k}/{i}", held)
        kept = _kept_state_of(optimizer)
        if kept is not None:
            kept.note_load()

    def _assign_slot(self, variable: Any, name: str, want: Range | None) -> None:
        places = range(len(self._groups))
        value = self._reader.mean(places, lambda i: self._reader.slot(name, self._groups[i], want))
        variable.assign(np.reshape(value, tuple(variable.shape)))

    def _restore_accumulator(self, k: int, optimizer: Any) -> None:
        distributed = distributed_of(optimizer)
        accumulator = None if distributed is None else distributed.accumulator
        count = self._reader.info["accumulated"][k]
        if accumulator is None or not count:
            return
        mode = "sum" if optimizer.bound.executor.options.op == Sum else "mean"
        names = self._reader.parts[0].series(f"sum{k}")
        accumulator.restore(count, [self._own_or_share(name, mode) for name in names])

    def _restore_residuals(self, k: int, optimizer: Any) -> None:
        """Restore what compressed gradients have left for later steps. Collective if there is any.

        Each rank takes its own; or the sum is cut again if ranks or hosts have changed.
        """
        distributed, reader = distributed_of(optimizer), self._reader
        residuals = None if distributed is None else distributed.bound.executor.residuals
        saved: dict[str, Any] = reader.info.get("residuals", {})  # older checkpoints have none
        known = [name for name in saved if name.startswith(f"{k}/")]
        if residuals is None or not known:
            if known and self._rank == 0:
                logger.warning("Residuals of compressed gradients are dropped: compression is off.")
            return
        own = reader.parts[self._rank % len(reader.parts)]
        is_same = self._is_exact and own.info["hosts"] == _place_on_host()
        n_same = collectives.allreduce(np.int64(is_same), op=Sum, name="restored residuals")
        is_exact = int(n_same) == runtime.size()
        states = []
        for name in known:
            arrays, cuts = own.arrays, tuple(saved[name][0])
            kept = {key: arrays[key + name] for key in ("owner", "basis") if key + name in arrays}
            if is_exact:
                state = Restored(cuts, arrays[f"residual{name}"], **kept)
            else:
                left = reader.pending(name, self._groups)
                state = Restored(cuts, basis=kept.get("basis"), pending=left)
            states.append((self._variables.weights[int(name.partition("/")[2])], state))
        residuals.restore(states, reader.info["n_quantized"][k])
        if not is_exact and self._rank == 0:
            logger.info("Ranks or hosts are others than before: residuals are cut again.")

    def _restore_average(self, name: str, optimizer: Any) -> None:
        """Resume local SGD inside an interval, or begin one from the groups' average. Collective.

        An interval begins if groups have changed, or the variables kept from the last average: by
        another inner exchange, compression or outer optimizer.
        """
        distributed = distributed_of(optimizer)
        average = None if distributed is None else distributed.bound.average
        if average is None:
            return
        leader, parts = self._groups[0][0], self._reader.parts
        counters = [f"{name}/{i}" for i in range(len(average.counters))]
        if all(each in parts[leader].arrays for each in counters):
            average.restore([self._reader.get(leader, each) for each in counters])
        if not self._is_exact:  # all groups hold the average already
            average.start_from_here()
            return
        # Ranks wrote their own segments, or the first rank of a group what is equal in it.
        source = parts[self._rank if parts[self._rank].series(name) else leader]
        kept = [source.arrays[each] for each in source.series(name)]
        fits = [value.shape for value in kept] == [tuple(v.shape) for v in average.variables]
        n_fit = collectives.allreduce(np.int64(fits), op=Sum, name="restored averages")
        if int(n_fit) == runtime.size():
            average.restore(kept)
            if self._reader.info["is_end"]:  # the weights hold the average of all groups
                average.start_from_here()
            return
        average.average_now()
        average.start_from_here()
        if average.across.size > 1 and self._rank == 0:
            text = "Groups average in another way than before: they begin with their average."
            logger.warning(text)


def _require_same_weights(info: dict[str, Any], weights: Sequence[Any]) -> None:
    own = [[v.path, list(v.shape)] for v in weights]
    for i, (mine, theirs) in enumerate(itertools.zip_longest(own, info["weights"])):
        if mine is None or theirs is None or mine[1] != theirs[1]:
            raise ConfigError(
                f"A resumed run must have the same model. Received: weight {i} is {mine}; in "
                f"the checkpoint it is {theirs}. Build the same model, or pass another directory."
            )


def _require_same_rules(info: dict[str, Any], optimizers: Sequence[Any]) -> None:
    rules = [_rule_of(optimizer) for optimizer in optimizers]
    if rules != info["rules"]:
        raise ConfigError(
            "A resumed run must have the same optimizer. Received: "
            f"{_described(rules)}; the checkpoint has {_described(info['rules'])}. Compile with "
            "the same optimizer; if it is built before fit, build it on the variables that it "
            "trained; or pass another directory."
        )


def _require_same_order(
    info: dict[str, Any], optimizers: Sequence[Any], weights: Sequence[Any]
) -> None:
    """Refuse an optimizer that was built on its weights in another order: moments are by place."""
    places = {id(v): i for i, v in enumerate(weights)}
    for optimizer, before in zip(optimizers, info.get("trained", []), strict=False):
        now = _trained_by(optimizer, places)
        if now != before and None not in (*now, *before):
            raise ConfigError(
                "An optimizer that is built before fit must be built on the variables of the "
                f"checkpoint in their order. Received: {_paths_of(weights, now)}; the checkpoint "
                f"has {_paths_of(weights, before)}. Build it in this order, or leave it to fit."
            )


def _paths_of(weights: Sequence[Any], places: Sequence[Any]) -> str:
    shown = [weights[i].path for i in places[:_SHOWN]]
    return ", ".join(shown) + ", ..." * (len(places) > _SHOWN)


def _described(rules: Sequence[dict[str, Any]]) -> str:
    texts = []
    for rule in rules:
        slots = ", ".join(dict.fromkeys(rule["slots"]))
        texts.append(f"{rule['class']} with {rule['n']} variables ({slots})")
    return " and ".join(texts) or "none"
