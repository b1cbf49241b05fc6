"""Give all ranks the same moving statistics before they validate or save."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks.base import BeforeValidation
from tfscale.checkpoints import state as model_state
from tfscale.comm import collectives, objects, runtime
from tfscale.comm.runtime import ProcessSet
from tfscale.config import ConfigError

logger = logging.getLogger("tfscale")

_NAMES_SHOWN = 3
MODES = ("average", "root", "local")


class NonTrainableState(BeforeValidation):
    """Unite the non-trainable state of the ranks once per epoch.

    Every rank's BatchNormalization sees the batches of that rank only, so the moving statistics
    differ. They are united before `fit` validates, see `BeforeValidation`. Integers, states of seed
    generators, local layers and variables are left alone. One message per epoch.

    Collective: all ranks must pass it to `fit`, at the same place. The callback
    `BroadcastGlobalVariablesCallback` contains one.

    Args:
        mode: `"average"` takes the mean over those ranks whose values are finite, `"root"` the
            values of `root_rank`, `"local"` keeps each rank's own.
        root_rank: Used with `"root"`.
        local_variables: Variables to leave alone.

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
        """Forget what an earlier `fit` united."""
        super().on_train_begin(logs)
        self._united = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Unite the state after the last batch; take back what a step that was given up moved."""
        super().on_train_batch_end(batch, logs)
        if self.is_void:
            # The step was given up before its update, but its forward pass has moved statistics.
            for variable, value in self._united:
                variable.assign(value)

    def act(self) -> None:
        """Unite the state."""
        self.unite()

    def unite(self) -> None:
        """Unite the state now. Collective: all ranks must call this, in the same order."""
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


def _average(variables: list[keras.Variable], members: ProcessSet) -> None:
    """Average in float64, in which the mean of equal float32 values is the value itself.

    A rank whose value is not finite takes that of the others: the sum would be NaN for all.
    """
    values = [np.asarray(variable.numpy(), dtype=np.float64) for variable in variables]
    counts = [bool(np.all(np.isfinite(value))) for value in values]
    sent = [v.ravel() if counts[i] else np.zeros(v.size) for i, v in enumerate(values)]
    total = collectives.allreduce(
        tf.constant(np.concatenate([*sent, np.array(counts, np.float64)])),
        op=runtime.Sum,
        process_set=members,
        name="tfscale_non_trainable_state",
    )
    *sums, n_ranks = np.split(np.asarray(total), np.cumsum([value.size for value in values]))
    _warn_of([v.path for v, counted in zip(variables, counts, strict=True) if not counted])
    for variable, value, n in zip(variables, sums, n_ranks, strict=True):
        if n > 0:
            variable.assign((value / n).reshape(variable.shape))


def _warn_of(paths: list[str]) -> None:
    if paths:
        more = f" and {len(paths) - _NAMES_SHOWN} more" if len(paths) > _NAMES_SHOWN else ""
        text = "Rank %d has NaN or infinity in %s%s, and takes the average of the other ranks."
        logger.warning(text, runtime.rank(), ", ".join(paths[:_NAMES_SHOWN]), more)
