"""Detect ranks whose weights have drifted apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.base import Callback, may_communicate
from tfscale.checkpoints import state as model_state
from tfscale.comm import objects, runtime
from tfscale.config import ExchangeError
from tfscale.optimizer.distributed import distributed_of, passes_per_update

NAMES_SHOWN = 3


class ConsistencyCheck(Callback):
    """Require bitwise equal weights on all ranks after the first update and at epoch ends.

    Each rank sends a digest of eight bytes per variable, so a check costs about one pass over the
    weights. It compares trainable variables and the optimizer's state, including learning rate and
    step count, but neither local variables with their slots nor non-trainable state.

    Collective: all ranks must pass it to `fit`, at the same place. `Synchronize` and
    `BroadcastGlobalVariablesCallback` contain one.

    Args:
        every_n_epochs: Epochs between two checks; 0 checks after the first update only.
        optimizer_state: Whether the optimizer's state is compared.
        local_variables: Variables that may differ, besides those registered with the optimizer.
        groups: Groups of ranks within which weights must be equal, one sequence of ranks each; None
            uses the groups of local SGD or, without local SGD, the optimizer's process set.

    Raises:
        ExchangeError: At a check, on all ranks, if weights differ; names the variable and ranks.
    """

    compared = ("every_n_epochs", "optimizer_state")

    def __init__(
        self,
        every_n_epochs: int = 1,
        optimizer_state: bool = True,
        local_variables: Iterable[keras.Variable] | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.every_n_epochs = every_n_epochs
        self.optimizer_state = optimizer_state
        self.local_variables = list(local_variables or ())
        self.groups = groups
        self._is_first_due, self._n_passes = True, 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Expect a check after the first update."""
        super().on_train_begin(logs)
        self._is_first_due, self._n_passes = True, 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check after the first update, which may take several batches."""
        super().on_train_batch_end(batch, logs)
        # After a step that was given up, ranks that stopped check at the end of the epoch.
        if not self._is_first_due or self.session.is_given_up or not may_communicate():
            return
        self._n_passes += self.model.steps_per_execution
        if self._n_passes >= passes_per_update(self.model):
            self._is_first_due = False
            self.check("after the first update")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check if one is due."""
        super().on_epoch_end(epoch, logs)
        is_due = self.every_n_epochs > 0 and (epoch + 1) % self.every_n_epochs == 0
        if (is_due or self._is_first_due) and not self.is_void:
            self._is_first_due = False
            self.check(f"at the end of epoch {epoch + 1}")

    def check(self, moment: str) -> None:
        """Compare now. Collective: all ranks must call this, in the same order.

        Args:
            moment: Description of the time of the check, for the error message.

        Raises:
            ExchangeError: A rank differs from the first rank of its group.
        """
        if runtime.size() == 1:
            return
        local = model_state.local_ids(self.model, self.local_variables)
        state = list(self.model.trainable_variables)
        if self.optimizer_state:
            state += model_state.optimizer_variables(self.model)
        variables = [v for v in model_state.distinct(state) if id(v) not in local]
        own = [_digest(variable) for variable in variables]
        every = objects.allgather_object(own, name="check of weights")
        if len({len(digests) for digests in every}) > 1:
            raise ExchangeError(
                "All ranks must train the same variables. Received: "
                f"{[len(digests) for digests in every]} variables on ranks 0 to {len(every) - 1}, "
                f"{moment}. Build the model and the optimizer from the same code everywhere."
            )
        ranks = model_state.process_set_of(self.model).ranks or range(len(every))
        distributed = distributed_of(self.model.optimizer)
        groups = self.groups or (distributed.groups if distributed else None) or [ranks]
        different = {
            index: ranks
            for index in range(len(own))
            if (ranks := _differing([digests[index] for digests in every], groups))
        }
        if different:
            raise ExchangeError(_explain(variables, different, moment))


def _digest(variable: keras.Variable) -> bytes:
    data = np.ascontiguousarray(variable.numpy()).view(np.uint8)
    return hashlib.blake2b(data, digest_size=8).digest()


def _differing(digests: list[bytes], groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks whose digest differs from that of the first rank of their group."""
    return sorted(r for group in groups for r in group if digests[r] != digests[group[0]])


def _explain(variables: list[keras.Variable], different: dict[int, list[int]], moment: str) -> str:
    shown = [
        f"{variables[index].path!r} on ranks {ranks}"
        for index, ranks in list(different.items())[:NAMES_SHOWN]
    ]
    more = len(different) - len(shown)
    return (
        f"Weights must be bitwise equal on all ranks {moment}. Received: values that differ from "
        f"the first rank's (rank 0's, without groups) for {'; '.join(shown)}"
        f"{f'; and {more} more variables' if more else ''}. Likely causes: the optimizer is not "
        "wrapped in DistributedOptimizer; the weights were not broadcast or were changed on one "
        "rank afterwards; a callback or train_step does something else depending on a rank's own "
        "data, such as a learning rate lowered by metrics that are not averaged "
        "(MetricAverageCallback comes first). Variables meant to differ are to be registered with "
        "register_local_var or given as local_variables."
    )
