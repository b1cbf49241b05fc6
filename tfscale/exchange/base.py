"""Base class of exchange strategies, and their lookup by name."""

from __future__ import annotations

import abc
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tfscale.comm.backends.base import Group
from tfscale.comm.compression import refuse_low_rank, refuse_sparse
from tfscale.comm.runtime import ProcessSet
from tfscale.config import ConfigError
from tfscale.exchange import EXCHANGES
from tfscale.exchange.plan import ExchangePlan, GradientOptions, Table
from tfscale.plan.buckets import Kind


@dataclass(frozen=True)
class DenseLayer:
    """A Dense layer as strategies see it."""

    path: str
    n_in: int  # rows of its kernel; 0 while it is not built
    n_out: int
    # Rows per sample that it is applied to, 1 for inputs of shape [samples, n_in]; None if unknown.
    positions: int | None
    why_not: str = ""  # reason against exchanging activations and output gradients
    why_uncut: str = ""  # reason against cutting its kernel into parts


# Why "auto" lets a dense layer exchange weights.
UNKNOWN_BATCH = (
    "the batch size is not known; give fit a GlobalBatches, or call tfscale.prepare(model, "
    "batch_size=...)"
)


class Exchange(abc.ABC):
    """A strategy: an immutable description of an exchange, compiled to plans."""

    is_sharding: bool = False  # whether ranks may update parts of parameters
    may_shard_later: ClassVar[bool] = False  # whether measured steps may lead to a sharding one
    # Whether a sharded step waits for the gathers that it has posted; False leaves that to readers.
    waits_for_gathers: bool = True
    needs_prepared: str = ""  # the option that needs a prepared model
    is_measured: bool = False  # whether steps are measured, after which another strategy may follow
    trains_apart: ClassVar[bool] = False  # whether groups of ranks may hold different weights
    outcome: Any = None  # times of a measured plan; None for most strategies

    @abc.abstractmethod
    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Compile the plan of a step. Equal tables and groups give equal plans.

        Raises:
            PlanError: The strategy does not fit the model.
        """

    def whole(self) -> Exchange:
        """Return the strategy for tapes and unknown optimizers, which need whole gradients.

        Raises:
            ConfigError: There is none.
        """
        return self

    def refuse(self, options: GradientOptions, nonfinite: str, where: str) -> None:
        """Raise a ConfigError if an optimizer's options do not fit the strategy.

        `nonfinite` is that of `DistributedOptimizer`; `where` names the strategy as the user wrote
        it.
        """
        refuse_sparse(options.compression, where)
        if self.is_sharding or self.may_shard_later:
            refuse_low_rank(options.compression, where)

    def form_groups(self, process_set: ProcessSet) -> Any:
        """Return the groups of ranks that train apart, for local SGD; else None. Collective."""
        del process_set
        return None

    def within_group(self) -> Exchange:
        """Return the strategy inside a group of ranks: itself, except for local SGD."""
        return self

    def dense_kinds(
        self, layers: Sequence[DenseLayer], size: int, global_batch: int | None
    ) -> list[tuple[Kind, str]]:
        """Choose the exchange of each Dense layer, with the reason if a wish is not met.

        One of "weights", "replicated" and "partial". `global_batch` is the number of samples of all
        ranks together, None if it is not known.

        Raises:
            PlanError: The strategy does not fit the model.
        """
        return [("weights", "") for _ in layers]


def resolve(exchange: Any) -> Exchange:
    """Return a strategy given as an object or a name; raises a ConfigError for others."""
    if isinstance(exchange, str) and exchange in EXCHANGES:
        # Imported on first use: a tape needs no planner.
        return pkgutil.resolve_name(EXCHANGES[exchange])()
    if isinstance(exchange, Exchange):
        return exchange
    names = ", ".join(repr(name) for name in EXCHANGES)
    raise ConfigError(
        f"exchange must be one of {names} or a strategy such as tfscale.Allreduce(bucket_mb=4). "
        f"Received: exchange={exchange!r}."
    )
