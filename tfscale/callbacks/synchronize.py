"""Keep the models and metrics of all ranks equal during a `fit`, and check that they are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from tfscale.callbacks.base import BeforeValidation, Callback, may_communicate
from tfscale.callbacks.local_models import LocalModels
from tfscale.callbacks.metric_average import MetricAverageCallback
from tfscale.checkpoints import variables as model_state
from tfscale.comm import collectives, objects, runtime
from tfscale.config import ConfigError, require
from tfscale.fit import adapted_layers
from tfscale.fit.preparation import build
from tfscale.internals.traits import Phase
from tfscale.layers.sharded_embedding import sharded_embeddings
from tfscale.optimizer.distributed import (
    broadcast_loaded,
    distributed_of,
    passes_per_update,
    process_set_of,
)

logger = logging.getLogger("tfscale")

_NAMES_SHOWN = 3
_CAUSES = (
    "Likely causes: the optimizer is not wrapped in DistributedOptimizer; the weights were not "
    "broadcast or were changed on one rank afterwards; a callback or train_step does something "
    "else depending on a rank's own data, such as a learning rate lowered by metrics that are not "
    "averaged (MetricAverageCallback averages them). Register variables meant to differ with "
    "register_local_var, or give them as local_variables."
)


class Synchronize(Callback):
    """Synchronize weights, moving statistics and metrics of all ranks during a `fit`.

    * Before the first update it copies all weights and the optimizer's state from one rank to the
      others. A model that is not built yet is built from the data first.
    * Before validation and saving it combines moving statistics. With `tfscale.LocalSGD` the model
      has the average of the groups' weights meanwhile.
    * At the end of epochs it puts metrics of all ranks' data into the logs
      (`MetricAverageCallback`).
    * After the first update and at the end of epochs it raises an error if weights are not bitwise
      equal on all ranks.

    Collective: all ranks must pass it to `fit`.

    Args:
        root_rank: Rank whose values are kept, 0 <= root_rank < size.
        metrics: Whether to combine metrics, as `MetricAverageCallback` does.
        check: Whether to compare the digests of weights and optimizer state.
        local_variables: A model variable, or several, that stay different on every rank. They and
            their optimizer slots are neither copied nor checked, like those of local layers
            (`PartialDistributedOptimizer`) and of `register_local_var`.
        non_trainable: `"average"` replaces moving statistics, before validation and saving, by
            their mean over the ranks whose values are finite; `"local"` keeps each rank's own.

    Raises:
        ConfigError: `root_rank` is not a rank, or `non_trainable` is unknown.
        ExchangeError: When training begins, if the ranks hold different models.

    Examples:
        >>> tfscale.init()
        >>> data = tfscale.data.GlobalBatches(np.zeros((8, 3)), np.ones((8, 1)), batch_size=8)
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> callbacks = [tfscale.callbacks.Synchronize()]
        >>> history = model.fit(data, epochs=3, callbacks=callbacks, verbose=0)
        >>> [round(loss, 2) for loss in history.history["loss"]]  # of all ranks' samples
        [1.0, 0.64, 0.41]
    """

    phase = Phase.SYNCHRONISE
    shows_averages = True
    compared = ("averages_metrics", "checks")
    # Whether a model that cannot be built before its first step is refused: `fit` of
    # `tfscale.distribute` gives all ranks the same seed and the same batches.
    requires_built = True

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
            NonTrainableState(non_trainable, self.local_variables),
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
        """Build the model, and broadcast the weights."""
        super().on_train_begin(logs)
        fits, expected = 0 <= self.root_rank < runtime.size(), f"a rank, 0 to {runtime.size() - 1}"
        require(fits, "root_rank", expected, self.root_rank, "Pass 0 if in doubt.")
        if runtime.size() > 1:
            if self._is_built():
                _broadcast(self.model, self.root_rank, self.local_variables)
            if self.session.group_average is not None:
                self.session.group_average.start_from_here()

    def _is_built(self) -> bool:
        try:
            build(self.model)
        except ConfigError:
            if self.requires_built:
                raise
            return False
        return True


class BroadcastGlobalVariablesCallback(Synchronize):
    """Horovod's name of `Synchronize` without metrics; add `MetricAverageCallback` for these.

    Args and errors not listed are those of `Synchronize`.

    Args:
        device: Ignored; kept for scripts written for Horovod.
        consistency_check: `check` of `Synchronize`.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> broadcast = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)
        >>> callbacks = [broadcast, tfscale.callbacks.MetricAverageCallback()]
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
        >>> history.history["loss"]
        [1.0]
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
        super().__init__(
            root_rank,
            metrics=False,
            check=consistency_check,
            local_variables=local_variables,
            non_trainable=non_trainable,
        )


