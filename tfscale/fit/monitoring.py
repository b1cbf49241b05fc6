"""Numbers of the running `fit` on rank 0, for the thread of `tfscale.monitor`."""

from __future__ import annotations

import atexit
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Traffic
from tfscale.config import ExchangeError, environment, settings, variable_name
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import count_active
from tfscale.exchange import batch_shares as shares
from tfscale.fit.steps import computes_rows
from tfscale.internals.keras import replace_step
from tfscale.measure import analysis
from tfscale.monitor.exporter import Exporter, listen
from tfscale.monitor.kubeflow import Poster, StatusServer
from tfscale.monitor.page import Numbers
from tfscale.trace import events

logger = logging.getLogger("tfscale")

_TURN_S = 1.0  # between two reads
_RATE_S = 10.0  # of the speeds
_LATE_S = 5.0  # of the late ranks
_STEPS_MEASURED = 8
_EVENTS_KEPT = 1 << 13  # of these steps
_MEASURE_S = 5.0
_COST = 1000  # the analysis of steps takes at most this part of the time


def step_rows(
    windows: Sequence[analysis.Window],
    listener: events.Listener,
    before_of: Callable[[int], Mapping[analysis.Key, frozenset[analysis.Key]]],
) -> list[dict[str, Any]]:
    """The rows of kind "step" of `analysis.rows`, for the events within some windows.

    `before_of` returns `collectives_before` of a plan.
    """
    step_events = analysis.events_within(listener.take(), windows)
    before: dict[analysis.Key, frozenset[analysis.Key]] = {}
    for plan in {int(event["plan"]) for event in step_events} - {analysis.EAGER}:
        before |= before_of(plan)
    record = analysis.RankRecord(list(windows), step_events, before=before)
    return [row for row in analysis.rows({}, record, {}, 0) if row["kind"] == "step"]


def before_of(plan: int) -> Mapping[analysis.Key, frozenset[analysis.Key]]:
    """The collectives that each slot of a plan depends on; empty for a plan out of use."""
    graph = runtime.backend().graph_of(plan)
    return {} if graph is None else analysis.collectives_before(graph)


class _StepTimes:
    """Mean seconds of the last steps, and of these the exposed ones, measured now and then."""

    def __init__(self) -> None:
        self.windows: deque[analysis.Window] = deque(maxlen=_STEPS_MEASURED)
        self.step_s: float | None = None
        self.exposed_s: float | None = None
        self._listener = events.Listener(_EVENTS_KEPT) if events.has_events() else None
        # Plans are never reused, and their graphs are large.
        self._before_of = functools.cache(before_of)
        self._due_at = 0.0

    def measure(self) -> None:
        """Measure the last steps, unless that was done a moment ago."""
        windows = list(self.windows)
        if time.monotonic() < self._due_at or len(windows) < 2:
            return
        n_steps = sum(window.n_steps for window in windows)
        self.step_s = sum(window.end - window.begin for window in windows) / 1e9 / n_steps
        if self._listener is not None:
            for plan in {int(event["plan"]) for event in self._peek()} - {analysis.EAGER}:
                self._before_of(plan)  # once; not of what measuring costs
            began = time.thread_time()
            rows = step_rows(windows, self._listener, self._before_of)
            exposed_s = sum(row["exposed_s"] + row["forward_wait_s"] for row in rows)
            self.exposed_s = exposed_s / n_steps
            cost_s = time.thread_time() - began
        else:
            self.exposed_s, cost_s = (0.0 if runtime.is_single() else None), 0.0
        self._due_at = time.monotonic() + max(_MEASURE_S, _COST * cost_s)

    def _peek(self) -> np.ndarray:
        assert self._listener is not None
        taken = self._listener.take()
        self._listener.add(taken)
        return taken


class _Counts(NamedTuple):
    """Counters at one time."""

    at: float  # seconds of the monotonic clock
    steps: int
    samples: int
    waited_s: tuple[float, ...]  # by rank


