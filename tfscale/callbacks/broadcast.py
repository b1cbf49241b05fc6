"""Start all ranks from the weights of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from tfscale.callbacks import building
from tfscale.callbacks.base import Callback
from tfscale.callbacks.consistency_check import ConsistencyCheck
from tfscale.callbacks.local_models import LocalModels
from tfscale.callbacks.non_trainable import NonTrainableState
from tfscale.checkpoints import state as model_state
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError, ExchangeError
from tfscale.fit import adapted_layers


class BroadcastGlobalVariablesCallback(Callback):
    """Copy all weights and optimizer state from one rank to the others before the first update.

    Collective: all ranks must pass it to `fit`, at the same place. Callbacks that load weights
    when training begins (`tfscale.callbacks.BackupAndRestore`) come before it in the list.

    Args:
        root_rank: Rank whose values are kept, 0 <= root_rank < size.
        device: Ignored; kept for scripts written for Horovod.
        local_variables: Model variables that stay different on every rank, or one. They, and the
            optimizer slots that belong to them, are neither copied nor checked, like those of
            local layers (`PartialDistributedOptimizer`) and of `register_local_var`.
        consistency_check: Whether to run `ConsistencyCheck` as well.
        non_trainable: What happens to moving statistics before validation and saving; see
            `NonTrainableState`.

    Raises:
        ConfigError: `root_rank` is not a rank, or `non_trainable` is unknown.
        ExchangeError: When training begins, if the ranks hold different models.
    """

    def __init__(
        self,
        root_rank: int,
        device: str = "",
        local_variables: keras.Variable | Iterable[keras.Variable] | None = None,
        *,
        consistency_check: bool = True,
        non_trainable: str = "average",
    ) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        if isinstance(local_variables, keras.Variable):
            local_variables = [local_variables]
        self.local_variables = list(local_variables or ())
        state = NonTrainableState(non_trainable, root_rank, self.local_variables)
        self.companions: list[Callback] = [LocalModels(), state]
        if consistency_check:
            self.companions.append(ConsistencyCheck(local_variables=self.local_variables))

    def register_local_var(self, var: keras.Variable) -> None:
        """Let a variable stay different on every rank, as one of `local_variables`."""
        for each in (self, *self.companions):
            if hasattr(each, "local_variables"):
                each.local_variables.append(var)

    def set_params(self, params: dict[str, Any]) -> None:
        """Hand the parameters of `fit` to the callbacks inside."""
        super().set_params(params)
        for callback in self.companions:
            callback.set_params(params)

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model, and hand it to the callbacks inside."""
        super().set_model(model)
        for callback in self.companions:
            callback.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast now, or just before the first step if the model is not built yet.

        Raises:
            ConfigError: `root_rank` is not a rank.
        """
        super().on_train_begin(logs)
        if not 0 <= self.root_rank < runtime.size():
            raise ConfigError(
                f"root_rank must be a rank of this job, 0 to {runtime.size() - 1}. "
                f"Received: root_rank={self.root_rank}. Pass 0 if in doubt."
            )
        if runtime.size() > 1:
            building.when_built(self.model, self._broadcast)
        for callback in self.companions:
            callback.on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Run the callbacks inside."""
        super().on_train_batch_end(batch, logs)
        for callback in self.companions:
            callback.on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Run the callbacks inside."""
        super().on_test_begin(logs)
        for callback in self.companions:
            callback.on_test_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run the callbacks inside."""
        super().on_epoch_begin(epoch, logs)
        for callback in self.companions:
            callback.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Run the callbacks inside: average groups, unite moving statistics, check weights."""
        super().on_epoch_end(epoch, logs)
        for callback in self.companions:
            callback.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Run the callbacks inside."""
        super().on_train_end(logs)
        for callback in self.companions:
            callback.on_train_end(logs)

    def _broadcast(self) -> None:
        _broadcast(self.model, self.root_rank, self.local_variables)
        average = getattr(self.model.optimizer, "group_average", None)
        if average is not None:
            average.start_from_here()


def broadcast_global_variables(root_rank: int = 0, model: Any = None) -> None:
    """Give all variables of a model, and of its optimizer, the values of one rank.

    Local layers and variables, and states of random numbers (dropout), stay each rank's own.

    Collective: all ranks must call this.

    Args:
        root_rank: Whose values.
        model: A built Keras model. TensorFlow 2 has no global collection of variables, so it must
            be given, or `BroadcastGlobalVariablesCallback` be used.

    Raises:
        ConfigError: No model is given, or root_rank is not a rank.
        ExchangeError: The ranks hold different models.
    """
    if model is None:
        raise ConfigError(
            "TensorFlow 2 has no global variables. Received: model=None. Pass model=..., or give "
            "fit a BroadcastGlobalVariablesCallback(0)."
        )
    _broadcast(model, root_rank)


def _broadcast(
    model: keras.Model, root_rank: int, local_variables: Iterable[keras.Variable] = ()
) -> None:
    state = model_state.common_variables(model, local_variables)
    _require_equal_shapes(state)
    objects.broadcast_variables(state, root_rank)
    model_state.broadcast_loaded(model, root_rank)
    adapted_layers.settle(model)


def _require_equal_shapes(variables: list[keras.Variable]) -> None:
    """Compare shapes and dtypes over ranks; names may differ, as Keras numbers layers."""
    mine = [(item.path, tuple(item.shape), str(item.dtype)) for item in variables]
    every = objects.allgather_object(mine, name="shapes of variables")
    for rank, theirs in enumerate(every):
        for index in range(max(len(every[0]), len(theirs))):
            first = every[0][index] if index < len(every[0]) else None
            other = theirs[index] if index < len(theirs) else None
            if first is None or other is None or first[1:] != other[1:]:
                raise ExchangeError(
                    "All ranks must train the same model with the same optimizer. Received: "
                    f"variable {index} is {_describe(first)} on rank 0 and {_describe(other)} on "
                    f"rank {rank}. Build the model from the same code and settings everywhere."
                )


def _describe(item: tuple[str, tuple[int, ...], str] | None) -> str:
    return "missing" if item is None else f"{item[0]!r} of shape {item[1]} and dtype {item[2]}"