# Weights of one rank for all.


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

    Examples:
        >>> tfscale.init()
        >>> dense = keras.layers.Dense(1, kernel_initializer="ones")
        >>> model = keras.Sequential([keras.Input((2,)), dense])
        >>> tfscale.broadcast_global_variables(root_rank=0, model=model)
        >>> [variable.numpy().tolist() for variable in model.weights]  # those of rank 0
        [[[1.0], [1.0]], [0.0]]
    """
    if model is None:
        raise ConfigError(
            "model must be a Keras model. Received: model=None. Pass model=..., or give fit a "
            "tfscale.callbacks.Synchronize()."
        )
    _broadcast(model, root_rank)


def _broadcast(
    model: keras.Model, root_rank: int, local_variables: Iterable[keras.Variable] = ()
) -> None:
    state = model_state.common_variables(model, local_variables)
    # By place: Keras numbers layers by process.
    kinds = [objects.Named(v.path, f"{tuple(v.shape)} {v.dtype}") for v in state]
    hint = "Build model and optimizer from the same code and settings everywhere."
    objects.require_equal(kinds, "Variables of model and optimizer", hint)
    loads = [layer.rows.n_loads for layer in sharded_embeddings(model)]
    hint = "Each rank has other rows: call load_weights, or set_rows, on all ranks."
    objects.require_equal(loads, "Numbers of times that rows of tables were loaded", hint)
    objects.broadcast_variables(state, root_rank)
    broadcast_loaded(model, root_rank)
    adapted_layers.refresh_all(model)


# Moving statistics.


class NonTrainableState(BeforeValidation):
    """Make the non-trainable state equal on all ranks, once per epoch.

    The BatchNormalization of a rank sees that rank's batches only, so the moving statistics differ.
    They are combined before `fit` validates, with one message per epoch. Integers, states of seed
    generators, and local layers and variables are not changed.

    `Synchronize` and `BroadcastGlobalVariablesCallback` add one.

    Args:
        mode: `"average"` takes the mean over the ranks whose values are finite, `"local"` keeps
            each rank's own values.
        local_variables: Variables that stay different on every rank.

    Raises:
        ConfigError: `mode` is none of the above.

    Examples:
        >>> tfscale.init()
        >>> norm = keras.layers.BatchNormalization(momentum=0.5)
        >>> model = keras.Sequential([keras.Input((1,)), norm])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> callbacks = [tfscale.callbacks.Synchronize(non_trainable="average")]
        >>> x, y = np.full((4, 1), 2.0), np.ones((4, 1))
        >>> history = model.fit(x, y, callbacks=callbacks, verbose=0)
        >>> norm.moving_mean.numpy().tolist()  # the mean of all ranks' moving means
        [1.0]
    """

    phase = Phase.COMBINE

    def __init__(
        self, mode: str = "average", local_variables: Iterable[keras.Variable] | None = None
    ) -> None:
        super().__init__()
        fits, remedy = mode in ("average", "local"), "Use 'average' if in doubt."
        require(fits, "non_trainable", "'average' or 'local'", mode, remedy)
        self.mode = mode
        self.local_variables = list(local_variables or ())

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the combined values of an earlier `fit`."""
        super().on_train_begin(logs)
        self._united: list[tuple[keras.Variable, np.ndarray]] = []

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
        members = process_set_of(self.model)
        common = model_state.common_variables(self.model, self.local_variables)
        ids = {id(variable) for variable in common}
        state = [v for v in model_state.non_trainable_state(self.model) if id(v) in ids]
        if not state or not members.included():
            return
        _average(state, members)
        self._united = [(variable, np.array(variable.numpy())) for variable in state]


