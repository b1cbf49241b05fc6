"""Going on from a checkpoint, at the same number of ranks or another one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfscale.callbacks import building, metric_states
from tfscale.callbacks.checkpoint_average import restore_average
from tfscale.callbacks.checkpoint_state import group_of, groups_of, rule_of, variables_of
from tfscale.callbacks.random_state import restore_random_state
from tfscale.checkpoints.parts import DamagedError, UnreadableError
from tfscale.checkpoints.reader import Reader
from tfscale.comm import runtime
from tfscale.comm.runtime import Sum
from tfscale.config import ConfigError, ExchangeError
from tfscale.fit import adapted_layers
from tfscale.fit.preparation import prepare
from tfscale.internals.optimizers import optimizers_of

logger = logging.getLogger("tfscale")


class Restore:
    """Gives a built model what this rank needs of a checkpoint.

    With the same ranks in the same groups each rank takes its own part and its group's. Otherwise
    parts are put together and cut anew, models of groups and what ranks keep for themselves are
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
        self._variables = variables_of(model)
        self._optimizers = optimizers_of(model)
        _require_same(reader.infos[0], self._variables.weights, self._optimizers)
        self._start_groups()
        self._variables = variables_of(model)  # slots of groups are new ones
        groups, self._rank = groups_of(model), runtime.rank()
        self.is_exact = reader.groups == groups
        # Whose values count: this rank's group, or the mean over all groups.
        self._numbers: list[tuple[Any, np.ndarray]] = []
        own = [group_of(self._rank, groups)]
        self._groups: Sequence[Sequence[int]] = own if self.is_exact else reader.groups
        if not self.is_exact and len(reader.groups) > 1 and self._rank == 0:
            logger.warning("Groups are others than before: they begin with the average of those.")

    def run(self) -> None:
        """Take over weights, optimizer state, layers' state and random state.

        Raises:
            ExchangeError: A file cannot be read any more.
        """
        try:
            self._restore_weights()
            self._restore_own()
            adapted_layers.settle(self._model)
            for k, optimizer in enumerate(self._optimizers):
                self._restore_optimizer(k, optimizer)
                restore_average(self._reader, f"average{k}", optimizer, self._groups, self.is_exact)
                self._restore_accumulator(k, optimizer)
            if self.is_exact:
                restore_random_state(self._reader.infos[self._rank]["random"])
            self._numbers = [
                (v, np.array(v.numpy()))
                for optimizer in self._optimizers
                for v in optimizer.variables
                if tuple(v.shape) == ()
            ]
        except (DamagedError, UnreadableError) as error:
            raise ExchangeError(
                "A checkpoint must stay where it is until all ranks have read it. Received: "
                f"{error}. Start the job again."
            ) from error

    def settle(self) -> None:
        """Take over learning rates and counters once more, before the first step.

        The checkpoint was taken when all callbacks had begun the epoch. They have begun it again,
        and some of them change a rate relative to the present one.
        """
        if self._reader.infos[0].get("is_end"):  # they had not, and set what they begin with
            return
        for variable, value in self._numbers:
            variable.assign(value)

    def restore_metrics(self) -> None:
        """Let the metrics of the epoch go on."""
        building.build_from_data(self._model)  # for their variables
        states = metric_states.states_of(self._model)
        known = self._reader.infos[0]["metrics"]
        if known != [[mode, list(v.shape)] for v, mode, _ in states]:
            logger.warning("The metrics are others than before: they begin anew in this epoch.")
            return
        for i, (variable, mode, _) in enumerate(states):
            if self.is_exact:
                variable.assign(self._reader.get(self._rank, f"metric/{i}"))
            else:
                variable.assign(self._share(f"metric/{i}", mode))

    def _start_groups(self) -> None:
        for optimizer in self._optimizers:
            is_waiting = getattr(optimizer, "waits_for_groups", False)
            if is_waiting and len(self._reader.groups) > 1:
                optimizer.start_groups()
                prepare(self._model)
                self._model.make_train_function(force=True)

    def _restore_weights(self) -> None:
        leaders = [group[0] for group in self._groups]
        for i, variable in enumerate(self._variables.weights):
            read = self._reader.getter(f"weight/{i}")
            variable.assign(self._reader.mean(leaders, read))

    def _restore_own(self) -> None:
        reader, every = self._reader, range(self._reader.size)
        source = self._rank if self.is_exact else self._rank % reader.size
        for i, variable in enumerate(self._variables.local):
            variable.assign(reader.get(source, f"local/{i}"))
        for i, variable in enumerate(self._variables.state):
            ranks = [self._rank] if self.is_exact else every
            variable.assign(reader.mean(ranks, reader.getter(f"state/{i}")))
        for i, variable in enumerate(self._variables.seeds):
            seed = reader.get(source, f"seed/{i}")
            if self._rank >= reader.size:  # a seed of its own, as many numbers in as the others
                seed = np.array([variable.numpy()[0], seed[1]], seed.dtype)
            variable.assign(seed)

    def _restore_optimizer(self, k: int, optimizer: Any) -> None:
        kept = getattr(optimizer, "kept_state", None)
        local = {id(v) for v in self._variables.local}
        shared = kept.state.shared if kept else frozenset()
        for i, variable in enumerate(optimizer.variables):
            if i not in shared and id(variable) not in local:
                self._assign(variable, f"{k}/{i}", None)
        if kept:
            for i, (part, held) in kept.state.own_parts().items():
                self._assign(part, f"{k}/{i}", held)
            kept.forget()
            kept.state.note_load()

    def _assign(self, variable: Any, name: str, want: tuple[int, int] | None) -> None:
        def read(place: int) -> np.ndarray:
            return self._reader.slot(name, self._groups[place], want)

        value = self._reader.mean(range(len(self._groups)), read)
        variable.assign(np.reshape(value, tuple(variable.shape)))

    def _restore_accumulator(self, k: int, optimizer: Any) -> None:
        accumulator = getattr(optimizer, "accumulator", None)
        infos = self._reader.infos
        count = infos[0]["accumulated"][k]
        if accumulator is None or not count:
            return
        n_sums = 0
        while self._reader.has(0, f"sum{k}/{n_sums}"):
            n_sums += 1
        names = [f"sum{k}/{i}" for i in range(n_sums)]
        if self.is_exact:
            sums = [self._reader.get(self._rank, name) for name in names]
        else:
            mode = "sum" if optimizer.options.op == Sum else "mean"
            sums = [self._share(name, mode) for name in names]
        accumulator.restore(count, sums)

    def _share(self, name: str, mode: str) -> np.ndarray:
        """Return this rank's share of what all ranks had, so that it reduces to the same."""
        values = np.asarray([self._reader.get(rank, name) for rank in range(self._reader.size)])
        if mode != "sum":
            reduce: Any = {"mean": np.mean, "max": np.max, "min": np.min}[mode]
            return np.asarray(reduce(values, axis=0)).astype(values.dtype)
        total = np.sum(values.astype(np.float64), axis=0)
        if values.dtype.kind in "iub":
            return (total if self._rank == 0 else 0 * total).astype(values.dtype)
        return (total / runtime.size()).astype(values.dtype)


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
    _require_same_rules(info, optimizers)


