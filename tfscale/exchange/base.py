"""Exchange strategies: their base class, shared options, and the names that `exchange=` takes."""

from __future__ import annotations

import abc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, Protocol

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.plan import ExchangePlan, Table

# One line registers an exchange: the name that users give, its module and its class.
EXCHANGES = {
    "allreduce": "tfscale.exchange.allreduce:Allreduce",
    "auto": "tfscale.exchange.auto:Auto",
    "chunked": "tfscale.exchange.chunked:Chunked",
    "sharded": "tfscale.exchange.sharded:Sharded",
}

# "weights": ranks exchange the layer's gradients. "replicated", "partial": they exchange its
# activations and errors; each makes the whole gradient, or that of its rows of the kernel.
DenseKind = Literal["weights", "replicated", "partial"]


@dataclass(frozen=True)
class DenseLayer:
    """A Dense layer as strategies see it.

    Attributes:
        path: Of the layer.
        n_in: Rows of its kernel; 0 while it is not built.
        n_out: Columns of its kernel.
        positions: How often it is applied to a sample, 1 for inputs of shape [samples, n_in];
            None where that is not known.
        why_not: Why it cannot exchange activations and errors, or an empty string.
        why_uncut: Why ranks cannot own parts of its kernel, or an empty string.
    """

    path: str
    n_in: int
    n_out: int
    positions: int | None
    why_not: str = ""
    why_uncut: str = ""


class Exchange(abc.ABC):
    """A strategy: an immutable description of an exchange, compiled to plans.

    Attributes:
        is_sharding: Whether ranks may update parts of parameters.
        may_shard_later: Whether a `watch` may choose a strategy that does.
        waits_for_gathers: Whether a sharded step waits for the gathers of parameters that it has
            posted; False leaves that to readers.
        needs_prepared: Why a step needs a prepared model: the option that asks for it, or an empty
            string.
        watch: Module and class of a `Watch` that looks at the steps of `fit` for this strategy;
            empty for none.
        outcome: What became of a plan that was measured; None for most strategies.
    """

    is_sharding: bool = False
    may_shard_later: ClassVar[bool] = False
    waits_for_gathers: bool = True
    needs_prepared: str = ""
    watch: str = ""
    global_batch: int | None = None
    outcome: Any = None

    @abc.abstractmethod
    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the plan of a step. Pure: equal tables and groups have equal plans.

        Args:
            table: The parameters, and the form of their gradients in the step that is traced.
            group: The ranks that exchange; more than one.

        Raises:
            PlanError: The strategy does not fit.
        """

    def whole(self) -> Exchange:
        """Return the strategy where every rank needs whole gradients: a tape, unknown optimizers.

        Raises:
            ConfigError: There is none.
        """
        return self

    def within_group(self) -> Exchange:
        """Return the strategy of ranks that train together: itself, unless groups train apart."""
        return self

    def dense_kinds(
        self, layers: Sequence[DenseLayer], size: int, global_batch: int | None
    ) -> list[tuple[DenseKind, str]]:
        """Return what the Dense layers of a model exchange, and why not something else.

        Args:
            layers: In the order of the model.
            size: Number of ranks.
            global_batch: Samples of all ranks together, where that is known.

        Raises:
            PlanError: The strategy does not fit the model.
        """
        del size, global_batch
        return [("weights", "") for _ in layers]


class Watch(Protocol):
    """Sees the steps of one `fit` after another, and changes the strategy.

    Attributes:
        may_cut: Whether it may return a strategy that shards parameters.
    """

    may_cut: bool

    def step(self, data: Any = None, callbacks: Sequence[Any] = ()) -> Exchange | None:
        """Count a step; return the strategy for the next one if it changes. Collective.

        Args:
            data: What the `fit` around the step trains on; None outside of one.
            callbacks: Those of this `fit`.
        """
        ...


def require(fits: bool, name: str, requirement: str, value: Any) -> None:
    """Raise a ConfigError about an option of a strategy unless it fits."""
    if not fits:
        raise ConfigError(f"{name} must be {requirement}. Received: {name}={value!r}.")


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is a whole number, and no less than `least`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def resolve(exchange: Any) -> Exchange:
    """Return the strategy that a user gave, perhaps by its name.

    Raises:
        ConfigError: Neither.
    """
    if isinstance(exchange, str) and exchange in EXCHANGES:
        return load(EXCHANGES[exchange])()
    if isinstance(exchange, Exchange):
        return exchange
    names = ", ".join(repr(name) for name in EXCHANGES)
    raise ConfigError(
        f"exchange must be one of {names} or a strategy such as tfscale.Allreduce(bucket_mb=4). "
        f"Received: exchange={exchange!r}."
    )


def load(place: str) -> Any:
    """Return what "module:name" says: imported when it is used, so that a tape needs no planner."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
