"""Batch size and learning rate that follow theta during one `fit`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from tfscale.callbacks.batch_size_schedule import ChangingBatchSize, batches_for, check_sizes
from tfscale.callbacks.epoch_measures import EpochBatch, EpochMeasures
from tfscale.callbacks.learning_rate import AdaptiveRate, LearningRateScheduleCallback
from tfscale.comm import runtime
from tfscale.config import ConfigError, require
from tfscale.data.dataset_batches import DatasetBatches
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import count_active
from tfscale.files import append_json_lines, read_json_lines, write_json_lines
from tfscale.fit.preparation import build
from tfscale.fit.session import FitSession
from tfscale.internals.keras import is_built, print_msg, serve_again, steps_until
from tfscale.measure import growth
from tfscale.optimizer.distributed import distributed_of

logger = logging.getLogger("tfscale")

GROWTH_REMEDY = (
    "Choose start_batch_size, factor and max_batch_size accordingly, or "
    'active_ranks="grow", where a batch may be smaller than the number of ranks.'
)


MEANS = ("sum_over_batch_size", "mean")
SETTERS = (keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau)


class AdaptiveBatchSize(ChangingBatchSize):
    """Grow batch size and learning rate together while training, then let the rate decay.

    * theta = (F_0 - F) / ||w_0 - w|| at the end of an epoch. F is the epoch's mean training loss
      (`logs["loss"]`, regularization included), averaged over ranks; F_0 is the loss of the first
      global batch, or of all batches of the first execution under `steps_per_execution`; w_0 are
      the trainable variables before the first step, after any broadcast.
    * The interval K is given, or found by `rule` from theta over epochs. Epochs count from 1, the
      first one after `warmup_epochs`, in which a warm-up callback may set the rate. The rate at
      their end is the initial rate.
    * The batch grows at the end of epoch max(K, the epoch in which K was found), and every K
      epochs from there, up to `max_batch_size`, until memory is not expected to suffice for more,
      or until the first decay.
    * The first decay sets the rate to `decay` times the initial one, later ones multiply it by
      `decay`. Decays happen at the epochs in `decay_epochs`, or when the training cost saturates
      after growth has ended: its mean over three epochs is less than `saturation` below that of
      the three epochs before, with the same batch and rate.
    * With `rule="seesaw"` the batch grows in `decay_epochs`, where a schedule would divide the rate
      by `factor`; the rate is divided by the root of it. Once the batch is largest, by `factor`.

    Every decision depends on numbers averaged over the ranks only, so it is the same on all ranks.
    It is logged with its reason and written to `log_path`; batch size, rate and theta are added
    to the logs of the epoch.

    Collective: all ranks must pass it to `fit`. Each `fit` begins with the initial batch size
    unless it resumes from a backup. After `fit` the data has its own batch size again; the rate
    stays, and another instance takes it as its initial rate.

    Source: [T] 5.1.4 (eq. 5.4, algorithm 3), 5.1.5; "seesaw": arXiv 2510.14717.

    Examples:
        >>> tfscale.init()
        >>> data = tf.data.Dataset.from_tensor_slices((np.zeros((16, 3)), np.ones((16, 1))))
        >>> data = data.batch(4)  # of all ranks
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        >>> adaptive = tfscale.callbacks.AdaptiveBatchSize(data, max_batch_size=16, interval=2)
        >>> history = model.fit(data, epochs=6, callbacks=[adaptive], verbose=0)
        >>> history.history["batch_size"]
        [4, 4, 8, 8, 16, 16]
    """

    compared = ("_settings", "_has_surplus", "_momentum_correction", "sharded")

    data: GlobalBatches | DatasetBatches
    _control: growth.GrowthControl
    _rate: Any = None  # an AdaptiveRate from the first `fit` on
    _n_warmup_left = 0
    _is_new_epoch = True

    def __init__(
        self,
        data: GlobalBatches | tf.data.Dataset,
        max_batch_size: int,
        *,
        sharded: bool = False,
        start_batch_size: int | None = None,
        factor: float = 2,
        learning_rate_rule: growth.RateRule = "linear",
        interval: int | tuple[int, int] | None = None,
        rule: growth.Rule = "robust",
        tolerance: float = 0.10,
        saturation: float | None = 0.01,
        decay: float = 0.1,
        decay_epochs: Sequence[int] = (),
        warmup_epochs: int = 0,
        signal: growth.Signal = "theta",
        active_ranks: Literal["all", "grow"] = "all",
        momentum_correction: bool = True,
        log_path: str | Path | None = "adaptive.jsonl",
        verbose: int = 0,
    ) -> None:
        """Configure the growth.

        Args:
            data: The data that `fit` trains on: `GlobalBatches`, or a batched `tf.data.Dataset`.
                Batches of a dataset are global: every rank reads them, and trains on its rows. So
                they must be equal on all ranks, which is compared. A dataset that repeats needs
                `steps_per_epoch` in `fit`; an epoch keeps its number of samples.
            max_batch_size: Final number of samples of a step over all ranks; at most the number of
                samples of `data`.
            sharded: The dataset is this rank's own; a step has a batch of each rank. Sizes count
                the samples of all ranks, which must divide them.
            start_batch_size: Initial number of samples of a step; None uses that of the data. The
                largest stable batch is best; `tfscale tune batch-size` looks for it.
            factor: Factor of each growth, greater than 1; that of the last one may be smaller.
            learning_rate_rule: The rate grows by the same factor ("linear"), by its root ("sqrt")
                or not at all ("none").
            interval: Epochs between two growths; a pair (lowest, highest) limits the interval that
                is found from theta, which is `highest` if nothing is found by that epoch.
            rule: "robust": K = n at the first epoch n >= 3 with two consecutive relative changes of
                theta below `tolerance`, all thetas involved finite and positive. "thesis": at the
                first n >= 2 with one such change (algorithm 3 as published). "peak": the epoch with
                the largest theta, once two consecutive ones lie below it. The batch does not grow
                before K is found. "seesaw": in `decay_epochs`; `learning_rate_rule`, `interval`,
                `saturation` and `decay` have no effect.
            tolerance: Relative change of theta below which it counts as unchanged.
            saturation: Relative decrease of the training cost below which it counts as saturated;
                None disables decays by saturation.
            decay: Factor of each decay, in (0, 1].
            decay_epochs: Epochs at whose begin the rate decays, counted from 0 like
                `initial_epoch`; they replace decays by saturation. The first must come after the
                warm-up and one more epoch.
            warmup_epochs: Epochs at the beginning that are not counted.
            signal: "theta", or "noise_scale": the batch grows whenever the gradient noise scale,
                estimated from the norms of the ranks' gradients and of their mean, reaches the next
                batch size, at most once per `interval` (1 if None). This needs two ranks and an
                exchange that sums whole gradients.
            active_ranks: "grow" allows batches of less than 2 samples per rank: surplus ranks
                repeat another rank's slice with weight 0, and become active as the batch grows.
                This needs losses that are means, and gradients averaged over all ranks. Metrics
                without weights and losses added by layers, such as activity regularizers, count the
                repeated samples.
            momentum_correction: As in `LearningRateScheduleCallback`.
            log_path: JSON-lines file, one line per epoch, written by rank 0; None writes none.
            verbose: 1 prints a line on rank 0 at every change.

        Raises:
            ConfigError: An argument does not fit. When training begins, also if `fit` trains on
                other data, the ranks cannot share a batch size, the learning rate is a schedule
                other than `tfscale.ScalableSchedule`, another callback sets rate or batch size, or
                "grow" meets `class_weight`, or a loss or exchange that is not a mean.
        """
        super().__init__()
        self.data = batches = batches_for(data, sharded)
        self._settings = growth.GrowthSettings(
            sizes=growth.ladder(start_batch_size or batches.batch_size, max_batch_size, factor),
            learning_rate_rule=learning_rate_rule,
            signal=signal,
            interval=None if isinstance(interval, tuple) else interval,
            rule=growth.IntervalRule(rule, tolerance, *_bounds_of(interval, signal)),
            saturation=saturation,
            decay=decay,
            decay_epochs=tuple(decay_epochs),
            warmup_epochs=warmup_epochs,
            factor=factor,
        )
        fits = active_ranks in ("all", "grow")
        require(fits, "active_ranks", "'all' or 'grow'", active_ranks, "Use 'all' if in doubt.")
        self._has_surplus = active_ranks == "grow"
        if isinstance(batches, DatasetBatches) and (self._has_surplus or signal == "noise_scale"):
            raise ConfigError(
                "active_ranks='grow' and signal='noise_scale' need GlobalBatches. Received: "
                f"active_ranks={active_ranks!r}, signal={signal!r} with a tf.data.Dataset. Leave "
                "them out: ranks share batches of a dataset of any size."
            )
        self._momentum_correction = momentum_correction
        self.sharded = sharded
        self.log_path = log_path
        self.verbose = verbose
        self._measures = EpochMeasures(has_noise_scale=signal == "noise_scale")

    def all_sizes(self, data: GlobalBatches | DatasetBatches) -> list[int]:
        """Return the sizes of all growths."""
        return list(self._settings.sizes)

    def set_model(self, model: Any) -> None:
        """Prepare the model, and measure gradient norms in its optimizer if the signal needs it."""
        super().set_model(model)
        self._measures.watch(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the configuration; reset the state, or restore that of a backup."""
        super().on_train_begin(logs)
        settings = self._settings
        first = self.session.call.initial_epoch  # also of a run that resumes from a backup
        if not is_built(self.model):  # the first parameters must be known
            build(self.model)
        rate = AdaptiveRate(self.model, self._momentum_correction, self._rate)
        _check_rate_is_free(self, self.session.callbacks, settings.warmup_epochs)
        with self._take_over(self.data):
            if self._has_surplus:
                begin_with_surplus(self.session)
            check_decays(settings, first)
            check_sizes(self.data, settings.sizes, "max_batch_size", GROWTH_REMEDY)
            if settings.signal == "noise_scale" and self._has_surplus:
                check_compared(settings.sizes)
        self._control = growth.GrowthControl(settings)
        self._measures.start()
        self._rate = rate
        self._n_warmup_left = settings.warmup_epochs
        state = self.take_backup()
        self._keep_records(before=state.get("epoch", 0))
        if state:
            self._control.restore(state["control"])
            self._measures.restore(state["measures"], state.get("arrays", []))
            self._rate.restore(state["rate"])
            self._n_warmup_left = state["n_warmup_left"]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Apply the last decision."""
        super().on_epoch_begin(epoch, logs)
        self._is_new_epoch = True
        if not self._n_warmup_left:
            stretch = self._control.batch_size / self._settings.sizes[0]
            self._rate.rescale(self._control.rate_scale, stretch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the first parameters."""
        super().on_train_batch_begin(batch, logs)
        self._measures.begin_batch(self.model, is_first=self._is_new_epoch)
        self._is_new_epoch = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the loss of the first batch."""
        super().on_train_batch_end(batch, logs)
        if not self.is_void:
            self._measures.end_batch(logs)
            if steps_until(self.model, batch) >= ((self.params or {}).get("steps") or 0):
                self._measures.end_steps(self._batch())

    def _batch(self) -> EpochBatch:
        control = self._control
        return EpochBatch(control.batch_size, control.next_size, self._has_surplus)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Decide batch size and rate of the next epoch. Collective."""
        n_steps = self.data.steps_for(self._control.batch_size)
        super().on_epoch_end(epoch, logs)
        if self.is_void:
            return
        self._n_warmup_left = max(0, self._n_warmup_left - 1)
        control = self._control
        batch = self._batch()
        rate = self._rate.value()
        measures = self._measures.end_epoch(self.model, logs, batch)
        decision = control.end_epoch(epoch, measures)
        shown = {"batch_size": batch.size, "learning_rate": rate, "theta": decision.theta}
        if self._settings.signal == "noise_scale":
            shown["noise_scale"] = measures.noise_scale
        if runtime.rank() == 0:
            record = {
                "epoch": epoch,
                **shown,
                "active_ranks": batch.active,
                "steps": n_steps,
                "loss": measures.cost,
                "first_loss": measures.first_cost,
                "distance": measures.distance,
                "interval": decision.interval,
                "next_batch_size": decision.batch_size,
                "next_rate_scale": decision.rate_scale,
                "reasons": list(decision.reasons),
            }
            self._write(record)
        if logs is not None:
            logs.update(shown)

    def _write(self, record: dict[str, Any]) -> None:
        for reason in record["reasons"]:
            logger.info("Epoch %d: %s.", record["epoch"] + 1, reason)
            if self.verbose:
                print_msg(f"\nEpoch {record['epoch'] + 1}: {reason}.")
        if self.log_path is not None:
            append_json_lines(self.log_path, [record])

    def silence(self) -> None:
        """Write and print nothing, for trainings that only measure."""
        self.log_path, self.verbose = None, 0

    def _keep_records(self, before: int) -> None:
        """Keep the log lines that an earlier part of the run wrote for epochs before this one."""
        if self.log_path is not None and runtime.rank() == 0:
            kept = read_json_lines(self.log_path) if before else []
            write_json_lines(self.log_path, [line for line in kept if line["epoch"] < before])

    def size_of(self, epoch: int) -> int:
        """Return the batch size of the last decision."""
        return self._control.batch_size

    def backup_state(self) -> dict[str, Any]:
        """Return the state that later decisions depend on, for checkpoints."""
        measures, origin = self._measures.state()
        return {
            "control": self._control.state(),
            "measures": measures,
            "rate": self._rate.state(),
            "n_warmup_left": self._n_warmup_left,
            "arrays": origin,
        }

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state with which another number of ranks resumes, from those of all ranks."""
        measures = self._measures.merge([state["measures"] for state in states])
        return {**states[0], "measures": measures}


def _bounds_of(interval: int | tuple[int, int] | None, signal: str) -> tuple[int, int | None]:
    """Return the limits of the interval; the highest is None if there is none."""
    if not isinstance(interval, tuple):
        return 1, None
    if signal == "noise_scale":
        raise ConfigError(
            "interval must be a number with signal='noise_scale'. Received: "
            f"interval={interval!r}. Pass the fewest epochs between growths."
        )
    return interval


# Conditions that are checked when training begins.


def check_decays(settings: growth.GrowthSettings, first: int) -> None:
    """Refuse decays in a run's warm-up, from its `first` epoch on, or in the epoch after it."""
    end = first + settings.warmup_epochs
    early = [epoch for epoch in settings.decay_epochs if first <= epoch <= end]
    if early:
        raise ConfigError(
            "decay_epochs must follow the warm-up and one epoch. Received: "
            f"decay_epochs={settings.decay_epochs}, warmup_epochs={settings.warmup_epochs}, in a "
            f"run that begins with epoch {first} (counted from 0). Decay from epoch {end + 1} on."
        )


