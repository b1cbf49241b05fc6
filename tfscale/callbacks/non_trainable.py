"""Give all ranks the same moving statistics before they validate or save."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.base import BeforeValidation
from tfscale.checkpoints import state as model_state
from tfscale.comm import collectives, objects, runtime
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ConfigError

logger = logging.getLogger("tfscale")

_NAMES_SHOWN = 3
MODES = ("average", "root", "local")


class NonTrainableState(BeforeValidation):
    """Make the non-trainable state equal on all ranks, once per epoch.

    The BatchNormalization of a rank sees that rank's batches only, so the moving statistics differ.
    They are combined before `fit` validates, with one message per epoch. Integers, states of seed
    generators, and local layers and variables are not changed.

    Collective: all ranks must pass it to `fit`, at the same place. `Synchronize` and
    `BroadcastGlobalVariablesCallback` contain one.

    Args:
        mode: `"average"` takes the mean over the ranks whose values are finite, `"root"` the values
            of `root_rank`, `"local"` keeps each rank's own values.
        root_rank: The rank whose values are used with `"root"`.
        local_variables: Variables that stay different on every rank.

    Raises:
        ConfigError: `mode` is none of the above.
    """

    def __init__(
        self,
        mode: str = "average",
        root_rank: int = 0,
        local_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ConfigError(
                f"non_trainable must be one of {', '.join(map(repr, MODES))}. Received: "
                f"non_trainable={mode!r}. Use 'average' if in doubt."
            )
        self.mode = mode
        self.root_rank = root_rank
        self.local_variables = list(local_variables or ())
        self._united: list[tuple[keras.Variable, np.ndarray]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the combined values of an earlier `fit`."""
        super().on_train_begin(logs)
        self._united = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Combine the state after the last batch; restore it after a step that was given up."""
        super().on_train_batch_end(batch, logs)
        if self.is_void:  # the forward pass updated statistics before the step was given up
            for variable, value in self._united:
                variable.assign(value)

    def act(self) -> None:
        """Combine the state now. Collective: all ranks must call this, in the same order."""
        if self.mode == "local" or runtime.size() == 1:
            return
        members = model_state.process_set_of(self.model)
        common = model_state.common_variables(self.model, self.local_variables)
        ids = {id(variable) for variable in common}
        state = [v for v in model_state.non_trainable_state(self.model) if id(v) in ids]
        if not state or not members.included():
            return
        if self.mode == "root":
            objects.broadcast_variables(state, self.root_rank, process_set=members)
        else:
            _average(state, members)
        self._united = [(variable, np.array(variable.numpy())) for variable in state]


def average_variables(
    variables: Sequence[keras.Variable],
    weights: Sequence[float],
    name: str,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace values by their weighted mean over ranks, with one message. Collective.

    Computes in float64, in which the mean of equal float32 values is the value itself.

    Args:
        variables: The same on all ranks.
        weights: This rank's weight of each variable, 0 or more. A value with weight 0 need not be
            finite; a variable with weight 0 on all ranks keeps its value.
        name: Name in logs and errors.
        process_set: The ranks that take part.
    """
    values = [np.asarray(variable.numpy(), np.float64) for variable in variables]
    sent = [w * v if w else np.zeros_like(v) for v, w in zip(values, weights, strict=True)]
    *sums, totals = collectives.grouped_allreduce(
        [*sent, np.array(weights, np.float64)], runtime.Sum, process_set=process_set, name=name
    )
    for variable, value, total in zip(variables, sums, np.asarray(totals), strict=True):
        if total > 0:
            variable.assign(np.asarray(value) / total)


def _average(variables: list[keras.Variable], members: ProcessSet) -> None:
    """Average without values that are not finite: the sum would be NaN for all ranks."""
    counted = [bool(np.all(np.isfinite(np.asarray(v.numpy())))) for v in variables]
    paths = [v.path for v, counts in zip(variables, counted, strict=True) if not counts]
    if paths:
        more = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
        text = "Rank %d has NaN or infinity in %s%s, and takes the average of the other ranks."
        logger.warning(text, runtime.rank(), ", ".join(paths[:_NAMES_SHOWN]), more)
    average_variables(variables, counted, "tfscale_non_trainable_state", members)
