"""Local SGD during a `fit`: start of groups, averages for validation, distance between models."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.callbacks.base import BeforeValidation, Callback
from tfscale.comm import collectives, runtime
from tfscale.files import append_json_lines, has_matplotlib, read_json_lines, write_json_lines
from tfscale.fit.preparation import prepare
from tfscale.internals.keras import steps_until
from tfscale.internals.optimizers import inner_optimizers, optimizer_of, update_rule
from tfscale.internals.traits import Phase
from tfscale.local_sgd.intervals import AdaptiveInterval
from tfscale.local_sgd.overlapped import LABEL, OverlappedAverage
from tfscale.measure.groups import draw_distances
from tfscale.optimizer.distributed import distributed_of
from tfscale.trace import events

logger = logging.getLogger("tfscale")

# For LocalSGD(overlap="auto"): averages that are measured, and by how much an average may last
# longer than measured without steps waiting for it.
_AVERAGES_MEASURED = 3
_RESERVE = 1.25


class _OverlapChoice:
    """Times of averages on their way and of steps, from which an overlap follows."""

    def __init__(self) -> None:
        self._listener = events.Listener() if events.has_events() else None
        self._ends: list[int] = []

    def add_step(self) -> None:
        """Record that a step, or several executed together, has ended."""
        self._ends.append(events.clock_ns())

    @property
    def has_steps(self) -> bool:
        """True once a step has been timed."""
        return len(self._ends) > 1

    def steps_per_average(self, steps_at_once: int) -> float:
        """Return how many steps the slowest fragment's average takes on this rank."""
        if self._listener is None:
            return 1.0
        runs: dict[tuple[int, int], list[Any]] = {}  # of a fragment's average, by plan and number
        for event in self._listener.take():
            plan, slot = int(event["plan"]), int(event["slot"])
            if slot >= 0 and runtime.backend().slot_name(plan, slot) == LABEL:
                runs.setdefault((plan, int(event["execution"])), []).append(event)
        self._listener.close()
        spans: dict[int, list[int]] = {}
        for (plan, _), run in runs.items():
            ended = max(int(event["ended_ns"]) for event in run)
            spans.setdefault(plan, []).append(ended - min(int(e["posted_ns"]) for e in run))
        step = float(np.median(np.diff(self._ends))) / steps_at_once
        return max((float(np.median(span)) for span in spans.values()), default=step) / step


class LocalModels(BeforeValidation):
    """Put the average of the groups' models into the model for validation, callbacks and files.

    Before `fit` validates, the groups' parameters are averaged, and the model holds the average
    until the next epoch begins, when each group resumes with its own parameters. After training all
    ranks hold the average. It also starts local SGD where that begins later (`LocalSGD(start=...)`)
    and sets `AdaptiveInterval` and `overlap="auto"`. Without local SGD it does nothing.
    """

    phase = Phase.COMBINE
    shows_averages = True

    _own: list[np.ndarray] | None = None
    _highest_rate: float | None = None
    _first_loss: float | None = None
    _choice: _OverlapChoice | None = None

    @property
    def _strategy(self) -> Any:
        distributed = distributed_of(optimizer_of(self.model))
        strategy = None if distributed is None else distributed.strategy
        is_apart = strategy is not None and strategy.trains_apart
        return strategy if is_apart and not runtime.is_single() else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget an earlier `fit`; resume from a backup."""
        super().on_train_begin(logs)
        backup, self._own = self.take_backup(), None
        self._highest_rate, self._first_loss = backup.get("rate"), backup.get("loss")
        if self._strategy is not None:
            self.session.stop_together()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Resume with the group's own model; form groups if that is due."""
        super().on_epoch_begin(epoch, logs)
        if self._strategy is None or self.session.is_over:
            return  # the model keeps the average if another rank has stopped
        if self._own is not None:
            self.session.group_average.resume(self._own)
            self._own = None
        start = self._strategy.start
        if self._waits and isinstance(start, int) and epoch >= start:
            self._start_groups()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Form groups after the first step at a lower learning rate; choose an overlap."""
        super().on_train_batch_end(batch, logs)
        self._measure_overlap()
        is_first = steps_until(self.model, batch) <= self.model.steps_per_execution
        if not is_first or self.is_void or not self._waits:
            return
        if self._strategy.start == "after_first_decay":
            highest = self._highest_rate
            has_decayed = np.int64(highest is not None and self._rate() < 0.999 * highest)
            if int(collectives.allreduce(has_decayed, op=runtime.Sum, name="decays of the rate")):
                self._start_groups()

    def _measure_overlap(self) -> None:
        """Choose the overlap of averages after some of them, if it is "auto". Collective then."""
        average = self.session.group_average
        if not isinstance(average, OverlappedAverage) or average.is_final or self.is_void:
            return
        self._choice = self._choice or _OverlapChoice()
        self._choice.add_step()
        n_averages = int(average.report.n_averages.numpy())
        if n_averages < _AVERAGES_MEASURED or not self._choice.has_steps:
            return
        steps_of_rank = np.float64(self._choice.steps_per_average(self.model.steps_per_execution))
        self._choice = None
        steps = float(
            collectives.allreduce(steps_of_rank, op=runtime.Max, name="steps of an average")
        )
        overlap = min(self._strategy.first_overlap, math.ceil(_RESERVE * steps))
        average.choose_overlap(overlap, steps)
        level = logging.INFO if runtime.rank() == 0 else logging.DEBUG
        text = "Averages take %.2f steps: overlap=%d for those sent from now on."
        logger.log(level, text, steps, overlap)

    @property
    def _waits(self) -> bool:
        return self._strategy is not None and self.model.optimizer.bound.is_waiting_for_groups

    def _start_groups(self) -> None:
        self.model.optimizer.start_groups()
        prepare(self.model)
        self.model.make_train_function(force=True)

    def act(self) -> None:
        """Put the average into the model."""
        if self._strategy is not None and self.session.group_average is not None:
            self._own = self.session.group_average.average_now()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adapt the steps between two averages to the loss (`AdaptiveInterval`)."""
        super().on_epoch_end(epoch, logs)
        strategy, average = self._strategy, self.session.group_average
        if strategy is not None:  # the highest rate in use so far: during a warm-up it rises
            self._highest_rate = max(self._rate(), self._highest_rate or 0.0)
        if strategy is None or average is None or self.is_void:
            return
        if isinstance(strategy.interval, AdaptiveInterval) and logs and "loss" in logs:
            loss = float(collectives.allreduce(np.float64(logs["loss"]), name="loss"))
            if self._first_loss is None and math.isfinite(loss) and loss > 0:
                self._first_loss = loss
            interval = int(average.interval.numpy())
            new = strategy.interval.after(interval, loss, self._first_loss or loss)
            logger.info("Loss %.4g: groups average every %d steps.", loss, new)
            average.interval.assign(new)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the average in all ranks' models."""
        super().on_train_end(logs)
        average = self.session.group_average
        if self._own is not None and average is not None:
            average.start_from_here()
        self._own = None

    def backup_state(self) -> dict[str, Any]:
        """Return the highest rate and first loss, with which later ones are compared."""
        return {"rate": self._highest_rate, "loss": self._first_loss}

    def _rate(self) -> float:
        rule = update_rule(self.model.optimizer)
        rules = inner_optimizers(rule) or [rule]
        return max(float(np.asarray(each.learning_rate)) for each in rules)


