"""Groups of ranks that train apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tfscale.comm import objects, runtime
from tfscale.comm.compression import SparseCompressor
from tfscale.config import ConfigError, settings
from tfscale.exchange.executor import Executor
from tfscale.internals.optimizers import trained_by, update_rule
from tfscale.local_sgd.averages import GroupAverage
from tfscale.local_sgd.overlapped import OverlappedAverage
from tfscale.optimizer.rules import ELEMENTWISE


@dataclass(frozen=True)
class Groups:
    """The groups of ranks of one optimizer: one group of all ranks until they train apart.

    Attributes:
        strategy: The `LocalSGD` that has formed them.
        members: The ranks of each group once they train apart.
        process_set: The ranks that exchange gradients: this rank's group.
        across: The ranks at this rank's position in all groups; None until groups train apart.
    """

    strategy: Any
    members: list[list[int]]
    process_set: runtime.ProcessSet = runtime.global_process_set
    across: runtime.ProcessSet | None = None

    @property
    def is_apart(self) -> bool:
        """Whether the groups train separately by now."""
        return self.across is not None

    @property
    def ranks(self) -> list[list[int]]:
        """The ranks with equal weights, one list for each group."""
        return self.members if self.is_apart else [list(range(runtime.size()))]

    def apart(self) -> Groups:
        """Return the groups as they train apart. Collective.

        Creates a process set of each group, and of the ranks at the same position in all groups.
        """
        rank, m = runtime.rank(), len(self.members[0])
        sets = [runtime.own_process_set(ranks) for ranks in self.members]
        alike = [[group[i] for group in self.members] for i in range(m)]
        across = [runtime.own_process_set(ranks) for ranks in alike]
        return replace(self, process_set=sets[rank // m], across=across[rank % m])

    def average(self, optimizer: Any, executor: Executor) -> GroupAverage:
        """Return the average of what a built optimizer updates, of groups apart. Collective."""
        assert self.across is not None
        rule, shards = update_rule(optimizer), executor.shards
        if self.strategy.average == "gradients":
            _require_plain(optimizer, rule)
        if shards is None:
            targets = [v for v in trained_by(rule) if not executor.is_local(v)]
        else:
            _require_elementwise(self.strategy.outer)
            targets = [piece for i, piece in shards.pieces.items() if shards.owned(i)]
        is_sparse = isinstance(executor.options.compression, SparseCompressor)
        kind = OverlappedAverage if self.strategy.is_overlapped or is_sparse else GroupAverage
        return kind(self.strategy, self.across.group(), executor, rule, targets)


def local_ranks() -> list[int]:
    """Return each rank's number among the ranks of its host. Collective."""
    per_host = settings().ranks_per_host
    local_rank = runtime.rank() % per_host if per_host else runtime.local_rank()
    return objects.allgather_object(local_rank, name="local ranks")


def _require_plain(optimizer: Any, rule: Any) -> None:
    """Raise a ConfigError if the optimizer changes gradients before it applies them."""
    if rule is not optimizer or rule.loss_scale_factor is not None:
        raise ConfigError(
            "average='gradients' excludes a loss scale, which may change within an interval. "
            f"Received: average='gradients' with {type(optimizer).__name__} and "
            f"loss_scale_factor={rule.loss_scale_factor}. Use average='parameters', or train "
            "without a loss scale (mixed_bfloat16)."
        )
    named = ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay")
    used = [name for name in (*named, "gradient_accumulation_steps") if getattr(rule, name)]
    if used:
        raise ConfigError(
            "average='gradients' ignores what the optimizer makes of gradients. Received: "
            f"average='gradients' with {', '.join(used)}. Use average='parameters', or leave "
            "that out."
        )


def _require_elementwise(outer: Any) -> None:
    """Raise a ConfigError if an outer optimizer needs more than a rank's segment."""
    used = [name for name in ("clipnorm", "global_clipnorm") if getattr(outer, name, None)]
    if outer is not None and (used or type(outer) not in ELEMENTWISE):
        raise ConfigError(
            "outer must change each value by itself with sharded parameters. Received: "
            f"{' with '.join([type(outer).__name__, *used])}, which looks at more than one "
            "value. Use within='allreduce', or another outer optimizer such as SGD."
        )
