"""Clocks, trace files, tables and pictures, without ranks."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

from tfscale.launcher import cli
from tfscale.measure import analysis
from tfscale.measure.analysis import Key
from tfscale.measure.report import FILE_NAME, read_rows, table
from tfscale.testing import pretend_rank
from tfscale.trace import chrome, timeline
from tfscale.trace.events import measure_offset
from tfscale.trace.stamps import INPUT_SLOT, wait_slot

EVENT = np.dtype(
    [(f"{name}_ns", np.int64) for name in ("posted", "started", "ended")]
    + [("bytes", np.int64), ("execution", np.int64), ("plan", np.int32), ("slot", np.int32)]
)
MS = 1_000_000


@pytest.mark.parametrize("shift_ns", [-7_000_000_000, 123_456_789_000])
def test_offsets_are_within_the_stated_error(shift_ns):
    """Ranks played by threads; rank 1's clock is shifted."""
    barrier, board = threading.Barrier(2), [None, None]

    def play(rank):
        def gather(values):
            board[rank] = list(values)
            barrier.wait(10)
            every = np.array(board)
            barrier.wait(10)
            return every

        def clock():
            return time.monotonic_ns() + rank * shift_ns

        return measure_offset(gather, rank, clock)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(play, (0, 1))
    assert first[1:] == (0, 0)
    assert abs(second.offset_ns + shift_ns) <= second.error_ns < 1_000 * MS


def record(rank, n_steps=3):
    """Two gradients per step: posted at 4 and 6 ms, ended at 8 and 9 ms; rank 1 is 3 ms late.

    The ranks have made different numbers of plans before this one.
    """
    windows, events, late = [], [], 3 * rank * MS
    for step in range(n_steps):
        at = step * 20 * MS
        windows.append(analysis.Window(step, 1, at, at + 12 * MS))
        for slot, posted, ended in ((0, 4, 8), (1, 6, 9)):
            posted = at + posted * MS + late
            events.append((posted, posted, at + ended * MS + late, 4000, step, rank, slot))
    names = {Key(rank, 0): "model/dense/kernel", Key(rank, 1): "model/conv/kernel"}
    return analysis.RankRecord(windows, np.array(events, EVENT), names)


def lines_of(ranks):
    slowest = analysis.merge_starts([analysis.starts_of(r) for r in ranks])
    yield {"kind": "run", "size": 2, "backend": "engine", "clock_error_s": [0.0, 2e-6]}
    for rank, own in enumerate(ranks):
        yield from analysis.rows({"epoch": 0, "rank": rank}, own, slowest, 0)


def test_lines_of_a_run_are_read_and_drawn_again(tmp_path, capsys):
    lines = [json.dumps(row) + "\n" for row in lines_of([record(0), record(1)])]
    # The last line is what the end of a process has cut.
    (tmp_path / FILE_NAME).write_text("".join([*lines, '{"kind": "st']))
    rows = read_rows(tmp_path)
    steps = [row for row in rows if row["kind"] == "step"]
    assert [s["rank"] for s in steps] == [0] * 3 + [1] * 3
    for step in steps:
        assert step["exposed_s"] == pytest.approx(0.003)
        assert step["t_c_s"] == pytest.approx(0.005)
        assert step["compute_s"] == pytest.approx(0.009)
        assert step["overlap_percent"] == pytest.approx(40)
        assert step["waiting_s"] == pytest.approx(0.002 if step["rank"] == 0 else 0)
        assert step["bytes"] == 8000
    lead = {(s["rank"], s["lead_s"]) for s in rows if s["kind"] == "slot"}
    assert lead == {(0, 0.003), (1, 0.0)}
    assert cli.main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text == table(rows) == (tmp_path / "communication.md").read_text()
    assert "2 ranks, backend engine, 3 recorded steps" in text
    assert "model/dense/kernel" in text and "agree to 2 microseconds" in text
    assert (tmp_path / "communication.png").read_bytes()[1:4] == b"PNG"


def test_waits_for_input_and_for_parameters_are_split_from_computing():
    """The batch exists after 1 ms; layers are ready at 2 and 5 ms, their parameters at 4 and 3."""
    own, begin = record(0), 20 * MS
    stamps = ((1, INPUT_SLOT), (2, wait_slot(8)), (5, wait_slot(9)))
    more = [(*[begin + ms * MS] * 3, 0, 0, 0, slot) for ms, slot in stamps]
    posted = begin - 6 * MS
    more += [(posted, posted, begin + ms * MS, 800, 0, 0, slot) for slot, ms in ((8, 4), (9, 3))]
    events = np.concatenate([own.events, np.array(more, EVENT)])
    assert len(analysis.events_within(events, own.windows)) == len(events)
    own.events = events
    rows = [row for row in analysis.rows({"epoch": 0, "rank": 0}, own, {}, 0)]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [step["input_s"] for step in steps] == [0, 0.001, 0]
    assert [step["forward_wait_s"] for step in steps] == [0, 0.002, 0]
    assert [step["exposed_s"] for step in steps] == [0.003] * 3
    assert [step["compute_s"] for step in steps] == pytest.approx([0.009, 0.006, 0.009])
    assert steps[1]["overlap_percent"] == pytest.approx(0)  # 3 + 2 of 5 ms


def test_what_ends_later_belongs_to_the_step_that_posted_it():
    own = record(0)
    own.events["ended_ns"][1] += 15 * MS
    slots = analysis.slots_by_step(own)
    assert [len(slots[step]) for step in range(3)] == [2, 2, 2]
    between = own.events.copy()
    between["posted_ns"] += 9 * MS
    kept = analysis.events_within(between, own.windows)  # what is pending when a step begins
    assert kept["ended_ns"].tolist() == [24 * MS]


def write_parts(folder, *ranks):
    for rank in ranks:
        chrome.write_trace(chrome.part_path(folder, rank), chrome.rank_events(rank), [5])


def parts_left(folder):
    return [int(path.stem.rpartition("-")[2]) for path in sorted(folder.glob("timeline.rank-*"))]


def test_a_timeline_is_of_the_ranks_of_its_job(tmp_path):
    write_parts(tmp_path, 0, 3, 4)
    assert not chrome.merge_parts(tmp_path, 2)  # 0 and two of an earlier job
    write_parts(tmp_path, 1)
    assert chrome.merge_parts(tmp_path, 2)
    entries = json.loads((tmp_path / chrome.FILE_NAME).read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {0, 1}
    assert parts_left(tmp_path) == [3, 4]
    chrome.part_path(tmp_path, 0).write_bytes(b'{"traceEv')
    assert not chrome.merge_parts(tmp_path, 1) and parts_left(tmp_path) == [0, 3, 4]
    assert chrome.merge_parts(tmp_path)  # of those that can be read
    entries = json.loads((tmp_path / chrome.FILE_NAME).read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries} == {3, 4}


def test_a_job_that_begins_removes_what_an_earlier_one_has_left(tmp_path):
    write_parts(tmp_path, 0, 1, 10)
    with (
        pretend_rank(0, 2),
        mock.patch("tfscale.trace.timeline._start"),
    ):
        timeline.start_automatic(str(tmp_path))
    assert parts_left(tmp_path) == [1]  # which removes its own
