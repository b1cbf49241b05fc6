"""Change the batch size between epochs of one `fit`: the mechanism, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfscale.callbacks.backup_and_restore import BackupAndRestore
from tfscale.callbacks.base import Callback
from tfscale.callbacks.learning_rate import LearningRateScheduleCallback
from tfscale.comm import runtime
from tfscale.config import ConfigError
from tfscale.data.control import keep_settings, put_back_settings, use_active_ranks
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import count_active
from tfscale.fit import building
from tfscale.fit.session import FitSession
from tfscale.internals.keras import batch_spec_of, rate_of, serve_again, symbol_of
from tfscale.internals.optimizers import update_rule
from tfscale.internals.traits import judge_before_averages, own_of
from tfscale.optimizer.distributed import distributed_of
from tfscale.optimizer.scalable_schedule import ScalableSchedule

MEANS = ("sum_over_batch_size", "mean")
SETTERS = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)
GROWTH_REMEDY = (
    "Choose start_batch_size, factor and max_batch_size accordingly, or "
    'active_ranks="grow", where a batch may be smaller than the number of ranks.'
)


class ChangingBatchSize(Callback):
    """Sets the batch size of an epoch when it begins; the data has its own again after `fit`.

    A subclass calls `_take_over` when training begins, and says how large batches are.
    """

    sets_batch_size = True
    _data: GlobalBatches

    def size_of(self, epoch: int) -> int:
        """Return the samples of a step over all ranks.

        Args:
            epoch: The one that begins.
        """
        return self._data.batch_size

    def _take_over(self, data: GlobalBatches, check: Callable[[], None]) -> None:
        """Change the batch size of `data` from now on.

        Args:
            data: What is trained on.
            check: May change settings of the data, which are put back if it raises.

        Raises:
            ConfigError: Another callback sets the batch size, too; or of `check`.
        """
        others = [c for c in own_of(self.session.callbacks) if c.sets_batch_size and c is not self]
        if others:
            raise ConfigError(
                "One callback sets the batch size. Received: "
                f"{type(others[0]).__name__} and {type(self).__name__}. Remove one."
            )
        self._data = data
        with keep_settings(data):
            check()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the size of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._data.batch_size = self.size_of(epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the data its own batch size back."""
        super().on_train_end(logs)
        put_back_settings(self._data)


def check_data(data: Any) -> None:
    """Refuse data whose batch size cannot change.

    Raises:
        ConfigError: It is not GlobalBatches.
    """
    if not isinstance(data, GlobalBatches):
        raise ConfigError(
            "The batch size can change inside of one fit only where tfscale cuts the batches; "
            "repeated or batched datasets would keep serving the old size. Received: "
            f"data={type(data).__name__}. Use tfscale.data.GlobalBatches(x, y, ...), or "
            "GlobalBatches.from_dataset(records, ...) with the dataset not batched or repeated."
        )


def check_sizes(
    data: GlobalBatches,
    sizes: Sequence[int],
    name: str = "max_batch_size",
    remedy: str = GROWTH_REMEDY,
) -> None:
    """Refuse batch sizes that the data or the ranks cannot serve.

    Args:
        data: What is trained on.
        sizes: Samples over all ranks, ascending.
        name: What the user knows the largest size as.
        remedy: What to do about a size that the ranks cannot share.

    Raises:
        ConfigError: The maximum is above the data, or a size cannot be shared out.
    """
    if sizes[-1] > data.samples:
        raise ConfigError(
            f"{name} must not be larger than the number of samples, or an epoch has no "
            f"step. Received: {name}={sizes[-1]}, samples={data.samples}. Use a smaller "
            f"{name}, or more data."
        )
    for size in sizes:
        try:
            data.steps_for(size)
        except ConfigError as error:
            raise ConfigError(
                f"Every batch size on the way, {list(sizes)}, must suit the ranks. Received: "
                f"{error} {remedy}"
            ) from error


def check_compared(sizes: Sequence[int]) -> None:
    """Refuse batches that one rank alone would compute: no two gradients could be compared.

    Args:
        sizes: Batch sizes over all ranks, ascending; the last one grows no more.

    Raises:
        ConfigError: A batch that is to grow feeds one rank only.
    """
    lonely = [n for n in sizes[:-1] if count_active(n, runtime.size()) < 2]
    if lonely:
        raise ConfigError(
            "The gradient noise scale is estimated from gradients of two ranks at least. "
            f"Received: batch size {lonely[0]}, which feeds one of {runtime.size()} ranks. Start "
            "with a batch that two ranks share, or use signal='theta'."
        )


