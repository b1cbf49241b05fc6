"""Timelines of all ranks, and one clock for them."""

import json
import shutil

import tensorflow as tf

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.cases_trace import N_STEPS, build, fit, shared_folder
from tfscale.callbacks import CommunicationReport
from tfscale.comm import chrome, events, runtime, timeline
from tfscale.measure.report import of_kind, read_rows

ENGINE_ONLY = "its events are looked at"


@sizes(2, 3)
def case_clocks_agree_within_the_stated_error():
    """Ranks of one host have one clock, so the measured offset is the error made."""
    apart = events.ClockMap(is_shared=False)
    apart.measure()
    now = events.clock_ns()
    assert abs(int(apart.to_rank_zero(now)) - now) <= apart.error_ns
    assert runtime.rank() == 0 or apart.error_ns > 0
    together = events.ClockMap()
    assert together.error_ns == 0 and int(together.to_rank_zero(now)) == now


def check_trace(path):
    content = json.loads(path.read_text())
    bars = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in bars} == set(range(runtime.size()))
    assert len(content["otherData"]["clock_error_us"]) == runtime.size()
    assert min(e["ts"] for e in bars) == 0 and all(e["dur"] >= 0 for e in bars)
    wires = [e for e in bars if e["name"] == "on the wire"]
    assert len([e for e in bars if "args" in e]) == len(wires) > 0
    return bars


@sizes(1, 2)
def case_timeline_of_all_ranks():
    folder = shared_folder()
    model = build()
    timeline.start_timeline(str(folder / "trace.json"))
    fit(model, [CommunicationReport(folder, every_n_steps=1)], epochs=1)
    timeline.stop_timeline()
    tfscale.barrier()
    if runtime.size() > 1:
        bars = check_trace(folder / "trace.json")
        assert len([e for e in bars if "kernel" in e["name"]]) >= 3 * N_STEPS * runtime.size()
        assert len([e for e in bars if e["name"].startswith("step")]) == (N_STEPS - 1) * 2
    else:
        steps = of_kind(read_rows(folder), "step")
        assert len(steps) == N_STEPS - 1 and "exposed_s" not in steps[0]
    tfscale.barrier()


@sizes(2)
def case_a_timeline_that_cannot_be_written_keeps_nobody():
    folder = shared_folder() / "gone"
    timeline.start_automatic(str(folder))
    tfscale.barrier()
    if runtime.rank() == 0:
        shutil.rmtree(folder)
    tfscale.barrier()
    assert timeline.write_part() is None
    timeline.merge_at_end(folder, 0)
    tfscale.barrier()


@sizes(2)
def case_parts_of_the_ranks_are_merged():
    folder = shared_folder()
    timeline.start_automatic(str(folder))
    tfscale.allreduce(tf.ones([3]), name="sum")
    assert timeline.write_part() == folder
    tfscale.barrier()
    if runtime.rank() == 0:
        assert chrome.merge_parts(folder)
        check_trace(folder / "timeline.json")
        assert not list(folder.glob("timeline.rank-*"))
    tfscale.barrier()