def average_variables(
    variables: Sequence[keras.Variable],
    weights: Sequence[float],
    name: str,
    process_set: runtime.ProcessSet = runtime.global_process_set,
) -> None:
    """Replace values by their mean over ranks, weighted by this rank's weight of each. Collective.

    Computes in float64, in which the mean of equal float32 values is the value itself. A value with
    weight 0 need not be finite; a variable with weight 0 on all ranks keeps its value.
    """
    values = [np.asarray(variable.numpy(), np.float64) for variable in variables]
    sent = [w * v if w else np.zeros_like(v) for v, w in zip(values, weights, strict=True)]
    *sums, totals = collectives.grouped_allreduce(
        [*sent, np.array(weights, np.float64)], runtime.Sum, process_set=process_set, name=name
    )
    for variable, value, total in zip(variables, sums, np.asarray(totals), strict=True):
        if total > 0:
            variable.assign(np.asarray(value) / total)


def _average(variables: list[keras.Variable], members: runtime.ProcessSet) -> None:
    """Average without values that are not finite: the sum would be NaN for all ranks."""
    counted = [bool(np.all(np.isfinite(np.asarray(v.numpy())))) for v in variables]
    paths = [v.path for v, counts in zip(variables, counted, strict=True) if not counts]
    if paths:
        text = "Rank %d has NaN or infinity in %s, and takes the average of the other ranks."
        logger.warning(text, runtime.rank(), objects.listed(paths, _NAMES_SHOWN))
    average_variables(variables, counted, "tfscale_non_trainable_state", members)


# Comparison of weights.


class ConsistencyCheck(Callback):
    """Require bitwise equal weights on all ranks after the first update and at epoch ends.

    Each rank sends a digest of eight bytes per variable, so a check costs about one pass over the
    weights. It compares trainable variables and the optimizer's state, including learning rate and
    step count, but neither local variables and their optimizer state nor non-trainable state.

    `Synchronize` and `BroadcastGlobalVariablesCallback` add one.

    Args:
        local_variables: Variables that may differ, besides those registered with the optimizer.
        groups: Groups of ranks within which weights must be equal, one sequence of ranks each; None
            uses the groups of local SGD or, without local SGD, the optimizer's process set.

    Raises:
        ExchangeError: At a check, on all ranks, if weights differ; names the variable and ranks.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> callbacks = [tfscale.callbacks.Synchronize(check=True)]
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
        >>> history.history["loss"]  # no ExchangeError: the ranks are equal
        [1.0]
    """

    phase = Phase.COMPARE

    def __init__(
        self,
        local_variables: Iterable[keras.Variable] | None = None,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__()
        self.local_variables = list(local_variables or ())
        self.groups = groups

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
        """Check unless the update was given up."""
        super().on_epoch_end(epoch, logs)
        if not self.is_void:
            self._is_first_due = False
            self.check(f"at the end of epoch {epoch + 1}")

    def check(self, moment: str) -> None:
        """Compare now, and raise on all ranks if weights differ. Collective."""
        if runtime.size() == 1:
            return
        local = model_state.local_ids(self.model, self.local_variables)
        state = [
            *self.model.trainable_variables,
            *model_state.optimizer_variables(self.model),
        ]
        variables = [v for v in model_state.distinct(state) if id(v) not in local]
        digests_here = [(variable.path, _digest(variable)) for variable in variables]
        digests_by_rank = dict(
            enumerate(objects.allgather_object(digests_here, name="check of weights"))
        )
        counts = {rank: len(rank_digests) for rank, rank_digests in digests_by_rank.items()}
        hint = "Build the model and the optimizer from the same code everywhere."
        objects.require_equal_values(counts, f"The number of variables {moment}", hint)
        distributed = distributed_of(self.model.optimizer)
        apart = distributed and distributed.bound.groups
        ranks = process_set_of(self.model).ranks or list(digests_by_rank)
        # By place, with the paths of rank 0: Keras numbers layers by process.
        labels = [f"{path} (variable {i})" for i, (path, _) in enumerate(digests_by_rank[0])]
        digests = {
            rank: dict(zip(labels, [digest for _, digest in rank_digests], strict=True))
            for rank, rank_digests in digests_by_rank.items()
        }
        groups = self.groups or (apart.ranks if apart else [ranks])
        objects.require_equal_values(digests, f"Weights {moment}", _CAUSES, groups)


def _digest(variable: keras.Variable) -> bytes:
    data = np.ascontiguousarray(variable.numpy()).view(np.uint8)
    return hashlib.blake2b(data, digest_size=8).digest()