class TrainingWatch:
    """The progress of the `fit` that began last; training writes it, and one thread reads it.

    Training calls the methods up to `end`, which take a microsecond in each step. They set single
    values, which a thread may read at any time.
    """

    def __init__(self) -> None:
        self._restarts = int(environment().get("TFSCALE_RESTART", "0") or 0)
        self._n_ranks = runtime.size()
        self._params: Mapping[str, Any] = {}
        self._epoch = self._step = self._n_steps = 0
        self._logs: Mapping[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._is_ended = False
        self._first: tuple[float, float] | None = None  # time and progress at the first epoch
        self._times: _StepTimes | None = None
        self._traffic = Traffic()
        self._history: deque[_Counts] = deque()  # of the last seconds
        # Of all ranks; and ranks that share a batch, where each is given its own part. Not made
        # before the first `fit`: until then a program may set TensorFlow's devices and threads.
        self._samples: tf.Variable | None = None
        self._sharers: tf.Variable | None = None

    # Called by training.

    def count_samples(self, model: keras.Model) -> None:
        """Let the training step of a model count the samples of all ranks, once."""
        if getattr(model.train_step, "counts_samples", False):
            return
        if self._samples is None or self._sharers is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._sharers = tf.Variable(self._n_ranks, trainable=False, dtype=tf.int64)
                self._samples = tf.Variable(0, trainable=False, dtype=tf.int64)
        replace_step(model, "train_step", _counted(model, self._samples, self._sharers))

    def begin(self, params: Mapping[str, Any]) -> None:
        """Begin a `fit` with Keras's "epochs" and "steps" of its callbacks."""
        self._params, self._is_ended, self._first = params, False, None

    def begin_epoch(self, epoch: int, data: Any, first_step: int = 0) -> None:
        """Begin an epoch, counted from 0, on the data of `fit`; a resumed one at a later step."""
        self._publish()
        self._epoch, self._step = epoch + 1, first_step
        if self._first is None or first_step > 0:
            self._first = time.monotonic(), self._progress() or 0.0
        if self._sharers is not None:
            is_shared = isinstance(data, GlobalBatches) and data.has_surplus_ranks
            n_ranks = self._n_ranks
            self._sharers.assign(count_active(data.batch_size, n_ranks) if is_shared else n_ranks)

    def note_steps(self, n_steps: int, window: analysis.Window | None) -> None:
        """Count the steps of a call of the train function, and keep its times if they are given.

        Keras counts the last call of several steps in an epoch as a full one.
        """
        reached = min(self._step + n_steps, self._steps_per_epoch() or math.inf)
        self._n_steps += int(reached) - self._step
        self._step = int(reached)
        if self._times is None:
            self._times = _StepTimes()
        elif window is not None:
            self._times.windows.append(window)

    def note_logs(self, logs: Mapping[str, Any] | None) -> None:
        """Keep the logs of an epoch, in which callbacks may yet put the numbers of all ranks."""
        self._logs = logs or {}

    def end(self) -> None:
        """End the `fit`."""
        self._publish()
        self._is_ended = True

    def _publish(self) -> None:
        """Show the numbers of the epoch that has ended: all callbacks have seen its end."""
        logs, self._logs = self._logs, {}
        if logs:
            values = {key: np.asarray(value) for key, value in logs.items()}
            numbers = {
                k: float(v) for k, v in values.items() if v.ndim == 0 and v.dtype.kind in "fiu"
            }
            self._metrics = numbers

    # Called by the thread.

    def read(self) -> Numbers:
        """The numbers of this moment."""
        times, progress = self._times, self._progress()
        self._look_at_engine(times)
        samples = 0 if self._samples is None else int(self._samples.numpy())
        waited_s = self._traffic.waited_s
        counts = _Counts(time.monotonic(), self._n_steps, samples, waited_s)
        history = self._history
        if not history or counts.at - history[-1].at >= _TURN_S / 2:
            history.append(counts)
        while counts.at - history[0].at > _RATE_S and len(history) > 1:
            history.popleft()
        seconds = max(counts.at - history[0].at, 1e-9)
        return Numbers(
            ranks=self._n_ranks,
            restarts=self._restarts,
            epoch=self._epoch,
            epochs=self._params.get("epochs"),
            step=self._step,
            steps_per_epoch=self._steps_per_epoch(),
            steps=counts.steps,
            samples=counts.samples,
            steps_per_s=(counts.steps - history[0].steps) / seconds,
            samples_per_s=(counts.samples - history[0].samples) / seconds,
            step_s=None if times is None else times.step_s,
            exposed_s=None if times is None else times.exposed_s,
            n_bytes=self._traffic.n_bytes,
            waited_s=waited_s,
            late_s=self._late_s(counts),
            metrics=self._metrics,
            progress=progress,
            remaining_s=self._remaining_s(counts.at, progress),
        )

    def _late_s(self, counts: _Counts) -> tuple[float, ...]:
        """For each rank, by how much less it has waited of late than the one that waited most."""
        recent = (c for c in self._history if counts.at - c.at <= _LATE_S and c.waited_s)
        before = next(recent, counts).waited_s
        grown = [now - then for now, then in zip(counts.waited_s, before, strict=True)]
        return tuple(max(grown) - own for own in grown)

    def _look_at_engine(self, times: _StepTimes | None) -> None:
        try:
            self._traffic = runtime.backend().traffic()
            if times is not None:
                times.measure()
        except ExchangeError:  # this rank has left the job: the last numbers stay
            return

    def _steps_per_epoch(self) -> int | None:
        steps = self._params.get("steps")
        return None if steps is None else int(steps)

    def _progress(self) -> float | None:
        if self._is_ended:
            return 1.0
        n_epochs, n_steps = self._params.get("epochs"), self._steps_per_epoch()
        if not n_epochs or not self._epoch:
            return None
        of_epoch = min(self._step / n_steps, 1.0) if n_steps else 0.0
        return min((self._epoch - 1 + of_epoch) / n_epochs, 1.0)

    def _remaining_s(self, now: float, progress: float | None) -> float | None:
        if self._is_ended:
            return 0.0
        if self._first is None or progress is None or progress <= self._first[1]:
            return None
        began, before = self._first
        return (now - began) * (1.0 - progress) / (progress - before)


def _counted(
    model: keras.Model, samples: tf.Variable, sharers: tf.Variable
) -> Callable[[Any], Any]:
    """The `train_step` of a model, which also adds the samples of each batch to a variable."""
    step = model.train_step

    def counted_step(batch: Any) -> Any:
        parts = batch.places if isinstance(batch, shares.RowsOfBatch) else batch
        rows = [leaf for leaf in keras.tree.flatten(parts) if len(getattr(leaf, "shape", ())) > 0]
        share = shares.current()
        if share is not None:  # of a step around this one, which has cut the batch
            samples.assign_add(tf.cast(share.total, tf.int64))
        elif rows:
            n_rows = tf.cast(tf.shape(rows[0])[0], tf.int64)
            is_whole = computes_rows(model, "train_step")
            samples.assign_add(n_rows if is_whole else n_rows * sharers)
        return step(batch)

    counted = functools.wraps(step)(counted_step)
    counted.counts_samples = True  # type: ignore[attr-defined]
    return counted


@functools.cache
def _status_server() -> StatusServer | None:
    return StatusServer.of(environment())


_watch: TrainingWatch | None = None


def watch() -> TrainingWatch | None:
    """The watch of this process, made and served at the first call; None if it is not asked for.

    Only rank 0 has one, if TFSCALE_METRICS is set, or the variables of Kubeflow's TrainJobs are.

    Raises:
        ConfigError: Rank 0 cannot listen at the address of TFSCALE_METRICS.
    """
    global _watch
    if _watch is not None or not runtime.is_initialized() or runtime.rank() != 0:
        return _watch
    address, server = settings().metrics, _status_server()
    if not address and server is None:
        return None
    listening = listen(address, variable_name("metrics")) if address else None
    _watch = TrainingWatch()
    poster = None if server is None else Poster(server)
    exporter = Exporter(_watch.read, listening, settings().metrics_token, poster)
    atexit.register(exporter.close)
    return _watch
