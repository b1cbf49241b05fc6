"""Local SGD: groups of ranks that train separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.runtime import ProcessSet, global_process_set, own_process_set
from tfscale.config import ConfigError, settings
from tfscale.exchange.executor import Executor, Reduced
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.exchange.plan import values_of
from tfscale.internals.optimizers import trained_by, update_rule
from tfscale.optimizer.local_averaging import GroupAverage
from tfscale.optimizer.overlapped_averaging import OverlappedAverage
from tfscale.optimizer.rules import ELEMENTWISE


class LocalGroups:
    """The groups of ranks of one optimizer, and their average once they train separately."""

    def __init__(self, strategy: LocalSGD, executor: Executor) -> None:
        """Form groups, unless they start later. Collective."""
        if executor.process_set is not global_process_set:
            raise ConfigError(
                f"Local SGD forms groups of all ranks. Received: {executor.process_set!r}. "
                "Leave process_set out."
            )
        self.strategy = strategy
        self.is_apart = False  # whether groups train separately
        self.average: GroupAverage | None = None
        self._members = strategy.members(_local_ranks())
        # Ranks of each group; one group of all ranks until groups train separately.
        self.groups: list[list[int]] = [list(range(runtime.size()))]
        self._across: ProcessSet = global_process_set
        if strategy.start == "immediately":
            self.form(executor)

    def form(self, executor: Executor) -> None:
        """Let an executor exchange within this rank's group. Collective.

        Creates a process set of each group, and of the ranks at the same position in all groups.
        """
        rank, m = runtime.rank(), len(self._members[0])
        sets = [own_process_set(ranks) for ranks in self._members]
        alike = [[group[i] for group in self._members] for i in range(m)]
        across = [own_process_set(ranks) for ranks in alike]
        self.groups, self.is_apart = self._members, True
        executor.process_set = sets[rank // m]
        self._across = across[rank % m]

    def build(self, optimizer: Any, executor: Executor) -> None:
        """Create the average for a built optimizer if groups train separately. Collective."""
        if not self.is_apart or self.average is not None:
            return
        rule, shards = update_rule(optimizer), executor.shards
        if self.strategy.average == "gradients":
            _require_plain(optimizer, rule)
        if shards is None:
            targets = [v for v in trained_by(rule) if not executor.is_local(v)]
        else:
            _require_elementwise(self.strategy.outer)
            targets = [piece for i, piece in shards.pieces.items() if shards.owned(i)]
        kind = OverlappedAverage if self.strategy.is_overlapped else GroupAverage
        self.average = kind(self.strategy, self._across.group(), executor, rule, targets)

    def after_update(self, reduced: Reduced, gradients: Sequence[Any]) -> None:
        """Average in the traced step if it is due; `gradients` are this rank's own. Collective."""
        if self.average is None:
            return
        # If data ends unannounced, a step begins without a batch, and TensorFlow runs all ops that
        # need none: some ranks would count a step that is never made. So counting waits for one of
        # this rank's own gradients, which needs a batch but no other rank.
        own = [values_of(g) for g in gradients if g is not None][-1:]
        with tf.control_dependencies([] if tf.executing_eagerly() else own):
            self.average.after_update(reduced)


def _local_ranks() -> list[int]:
    """Return each rank's number among the ranks of its host. Collective."""
    per_host = settings().ranks_per_host
    own = runtime.rank() % per_host if per_host else runtime.local_rank()
    return objects.allgather_object(own, name="local ranks")


def _require_plain(optimizer: Any, rule: Any) -> None:
    """Raise a ConfigError if the optimizer changes gradients before it applies them."""
    if rule is not optimizer or rule.loss_scale_factor is not None:
        raise ConfigError(
            "Gradients are added up over an interval, and a loss scale may change within it. "
            f"Received: average='gradients' with {type(optimizer).__name__} and "
            f"loss_scale_factor={rule.loss_scale_factor}. Use average='parameters', or train "
            "without a loss scale (mixed_bfloat16)."
        )
    named = ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay")
    used = [name for name in (*named, "gradient_accumulation_steps") if getattr(rule, name)]
    if used:
        raise ConfigError(
            "The common model moves by gradients as the ranks have them: what the optimizer "
            f"makes of them is lost. Received: average='gradients' with {', '.join(used)}. Use "
            "average='parameters', or leave that out."
        )


def _require_elementwise(outer: Any) -> None:
    """Raise a ConfigError if an outer optimizer needs more than a rank's segment."""
    used = [name for name in ("clipnorm", "global_clipnorm") if getattr(outer, name, None)]
    if outer is not None and (used or type(outer) not in ELEMENTWISE):
        raise ConfigError(
            "With sharded parameters an outer optimizer sees a rank's segment only. Received: "
            f"{' with '.join([type(outer).__name__, *used])}, which looks at more than one value. "
            "Use within='allreduce', or another outer optimizer such as SGD."
        )
