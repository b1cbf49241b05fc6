"""Optimizers of a model in checkpoints: their state, and whether they are those that had it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.exchange.states import Saved, SavedStates, Scope, Stateful, saved_together
from tfscale.internals.optimizers import trained_by, update_rule
from tfscale.optimizer.distributed import distributed_of
from tfscale.optimizer.state import Slots

logger = logging.getLogger("tfscale")

_SHOWN = 4  # variables that an error names


class OptimizerState:
    """One optimizer of a model, distributed or not, and all its state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.distributed = distributed_of(optimizer)

    @property
    def _states(self) -> list[Stateful]:
        if self.distributed is None:
            return [Slots(self.optimizer)]
        sums = self.distributed.accumulator
        return [self.distributed.bound, *([] if sums is None else [sums])]

    def saved(self, scope: Scope) -> Saved:
        """Copy the state, and what identifies the optimizer."""
        info = {"rules": self.rule, "trained": self.trained(scope)}
        defaults = Saved(info={**info, "accumulated": 0, "n_quantized": 0})  # unless it has such
        return defaults | saved_together(self._states, scope)

    def restored(self, saved: SavedStates) -> None:
        """Restore this rank's part. Collective."""
        for state in self._states:
            state.restored(saved)
        is_lossy = bool(self.distributed and self.distributed.bound.executor.residuals)
        if not is_lossy and saved.of(0).entries.get("residuals") and runtime.rank() == 0:
            logger.warning("Residuals of compressed gradients are dropped: compression is off.")

    # Building it as it was

    @property
    def rule(self) -> dict[str, Any]:
        """Class, number and kinds of variables, without layers' names."""
        names, inner = [], self.optimizer
        while inner is not None:
            names.append(inner.__class__.__name__)  # `type` would return the class of the proxy
            inner = getattr(inner, "inner_optimizer", None)
        slots = [_last_word(v.path) for v in self.optimizer.variables]
        return {"class": " of ".join(names), "n": len(slots), "slots": slots}

    def trained(self, scope: Scope) -> list[int | None]:
        """Return the places of the weights that it was built on; None for other variables."""
        rule, places = update_rule(self.optimizer), scope.places
        variables = (
            trained_by(rule) if self.distributed is None else self.distributed.bound.variables
        )
        return [places.get(id(variable)) for variable in variables]

    def build(self, scope: Scope, places: Sequence[int | None]) -> None:
        """Build it on the weights at some places, as Keras does in the first step only.

        These may be a part of the weights, or in another order than the model's.
        """
        variables = [scope.weights[i] for i in places if i is not None]
        if variables and len(variables) == len(places) and not self.optimizer.built:
            self.optimizer.build(variables)

    def start_groups(self) -> bool:
        """Let groups of ranks train apart if they wait for that; return whether they did."""
        is_waiting = bool(self.distributed and self.distributed.bound.is_waiting_for_groups)
        if self.distributed is not None and is_waiting:
            self.distributed.start_groups()
        return is_waiting

    def require_order(self, scope: Scope, before: Sequence[int | None]) -> None:
        """Refuse to have been built on weights in another order: moments are by place."""
        now = self.trained(scope)
        if now != before and None not in (*now, *before):
            raise ConfigError(
                "optimizer, if built before fit, must have the variables of the checkpoint in "
                f"their order. Received: {_paths_of(scope, now)}; the checkpoint has "
                f"{_paths_of(scope, before)}. Build it in this order, or leave it to fit."
            )


def require_same_rules(states: Sequence[OptimizerState], before: Sequence[dict[str, Any]]) -> None:
    """Raise a ConfigError unless optimizers have the classes and variables of a checkpoint."""
    rules = [state.rule for state in states]
    if rules != before:
        raise ConfigError(
            f"optimizer must be that of the checkpoint. Received: {_described(rules)}; the "
            f"checkpoint has {_described(before)}. Compile with the same optimizer; if it is "
            "built before fit, build it on the variables that it trained; or pass another "
            "directory."
        )


def _last_word(path: str) -> str:
    """Return "momentum" for "adam/dense_3_kernel_momentum", "variable" for "variable_2"."""
    parts = [word for word in re.split("[/_]", path) if not word.isdigit()]
    return parts[-1] if parts else ""


def _paths_of(scope: Scope, places: Sequence[Any]) -> str:
    shown = [scope.weights[i].path for i in places[:_SHOWN]]
    return ", ".join(shown) + ", ..." * (len(places) > _SHOWN)


def _described(rules: Sequence[dict[str, Any]]) -> str:
    texts = []
    for rule in rules:
        slots = ", ".join(dict.fromkeys(rule["slots"]))
        texts.append(f"{rule['class']} with {rule['n']} variables ({slots})")
    return " and ".join(texts) or "none"
