"""Report of the time that steps spend on computing and communication."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.callbacks.base import Callback
from tfscale.comm import objects, runtime
from tfscale.config import ConfigError, check_integer
from tfscale.files import append_json_lines, write_json_lines
from tfscale.internals.keras import steps_until
from tfscale.internals.optimizers import optimizer_of
from tfscale.internals.traits import Phase
from tfscale.measure import analysis
from tfscale.measure.analysis import EAGER, Key, collectives_before
from tfscale.measure.report import FILE_NAME, write_report
from tfscale.optimizer.distributed import distributed_of
from tfscale.trace import events as recorder
from tfscale.trace import timeline
from tfscale.trace.events import ClockMap, clock_ns

logger = logging.getLogger("tfscale")


class CommunicationReport(Callback):
    """Write the cost of each collective, and the part of communication overlapped with computation.

    At the end of each epoch rank 0 adds to `communication.jsonl`, per recorded step and rank:
    step time, compute, exposed communication, waiting for the slowest rank and overlap ratio R;
    per collective: bytes, T_c, T_b and the times they come from; once, the bytes of optimizer state
    on each rank. When training ends it writes `communication.md`, a page of tables, and
    `communication.png`. `tfscale report DIRECTORY` draws both again. `tfscale.measure.analysis`
    defines the numbers, 'Where the time goes' in the documentation explains them.

    Backends other than the engine record no collectives; then only step times are written.

    Collective: all ranks must pass it to `fit`.

    Args:
        directory: Folder of the files, created and written by rank 0. Files of an earlier run are
            replaced.
        every_n_steps: Steps from one recorded step to the next. The first step of a `fit`, which
            traces the model, is never recorded.

    Raises:
        ConfigError: every_n_steps is less than 1.

    Source: [T] eq. 3.8.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> report = tfscale.callbacks.CommunicationReport("report", every_n_steps=1)
        >>> options = dict(batch_size=1, callbacks=[report], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> with open("report/communication.md") as page:
        ...     print(page.readline().strip())
        # Communication
    """

    phase = Phase.MEASURE

    def __init__(self, directory: str | Path, every_n_steps: int = 10) -> None:
        super().__init__()
        self.directory = Path(directory)
        self._path = self.directory / FILE_NAME
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, 1)
        self._before: dict[int, dict[Key, frozenset[Key]]] = {}  # by plan

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin to record collectives; align the clocks."""
        super().on_train_begin(logs)
        self._n_calls, self._is_due, self._has_memory = 0, False, False
        self._forget()
        self._listener = recorder.Listener() if recorder.has_events() else None
        self._clocks, self._first_step, self._begin_ns = ClockMap(), 0, 0
        errors = objects.allgather_object(self._clocks.error_ns / 1e9, name="clock errors")
        self._origin_ns = objects.broadcast_object(clock_ns(), name="origin of times")
        if runtime.rank() > 0:
            return
        name = runtime.backend().name
        if self._listener is None:
            logger.info("The backend %s records no collectives: only step times are written.", name)
        run = {"kind": "run", "size": runtime.size(), "backend": name}
        run |= {"every_n_steps": self.every_n_steps, "clock_error_s": errors}
        write_json_lines(self._path, [run])

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the time, if this step is to be recorded."""
        super().on_train_batch_begin(batch, logs)
        was_due = self._is_due
        self._is_due = self._n_calls > 0 and (self._n_calls - 1) % self.every_n_steps == 0
        self._n_calls += 1
        if was_due or self._is_due:
            self._take()
        if self._is_due:
            self._first_step, self._begin_ns = batch, clock_ns()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the times of the step."""
        end_ns = clock_ns()
        super().on_train_batch_end(batch, logs)
        if not self._is_due:
            return
        n_steps = steps_until(self.model, batch) - self._first_step
        window = analysis.Window(self._first_step, n_steps, self._begin_ns, end_ns)
        self._record.windows.append(window)
        timeline.note_span(f"step {self._first_step}", self._begin_ns, end_ns)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Collect the records of all ranks; rank 0 writes them."""
        super().on_epoch_end(epoch, logs)
        if self.is_void:
            self._forget()
            return
        self._write_memory()
        self._take()
        self._clocks.measure()
        record = self._finished_record()
        starts = analysis.starts_of(record)
        slowest = analysis.merge_starts(objects.allgather_object(starts, name="starts"))
        labels = {"epoch": epoch, "rank": runtime.rank()}
        rows = list(analysis.rows(labels, record, slowest, self._origin_ns))
        rows_by_rank = objects.allgather_object(rows, name="communication report")
        self._forget()
        if runtime.rank() == 0:
            append_json_lines(self._path, itertools.chain.from_iterable(rows_by_rank))

    def _write_memory(self) -> None:
        """Write the bytes of optimizer state on each rank, once."""
        distributed = distributed_of(optimizer_of(self.model))
        if self._has_memory or distributed is None:
            return
        self._has_memory = True
        report_of_rank = distributed.memory_report()
        reports = objects.allgather_object(report_of_rank, name="memory of optimizer state")
        row: dict[str, Any] = {"kind": "memory", "complete_state": reports[0]["complete_state"]}
        keys = ("state", "parameters", "accumulators", "residuals")
        row |= {key: [report[key] for report in reports] for key in keys}
        if runtime.rank() == 0:
            append_json_lines(self._path, [row])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write tables and picture on rank 0."""
        super().on_train_end(logs)
        if self._listener is not None:
            self._listener.close()
        if runtime.rank() > 0:
            return
        try:
            logger.info("%s", write_report(self.directory))
        except ConfigError as error:
            logger.warning("No communication report: %s", error)

    def _take(self) -> None:
        """Keep the events of the recorded steps; the last of them may have ended since."""
        if self._listener is not None:
            events = analysis.events_within(self._listener.take(), self._record.windows)
            if len(events):
                self._events.append(events)

    def _finished_record(self) -> analysis.RankRecord:
        """Return the record of this rank, in times of rank 0's clock."""
        record = self._record
        times = np.array([(w.begin, w.end) for w in record.windows], np.int64).reshape(-1, 2)
        pairs = zip(record.windows, self._clocks.to_rank_zero(times).tolist(), strict=True)
        windows = [w._replace(begin=begin, end=end) for w, (begin, end) in pairs]
        if self._listener is None:
            return analysis.RankRecord(windows)
        none = self._listener.take()[:0]
        events = np.concatenate([none, *self._events])
        for name in ("posted_ns", "started_ns", "ended_ns"):
            events[name] = self._clocks.to_rank_zero(events[name])
        engine: Any = runtime.backend()
        keys = {Key(int(e["plan"]), int(e["slot"])) for e in events} - {Key(EAGER, 0)}
        names = {key: engine.slot_name(key.plan, key.slot) for key in keys if key.slot >= 0}
        for plan in {key.plan for key in keys} - self._before.keys():
            graph = engine.graph_of(plan)
            self._before[plan] = {} if graph is None else collectives_before(graph)
        before = {key: self._before[key.plan].get(key, frozenset()) for key in keys}
        return analysis.RankRecord(windows, events, names, before)

    def _forget(self) -> None:
        self._record = analysis.RankRecord([])
        self._events: list[np.ndarray] = []