class ModelDistance(Callback):
    """Record the distance between the groups' models and their average, at each average.

    D is the mean over groups of `||W_i - mean(W)||`, taken just before averaging. It is
    measured in the averaging step itself, which sends one more number per group and layer. The
    last distance of an epoch is added to its logs as `model_distance`; an epoch without an
    average adds none. Of several averages within one execution (`steps_per_execution`) the last
    one is recorded. Under `average="gradients"`, which forms no mean of models, the distance is
    that to the model with which all groups continue; with plain SGD inside the groups that is
    their mean.

    Args:
        directory: Folder in which rank 0 writes `distance.jsonl`, a line with "step", "distance"
            and "layers" (of each layer's parameters alone) for each average, and `distance.png`
            when training ends; None writes nothing. Where averages overlap with training, a line
            also has the "overlap" of the averages that are sent after its step, and
            "steps_per_average", which is null unless `overlap="auto"` has measured it: the first
            line with a number is that of the step after which it was chosen. A `fit` that resumes
            a run keeps the lines of earlier steps.

    Attributes:
        distances: Pairs of step and distance of this `fit`. Steps are counted from 1 over the whole
            run if `fit` knows the number of steps per epoch, else over this `fit`.

    Source: [L] eq. 9.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> exchange = tfscale.LocalSGD(groups=tfscale.size(), interval=2)
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
        >>> model.compile(optimizer, "mse")
        >>> distance = tfscale.callbacks.ModelDistance()
        >>> options = dict(batch_size=1, callbacks=[distance], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> distance.distances  # pairs of step and distance; one rank has no other group
        []
    """

    phase = Phase.MEASURE

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__()
        self.directory = Path(directory) if directory is not None else None
        self.distances: list[tuple[int, float]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a new record."""
        super().on_train_begin(logs)
        self.distances, self._n_steps, self._n_averages = [], 0, self._count()
        self._is_new = True  # no step was made in this `fit`

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect averages of this epoch."""
        super().on_epoch_begin(epoch, logs)
        if self._is_new:
            steps = int((self.params or {}).get("steps") or 0)
            # A resumed run may have had longer epochs, with smaller batches.
            self._n_steps = max(epoch * steps, self.session.n_steps_before)
        self._n_distances_at_epoch_begin = len(self.distances)
        self._n_steps_at_epoch_begin = self._n_steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the distance if this step has averaged."""
        super().on_train_batch_end(batch, logs)
        self._n_steps = self._n_steps_at_epoch_begin + steps_until(self.model, batch)
        if self._is_new and self._path is not None:  # keep the lines of earlier steps
            begin = self._n_steps - self.model.steps_per_execution
            lines = read_json_lines(self._path)
            write_json_lines(self._path, [line for line in lines if line["step"] <= begin])
        self._is_new = False
        n_averages, before = self._count(), self._n_averages
        self._n_averages = n_averages
        if n_averages == before:
            return
        average = self.session.group_average
        distance = float(average.report.distance.numpy())
        self.distances.append((self._n_steps, distance))
        if self._path is not None:
            row = {"step": self._n_steps, **average.record()}
            append_json_lines(self._path, [row])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Draw the record."""
        super().on_train_end(logs)
        if self._path is not None and self._path.exists() and has_matplotlib():
            draw_distances(read_json_lines(self._path), self._path.with_suffix(".png"))

    @property
    def _path(self) -> Path | None:
        if self.directory is None or runtime.rank() > 0:
            return None
        return self.directory / "distance.jsonl"

    def _count(self) -> int:
        average = self.session.group_average
        return 0 if average is None else int(average.report.n_averages.numpy())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the last distance to the logs."""
        super().on_epoch_end(epoch, logs)
        if len(self.distances) > self._n_distances_at_epoch_begin and logs is not None:
            logs["model_distance"] = self.distances[-1][1]
