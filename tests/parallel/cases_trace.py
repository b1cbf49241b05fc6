"""Times of collectives on real ranks: the report, the timeline, clocks."""

import itertools
import json
import shutil
import time

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import require_engine, sizes
from tests.helpers.ranks import new_folder
from tfscale.callbacks import BroadcastGlobalVariablesCallback, CommunicationReport
from tfscale.measure.analysis import Key, collectives_before
from tfscale.measure.report import of_kind, read_rows
from tfscale.testing import inspect
from tfscale.trace import events, timeline

require_engine("its events are looked at")

N_STEPS = 8


def build(exchange=None, rate=1e-3, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    exchange = exchange or tfscale.Allreduce(bucket_mb=0)
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(rate), exchange=exchange)
    model.compile(optimizer, loss="mse", **options)
    return model


def report(model, epochs=2, every_n_steps=1, **options):
    """Train; return the rows of the report, and its folder. Collective."""
    folder = new_folder()
    x = np.random.default_rng(0).normal(size=(16 * N_STEPS, 64)).astype("float32")
    fed = options or {"x": x, "y": x, "batch_size": 16}
    record = CommunicationReport(folder, every_n_steps=every_n_steps)
    callbacks = [BroadcastGlobalVariablesCallback(0), record]
    model.fit(**fed, epochs=epochs, verbose=0, callbacks=callbacks)
    tfscale.barrier()
    return read_rows(folder), folder


def check_step(step, own):
    """Sums and R of a step against the times of its slots."""
    last_posted, exposed = max(s["posted_s"] for s in own), sum(s["t_b_s"] for s in own)
    (begin, end), *_ = step["busy_s"]
    assert begin == step["begin_s"] and end >= last_posted  # nothing is needed before
    assert exposed <= max(s["ended_s"] for s in own) - last_posted + 1e-7
    assert step["forward_wait_s"] == 0 < step["input_s"]
    whole, total = step["input_s"] + step["compute_s"] + exposed, sum(s["t_c_s"] for s in own)
    found = [step[name] for name in ("exposed_s", "step_s", "t_c_s")]
    np.testing.assert_allclose(found, [exposed, whole, total], atol=1e-7)
    share = 100 * (total - exposed) / total
    np.testing.assert_allclose(step["overlap_percent"], share, atol=1e-2)


@sizes(2, 3, timeout_s=120)
def case_report_agrees_with_the_raw_trace():
    rows, folder = report(build(), every_n_steps=2)
    steps, slots = of_kind(rows, "step"), of_kind(rows, "slot")
    recorded = list(itertools.product((0, 1), (1, 3, 5, 7), range(tfscale.size())))
    assert sorted((s["epoch"], s["step"], s["rank"]) for s in steps) == recorded
    for step in steps:
        same_step = [s for s in slots if (s["epoch"], s["step"]) == (step["epoch"], step["step"])]
        own = [s for s in same_step if s["rank"] == step["rank"]]
        assert len(own) == 3 and sum(s["bytes"] for s in own) == 3 * 64 * 64 * 4
        check_step(step, own)
        for slot in own:
            started = [s["started_s"] for s in same_step if s["slot"] == slot["slot"]]
            assert len(started) == tfscale.size()
            lead_s = max(started) - slot["started_s"]
            np.testing.assert_allclose(slot["lead_s"], lead_s, atol=1e-7)
            assert 0 <= slot["waiting_s"] <= slot["t_b_s"] + 1e-9
            assert "kernel" in slot["name"]
    if tfscale.rank() == 0:
        assert "Collectives of rank 0" in (folder / "communication.md").read_text()
        assert (folder / "communication.png").stat().st_size > 1000


@sizes(2, timeout_s=60)
def case_a_report_has_averages_that_overlap_with_training():
    rows, _ = report(build(tfscale.LocalSGD(2, interval=4, overlap=2)))
    slots = [s for s in of_kind(rows, "slot") if s["rank"] == 0]
    # Sent after steps 4 and 8 of two epochs.
    sent = [s for s in slots if s["name"] == "posted average of parameters"]
    assert len(sent) == 4 and all(s["bytes"] >= 3 * 64 * 64 * 4 for s in sent)


class LateRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is known late on rank 1, which sends its parameters late."""

    def __call__(self, step):
        def wait(_):
            time.sleep(0.1 * tfscale.rank())
            return np.float32(1e-3)

        return tf.ensure_shape(tf.numpy_function(wait, [step], tf.float32), ())

    def get_config(self):
        return {}


def slow_batches():
    for _ in range(N_STEPS):
        time.sleep(0.1)
        yield np.ones((4, 64), "float32"), np.ones((4, 64), "float32")


@sizes(2, timeout_s=120)
def case_input_and_forward_waits_are_split_from_computing():
    """Batches that take 100 ms each; then parameters that rank 1 sends 100 ms late."""
    spec = (tf.TensorSpec((4, 64)), tf.TensorSpec((4, 64)))
    slow = tf.data.Dataset.from_generator(slow_batches, output_signature=spec)
    fast = tf.data.Dataset.from_tensors(next(slow_batches())).repeat(N_STEPS)
    sharded = tfscale.Sharded(bucket_mb=0, dense="weights")
    medians = []
    for data, rate in ((slow, 1e-3), (fast, LateRate())):
        rows, _ = report(build(sharded, rate), epochs=1, x=data, steps_per_epoch=N_STEPS)
        steps = [step for step in of_kind(rows, "step") if step["rank"] == 0]
        names = ("input_s", "forward_wait_s", "compute_s", "exposed_s")
        for step in steps:
            assert all(step[name] >= 0 for name in names), step
            total = sum(step[name] for name in names)
            np.testing.assert_allclose(total, step["step_s"], atol=1e-7)
        medians.append([np.median([step[name] for step in steps]) for name in names[:2]])
    slow, late = medians
    assert slow[0] > 5 * late[0] and late[1] > 5 * slow[1], medians


@sizes(2, timeout_s=120)
def case_steps_executed_together():
    rows, _ = report(build(steps_per_execution=4))
    steps, slots = of_kind(rows, "step"), of_kind(rows, "slot")
    assert {s["n_steps"] for s in steps} == {4}
    assert {s["repeat"] for s in slots} == {0, 1, 2, 3}
    assert all(s["exposed_s"] < s["step_s"] for s in steps)


@sizes(2)
def case_updates_need_their_own_gradients_only():
    """Unless the optimizer clips by the norm of all gradients."""
    for clipping in ({}, {"global_clipnorm": 1.0}):
        model = build()
        model.optimizer.global_clipnorm = clipping.get("global_clipnorm")
        x = np.ones((4, 64), "float32")
        model.train_on_batch(x, x)
        listener = events.Listener()
        model.train_on_batch(x, x)
        found = listener.take()
        stamps = found[(found["slot"] < 0) & (found["slot"] > events.INPUT_SLOT)]
        assert len(stamps) == sum(found["slot"] >= 0) == 3
        assert sum(found["slot"] == events.INPUT_SLOT) == 1  # of the batch
        before = collectives_before(inspect.graph_of(int(stamps[0]["plan"])))
        n_needed = [len(before[Key(int(e["plan"]), int(e["slot"]))]) for e in stamps]
        # `iterations` and so all updates wait for the first gradient.
        assert sorted(n_needed) == ([3, 3, 3] if clipping else [1, 2, 2])


@sizes(2, 3)
def case_clocks_agree_within_the_stated_error():
    """Ranks of one host have one clock, so the measured offset is the error made."""
    apart = events.ClockMap(is_shared=False)
    apart.measure()
    now = events.clock_ns()
    assert abs(int(apart.to_rank_zero(now)) - now) <= apart.error_ns
    assert tfscale.rank() == 0 or apart.error_ns > 0
    together = events.ClockMap()
    assert together.error_ns == 0 and int(together.to_rank_zero(now)) == now


@sizes(1, 2)
def case_timeline_of_all_ranks():
    file, n = new_folder() / "trace.json", tfscale.size()
    tfscale.start_timeline(str(file))
    rows, _ = report(build(), epochs=1)
    tfscale.stop_timeline()
    tfscale.barrier()
    if n == 1:
        steps = of_kind(rows, "step")
        assert len(steps) == N_STEPS - 1 and "exposed_s" not in steps[0]
        return
    content = json.loads(file.read_text())
    bars = [e for e in content["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in bars} == set(range(n))
    assert len(content["otherData"]["clock_error_us"]) == n
    assert min(e["ts"] for e in bars) == 0 and all(e["dur"] >= 0 for e in bars)
    wires = [e for e in bars if e["name"] == "on the wire"]
    assert len([e for e in bars if "args" in e]) == len(wires) > 0
    assert len([e for e in bars if "kernel" in e["name"]]) >= 3 * N_STEPS * n
    assert len([e for e in bars if e["name"].startswith("step")]) == (N_STEPS - 1) * 2
    tfscale.barrier()


@sizes(2)
def case_a_timeline_that_cannot_be_written_keeps_nobody():
    folder = new_folder() / "gone"
    timeline.start_automatic(str(folder))
    tfscale.barrier()
    if tfscale.rank() == 0:
        shutil.rmtree(folder)
    tfscale.barrier()
    assert timeline.write_part() is None
    timeline.merge_at_end(folder, 0)
    tfscale.barrier()
