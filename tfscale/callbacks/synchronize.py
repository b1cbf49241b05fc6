"""Keep the models and metrics of all ranks equal during a `fit`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras

from tfscale.callbacks.base import Callback, Container
from tfscale.callbacks.consistency_check import ConsistencyCheck
from tfscale.callbacks.local_models import LocalModels
from tfscale.callbacks.metric_average import MetricAverageCallback
from tfscale.callbacks.non_trainable import NonTrainableState
from tfscale.checkpoints import state as model_state
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError, ExchangeError
from tfscale.fit import adapted_layers
from tfscale.fit.preparation import build


class Synchronize(Container):
    """Synchronize weights, statistics and metrics of the ranks of a `fit`: `Synchronize()`.

    * Before the first update it copies all weights and the optimizer's state from one rank to the
      others. A model that is not built yet is built from the data first.
    * Before validation and saving it combines moving statistics (`NonTrainableState`) and, with
      `tfscale.LocalSGD`, shows the average of the groups' models.
    * At the end of epochs it puts metrics of all ranks' data into the logs
      (`MetricAverageCallback`), and requires bitwise equal weights (`ConsistencyCheck`), also after
      the first update.

    Collective: all ranks must pass it to `fit`, at the same place: after callbacks that restore
    weights when training begins (`tfscale.callbacks.Checkpoint`), before callbacks that use metrics
    (EarlyStopping).

    Args:
        root_rank: Rank whose values are kept, 0 <= root_rank < size.
        metrics: Whether to average metrics.
        check: Whether to compare weights.
        local_variables: A model variable, or several, that stay different on every rank. They and
            their optimizer slots are neither copied nor checked, like those of local layers
            (`PartialDistributedOptimizer`) and of `register_local_var`.
        non_trainable: Treatment of moving statistics before validation and saving, the `mode` of
            `NonTrainableState`.

    Raises:
        ConfigError: `root_rank` is not a rank, or `non_trainable` is unknown.
        ExchangeError: When training begins, if the ranks hold different models.
    """

    shows_averages = True
    compared = ("averages_metrics", "checks")

    def __init__(
        self,
        root_rank: int = 0,
        metrics: bool = True,
        check: bool = True,
        *,
        local_variables: keras.Variable | Iterable[keras.Variable] | None = None,
        non_trainable: str = "average",
    ) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.averages_metrics, self.checks = metrics, check
        if isinstance(local_variables, keras.Variable):
            local_variables = [local_variables]
        self.local_variables = list(local_variables or ())
        self.companions = [
            LocalModels(),
            NonTrainableState(non_trainable, root_rank, self.local_variables),
            *([ConsistencyCheck(local_variables=self.local_variables)] if check else ()),
            *([MetricAverageCallback()] if metrics else ()),
        ]

    def register_local_var(self, var: keras.Variable) -> None:
        """Let a variable stay different on every rank, as one of `local_variables`."""
        self.local_variables.append(var)
        for part in self.companions:
            if isinstance(part, NonTrainableState | ConsistencyCheck):
                part.local_variables.append(var)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, after the callbacks before this one have restored their state."""
        Callback.on_train_begin(self, logs)
        if not 0 <= self.root_rank < runtime.size():
            raise ConfigError(
                f"root_rank must be a rank of this job, 0 to {runtime.size() - 1}. "
                f"Received: root_rank={self.root_rank}. Pass 0 if in doubt."
            )
        if runtime.size() > 1:
            build(self.model)
            self._broadcast()
        for part in self.parts():
            part.on_train_begin(logs)

    def _broadcast(self) -> None:
        _broadcast(self.model, self.root_rank, self.local_variables)
        average = self.session.group_average
        if average is not None:
            average.start_from_here()


class BroadcastGlobalVariablesCallback(Synchronize):
    """Horovod's name of `Synchronize` without metrics; put `MetricAverageCallback` after it.

    Args:
        root_rank: As for `Synchronize`.
        device: Ignored; kept for scripts written for Horovod.
        local_variables: As for `Synchronize`.
        consistency_check: `check` of `Synchronize`.
        non_trainable: As for `Synchronize`.

    Raises:
        ConfigError: As for `Synchronize`.
        ExchangeError: As for `Synchronize`.
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
        del device
        super().__init__(
            root_rank,
            metrics=False,
            check=consistency_check,
            local_variables=local_variables,
            non_trainable=non_trainable,
        )


def broadcast_global_variables(root_rank: int = 0, model: Any = None) -> None:
    """Give all variables of a model, and of its optimizer, the values of one rank.

    Local layers and variables, and states of random numbers (dropout), are not changed.

    Collective: all ranks must call this.

    Args:
        root_rank: The rank whose values are sent.
        model: A built Keras model. It is required, as TensorFlow 2 has no global collection of
            variables; `Synchronize` needs no model.

    Raises:
        ConfigError: No model is given, or root_rank is not a rank.
        ExchangeError: The ranks hold different models.
    """
    if model is None:
        raise ConfigError(
            "TensorFlow 2 has no global variables. Received: model=None. Pass model=..., or give "
            "fit a tfscale.callbacks.Synchronize()."
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
        for index, (first, other) in enumerate(itertools.zip_longest(every[0], theirs)):
            if first is None or other is None or first[1:] != other[1:]:
                raise ExchangeError(
                    "All ranks must train the same model with the same optimizer. Received: "
                    f"variable {index} is {_describe(first)} on rank 0 and {_describe(other)} on "
                    f"rank {rank}. Build the model from the same code and settings everywhere."
                )


def _describe(item: tuple[str, tuple[int, ...], str] | None) -> str:
    return "missing" if item is None else f"{item[0]!r} of shape {item[1]} and dtype {item[2]}"
