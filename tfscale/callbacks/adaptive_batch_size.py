"""Batch size and learning rate that follow theta during one `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tfscale.callbacks.adaptive_checks import bounds_of, check_data, check_fit, check_settings
from tfscale.callbacks.adaptive_measures import EpochBatch, EpochMeasures
from tfscale.callbacks.adaptive_rate import AdaptiveRate
from tfscale.callbacks.adaptive_record import AdaptiveRecord
from tfscale.callbacks.epochs import EpochCallback
from tfscale.callbacks.growing_ranks import begin_with_surplus
from tfscale.data.active_ranks import may_have_surplus
from tfscale.data.changes import keep_settings, put_back_settings
from tfscale.data.continued_epoch import steps_until
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import argument_of_fit
from tfscale.measure.growth import (
    GrowthControl,
    GrowthSettings,
    RateRule,
    Signal,
    ladder,
    with_largest_interval,
)
from tfscale.measure.theta import IntervalRule, Rule


class AdaptiveBatchSize(EpochCallback):
    """Grow batch size and learning rate together while training, then let the rate decay.

    How everything is defined:

    * F of an epoch is its mean training loss (`logs["loss"]`, regularization included), averaged
      over ranks; F_0 that of the first global batch, or of all batches of the first execution
      under `steps_per_execution`. w_0 are the trainable variables before the first step, after
      any broadcast. theta = (F_0 - F) / ||w_0 - w|| at the end of an epoch.
    * Epochs n count from 1, which is the first epoch of the `fit` behind `warmup_epochs`. Those do
      not count for anything, and the rate is left alone in them: a warm-up callback may set it.
      The rate they end with is the initial one.
    * The interval K is given, or read off theta. "robust": K = n at the first n >= 3 with two
      changes of theta below `tolerance` in a row, all thetas involved finite and positive.
      "thesis": K = n at the first n >= 2 with one such change (algorithm 3 to the letter, no
      guards, no limits). "peak": the epoch with the largest theta, once two epochs in a row lie
      below it; the published intervals (5, 10 and 60 epochs) are peaks.
    * For "robust" and "peak" K lies within limits: at least 1, and at most what leaves three
      fifths of the planned epochs at `max_batch_size`; if nothing is found by then, it is taken.
    * The batch grows at the end of epoch max(K, the epoch in which K was found), and every K
      epochs from there: with "robust" and "thesis" after epochs K, 2K, 3K...
    * Growth ends at `max_batch_size`, when memory is not expected to suffice for more, or with
      the first decay. The first decay sets the rate to `decay` times the initial one, later ones
      multiply by `decay`. They come with the epochs in `decay_epochs`, or where the training cost
      saturates once growth has ended: its mean over three epochs is less than `saturation`
      below that of the three before, with the same batch and rate.

    Every decision is taken from numbers averaged over the ranks and is the same on all of them.
    It is logged with its reason and written to `log_path`; batch size, rate and theta are added
    to the logs of the epoch.

    Collective: all ranks must pass it to `fit`, at the same place. Order: BackupAndRestore,
    broadcast, MetricAverageCallback, this, then what uses metrics. Each `fit` starts afresh,
    except with a backup to go on from. At its end the data has its own batch size again; the rate
    stays, and is the initial one for another instance.

    Source: [T] 5.1.4 (eq. 5.4, algorithm 3), 5.1.5.
    """

    sets_batch_size = True
    compared = ("_settings", "_has_surplus", "_momentum_correction")

    _control: GrowthControl
    _rate: AdaptiveRate
    _n_warmup_left = 0
    _backup: tuple[dict[str, Any], int] | None = None

    def __init__(
        self,
        data: GlobalBatches,
        max_batch_size: int,
        *,
        start_batch_size: int | None = None,
        factor: float = 2,
        learning_rate_rule: RateRule = "linear",
        interval: int | tuple[int, int] | None = None,
        rule: Rule = "robust",
        tolerance: float = 0.10,
        saturation: float | None = 0.01,
        decay: float = 0.1,
        decay_epochs: Sequence[int] = (),
        warmup_epochs: int = 0,
        signal: Signal = "theta",
        active_ranks: Literal["all", "grow"] = "all",
        momentum_correction: bool = True,
        log_path: str | Path | None = "adaptive.jsonl",
        verbose: int = 0,
    ) -> None:
        """Choose how to grow.

        Args:
            data: What `fit` trains on.
            max_batch_size: Samples of a step over all ranks at the end; at most those of `data`.
            start_batch_size: Samples of a step in the beginning; None: `data.batch_size`. The
                largest stable batch is best; `tfscale tune batch-size` looks for it.
            factor: Of each growth, greater than 1; the last one may be smaller.
            learning_rate_rule: The rate grows by the same factor ("linear"), its root ("sqrt") or
                not ("none").
            interval: Epochs from one growth to the next; or (lowest, highest) for one that is
                found; None: found, with the limits above.
            rule: How it is found: "robust", "thesis" or "peak"; see above.
            tolerance: Relative change up to which theta is unchanged.
            saturation: Relative fall up to which the training cost is saturated; None: never.
            decay: Factor of each decay, in (0, 1].
            decay_epochs: Epochs, counted from 0 as `initial_epoch` is, with which decays begin;
                instead of decays by saturation. The warm-up and one epoch come before.
            warmup_epochs: Epochs at the beginning that do not count.
            signal: "noise_scale" grows whenever the gradient noise scale, estimated from the norms
                of the ranks' gradients and of their mean, reaches the next batch size, at most
                once per `interval` (1 if None). It needs two ranks and an exchange that sums whole
                gradients.
            active_ranks: "grow" lets a batch be smaller than 2 samples per rank: the surplus ranks
                repeat another rank's slice with weight 0 and join as the batch grows. It needs
                losses that are means, and gradients that all ranks average. Metrics without weights
                and losses that layers add, such as activity regularizers, count these repetitions.
            momentum_correction: As in `LearningRateScheduleCallback`.
            log_path: JSON lines, one per epoch, written by rank 0; None: none.
            verbose: 1 writes a line on rank 0 whenever something changes.

        Raises:
            ConfigError: An argument does not fit. When training begins, also if `fit` trains on
                other data, a batch size does not suit the ranks, the learning rate is a schedule
                outside of `tfscale.ScalableSchedule`, callbacks contradict each other, or with
                "grow" there is `class_weight`, a loss or an exchange that is no mean of all ranks.
        """
        super().__init__()
        check_data(data)
        put_back_settings(data)  # of a `fit` that broke off
        self.data = data
        self._settings = GrowthSettings(
            sizes=ladder(start_batch_size or data.batch_size, max_batch_size, factor),
            learning_rate_rule=learning_rate_rule,
            signal=signal,
            interval=None if isinstance(interval, tuple) else interval,
            rule=IntervalRule(rule, tolerance, *bounds_of(interval, signal)),
            saturation=saturation,
            decay=decay,
            decay_epochs=tuple(decay_epochs),
            warmup_epochs=warmup_epochs,
        )
        self._has_surplus = may_have_surplus(active_ranks)
        self._momentum_correction = momentum_correction
        self._record = AdaptiveRecord(log_path, verbose)
        self._measures = EpochMeasures(has_noise_scale=signal == "noise_scale")

    def set_model(self, model: Any) -> None:
        """Prepare the model, and its optimizer for the signal."""
        super().set_model(model)
        self._measures.watch(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check what is asked for; start afresh, or from a backup."""
        super().on_train_begin(logs)
        settings, epochs = self._settings, (self.params or {}).get("epochs")
        first = argument_of_fit("initial_epoch") or 0  # also of a run that goes on from a backup
        if settings.rule.high is None:
            settings = with_largest_interval(settings, epochs and epochs - first)
        check_fit(self, self.data, settings.warmup_epochs)
        with keep_settings(self.data):
            if self._has_surplus:
                begin_with_surplus(self.data, self.model)
            check_settings(settings, self.data, first, self._has_surplus)
        self._control = GrowthControl(settings)
        self._measures.start()
        former = getattr(self, "_rate", None)
        self._rate = AdaptiveRate(self.model, self._momentum_correction)
        self._rate.begin_as(former)
        self._n_warmup_left = settings.warmup_epochs
        self._record.start(self._backup[1] if self._backup else None)
        if self._backup:
            state, self._backup = self._backup[0], None
            self._control.restore(state["control"])
            self._measures.restore(state["measures"], state.get("arrays", []))
            self._rate.restore(state["rate"])
            self._n_warmup_left = state["n_warmup_left"]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Apply what was decided."""
        super().on_epoch_begin(epoch, logs)
        self.data.batch_size = self._control.batch_size
        if not self._n_warmup_left:
            stretch = self._control.batch_size / self._settings.sizes[0]
            self._rate.set(self._control.rate_scale, stretch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the first parameters."""
        super().on_train_batch_begin(batch, logs)
        self._measures.begin_batch(self.model, is_first=self._n_batches == 0)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Remember the loss of the first batch."""
        super().on_train_batch_end(batch, logs)
        if not self.is_void:
            self._measures.end_batch(logs)
            if steps_until(self.model, batch) >= ((self.params or {}).get("steps") or 0):
                self._measures.end_steps(self._batch())

    def _batch(self) -> EpochBatch:
        control = self._control
        return EpochBatch.of(control.batch_size, control.next_size, self._has_surplus)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Decide what holds from the next epoch on. Collective."""
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
        line = {"epoch": epoch, **shown, "active_ranks": batch.active}
        line["steps"] = self.data.steps_for(batch.size)
        self._record.write(line, measures, decision)
        if logs is not None:
            logs.update(shown)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Give the data its own batch size back."""
        super().on_train_end(logs)
        put_back_settings(self.data)

    def backup_state(self) -> dict[str, Any]:
        """Return all that decides what comes, for `BackupAndRestore`."""
        measures, origin = self._measures.state()
        return {
            "control": self._control.state(),
            "measures": measures,
            "rate": self._rate.state(),
            "n_warmup_left": self._n_warmup_left,
            "arrays": origin,
        }

    def restore_state(self, state: dict[str, Any], epoch: int) -> None:
        """Go on from a backup when training begins."""
        self._backup = (state, epoch)

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what another number of ranks goes on with, given the states of all ranks."""
        measures = self._measures.merge([state["measures"] for state in states])
        return {**states[0], "measures": measures}