def _require_same_rules(info: dict[str, Any], optimizers: Sequence[Any]) -> None:
    own = [{"n": len(o.variables), **rule_of(o)} for o in optimizers]
    rules = info.get("rules", [{}] * len(info["optimizers"]))
    written = [{"n": n, **rule} for n, rule in zip(info["optimizers"], rules, strict=True)]
    if "rules" not in info and runtime.rank() == 0:
        logger.warning(
            "The checkpoint does not say which optimizer it is of: nobody knows whether its "
            "numbers mean to this one what they meant before."
        )
    is_same = len(own) == len(written) and all(
        mine[key] == theirs[key]
        for mine, theirs in zip(own, written, strict=True)
        for key in theirs
    )
    if not is_same:
        raise ConfigError(
            "A run goes on with the optimizer it began with. Received: "
            f"{_described(own)}; the checkpoint has {_described(written)}. Compile with the same "
            "optimizer, or pass another directory."
        )


def _described(rules: Sequence[dict[str, Any]]) -> str:
    texts = []
    for rule in rules:
        slots = ", ".join(dict.fromkeys(rule.get("slots", ["of unknown meaning"])))
        texts.append(f"{rule.get('class', 'one')} with {rule['n']} variables ({slots})")
    return " and ".join(texts) or "none"