def check_compared(sizes: Sequence[int]) -> None:
    """Refuse growing batches that feed one rank only: there would be no gradients to compare."""
    lonely = [n for n in sizes[:-1] if count_active(n, runtime.size()) < 2]
    if lonely:
        raise ConfigError(
            "signal='noise_scale' needs a batch that two ranks share. Received: batch size "
            f"{lonely[0]}, which feeds one of {runtime.size()} ranks. Start with a larger batch, "
            "or use signal='theta'."
        )


def _check_rate_is_free(adaptive: Any, callbacks: Sequence[Any], warmup_epochs: int) -> None:
    """Refuse other callbacks that set the learning rate, but for a warm-up."""
    for callback in callbacks:
        is_setter, name = isinstance(callback, SETTERS), type(callback).__name__
        if isinstance(callback, LearningRateScheduleCallback):  # a warm-up may set it
            is_setter = callback.end_epoch is None or callback.end_epoch > warmup_epochs
        if is_setter:
            raise ConfigError(
                f"Two callbacks set the learning rate. Received: {name} and "
                f"{type(adaptive).__name__}. Remove it; use decay_epochs or saturation for decays, "
                "warmup_epochs for epochs in which another callback may set the rate."
            )


def begin_with_surplus(session: FitSession) -> None:
    """Let a part of the ranks share the batches of a `fit`; the others repeat slices with weight 0.

    Refuses models whose loss, or gradient, weights would not make that of the active ranks.
    """
    _check_exchange(session)
    _check_weights(session)
    session.data.use_active_ranks()
    if session.call.epochs is not None:
        serve_again(session.call.epochs)


def _check_exchange(session: FitSession) -> None:
    """Refuse steps whose gradients are not averaged over all ranks: the weights assume that."""
    distributed = distributed_of(session.model.optimizer)
    strategy = None if distributed is None else distributed.strategy
    n_ranks = runtime.size() if distributed is None else distributed.bound.process_set.size()
    if session.trains_apart or session.has_groups or n_ranks < runtime.size():
        way = "ParameterAveraging" if session.trains_apart else f"exchange={strategy}"
        raise ConfigError(
            'active_ranks="grow" needs gradients that all ranks average in every step: a rank '
            f"that rests has weight 0, the others more than 1. Received: {way}, {n_ranks} of "
            f"{runtime.size()} ranks. Use another exchange on all ranks, or active_ranks='all'."
        )


def _check_weights(session: FitSession) -> None:
    """Refuse losses that weights cannot turn into the mean over the active ranks."""
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