def check_rate_and_order(callback: Callback, warmup_epochs: int) -> None:
    """Refuse a `fit` in which the rate could not be controlled. Builds a model that is not built.

    Args:
        callback: Whose training begins.
        warmup_epochs: Epochs in which another callback may set the learning rate.

    Raises:
        ConfigError: With the remedy.
    """
    name, model = type(callback).__name__, callback.model
    if not building.is_built(model):  # the first parameters must be known
        building.build_from_data(model)
        building.build_optimizer(model)
    rate = rate_of(update_rule(model.optimizer))
    if not isinstance(rate, keras.Variable) and type(rate) is not ScalableSchedule:
        raise ConfigError(
            f"{name} changes the learning rate, which a schedule counted in steps would not "
            f"follow. Received: learning_rate={type(rate).__name__}. Use a number, or "
            "tfscale.ScalableSchedule(schedule)."
        )
    _check_order(callback, callback.session.callbacks, warmup_epochs)


def _check_order(own: Any, callbacks: Sequence[Any], warmup_epochs: int) -> None:
    place = {id(callback): index for index, callback in enumerate(callbacks)}
    judge = judge_before_averages(callbacks)
    if runtime.size() > 1 and judge is not None:
        raise ConfigError(
            "What stops or slows training must see metrics of all ranks, or ranks decide "
            f"differently. Received: {judge} before MetricAverageCallback. Put "
            "MetricAverageCallback before it."
        )
    for callback in callbacks:
        name, index = type(callback).__name__, place[id(callback)]
        if isinstance(callback, SETTERS) or _sets_rate_later(callback, warmup_epochs):
            raise ConfigError(
                f"One callback sets the learning rate. Received: {name} and {type(own).__name__}. "
                "Remove it; use decay_epochs or saturation for decays, warmup_epochs for epochs "
                "in which another callback may set the rate."
            )
        if isinstance(callback, BackupAndRestore) and index > place.get(id(own), index):
            raise ConfigError(
                "A backup must be restored before training begins. Received: BackupAndRestore "
                f"behind {type(own).__name__}. Put BackupAndRestore first."
            )


def _sets_rate_later(callback: Any, warmup_epochs: int) -> bool:
    if not isinstance(callback, LearningRateScheduleCallback):
        return False
    return callback.end_epoch is None or callback.end_epoch > warmup_epochs


def begin_with_surplus(session: FitSession) -> None:
    """Let fewer ranks than there are share the batches of a `fit` that begins.

    The others repeat a slice with weight 0.

    Args:
        session: That of the `fit`; its model is compiled and built.

    Raises:
        ConfigError: Weights would not make the loss, or the gradient, that of the active ranks.
    """
    _check_exchange(session)
    _check_weights(session)
    is_wide = has_wide_losses(session.model, session.call.epochs)
    use_active_ranks(session.data, weighs_samples=not is_wide)
    if session.call.epochs is not None:
        serve_again(session.call.epochs)


def _check_exchange(session: FitSession) -> None:
    """Refuse steps whose gradients are not averaged over all ranks: weights suit only those."""
    distributed = distributed_of(session.model.optimizer)
    strategy = None if distributed is None else distributed.strategy
    n_ranks = runtime.size() if distributed is None else distributed.process_set.size()
    if session.trains_apart or session.has_groups or n_ranks < runtime.size():
        way = "ParameterAveraging" if session.trains_apart else f"exchange={strategy}"
        raise ConfigError(
            'active_ranks="grow" needs gradients that all ranks average in every step: a rank '
            f"that rests has weight 0, the others more than 1. Received: {way}, {n_ranks} of "
            f"{runtime.size()} ranks. Use another exchange on all ranks, or active_ranks='all'."
        )


def _check_weights(session: FitSession) -> None:
    """Refuse what does not become the mean over the active ranks by weights."""
    if session.call.class_weight is not None:
        raise ConfigError(
            'active_ranks="grow" serves sample weights, and Keras takes them or class_weight. '
            "Received: class_weight in fit. Give GlobalBatches(sample_weight=) the weight of each "
            "sample's class, or use active_ranks='all'."
        )
    for loss in keras.tree.flatten(session.model.loss):
        reduction = getattr(loss, "reduction", MEANS[0])
        if reduction not in MEANS:
            raise ConfigError(
                'active_ranks="grow" needs losses that are means over samples, whatever their '
                f"weights: those of the ranks that rest are 0. Received: reduction={reduction!r} "
                f"of {loss.name!r}. Use reduction='sum_over_batch_size', or active_ranks='all'."
            )


def has_wide_losses(model: keras.Model, epochs: Any) -> bool:
    """Tell whether losses have more than one value per sample, as those of sequences or images.

    Args:
        model: Built.
        epochs: Keras's iterator of epochs, whose batches tell the outputs of a subclass.
    """
    outputs = getattr(model, "outputs", None)
    if not outputs:
        batch = batch_spec_of(epochs)
        x = batch[0] if isinstance(batch, tuple) else batch
        outputs = model.compute_output_spec(keras.tree.map_structure(symbol_of, x))
    return any(len(output.shape) > 2 for output in keras.tree.flatten(outputs))
