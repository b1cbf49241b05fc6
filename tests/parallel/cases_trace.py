"""Times of collectives on real ranks: the report, the timeline, clocks."""

import json
import shutil
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.spawn import sizes
from tfscale.callbacks import BroadcastGlobalVariablesCallback, CommunicationReport
from tfscale.comm import events, runtime, timeline
from tfscale.comm import events as recorder
from tfscale.measure.analysis import Key, collectives_before
from tfscale.measure.report import of_kind, read_rows

ENGINE_ONLY = "its events are looked at"

N_STEPS = 8


def shared_folder():
    folder = tempfile.mkdtemp(prefix="tfscale-trace-") if runtime.rank() == 0 else None
    return Path(tfscale.broadcast_object(folder))


def build(exchange=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, use_bias=False) for _ in range(3)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    exchange = exchange or tfscale.Allreduce(bucket_mb=0)
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-3), exchange=exchange)
    model.compile(optimizer, loss="mse", **options)
    return model


def fit(model, callbacks, epochs=2, n_steps=N_STEPS):
    x = np.random.default_rng(0).normal(size=(16 * n_steps, 64)).astype("float32")
    callbacks = [BroadcastGlobalVariablesCallback(0), *callbacks]
    model.fit(x, x, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)


def check_step(step, own):
    """Sums and R of a step against the times of its slots."""
    last_posted = max(s["posted_s"] for s in own)
    assert step["busy_s"][0][0] == step["begin_s"]
    assert step["busy_s"][0][1] >= last_posted  # nothing is needed before
    exposed = sum(s["t_b_s"] for s in own)
    assert exposed <= max(s["ended_s"] for s in own) - last_posted + 1e-7
    np.testing.assert_allclose(step["exposed_s"], exposed, atol=1e-7)
    assert step["forward_wait_s"] == 0 < step["input_s"]
    total = step["input_s"] + step["compute_s"] + exposed
    np.testing.assert_allclose(total, step["step_s"], atol=1e-7)
    total = sum(s["t_c_s"] for s in own)
    np.testing.assert_allclose(step["t_c_s"], total, atol=1e-7)
    share = 100 * (total - exposed) / total
    np.testing.assert_allclose(step["overlap_percent"], share, atol=1e-2)


def check_slot(slot, same):
    """What a slot says of the other ranks; `same` is that slot on all of them."""
    started = [s["started_s"] for s in same]
    assert len(started) == runtime.size()
    np.testing.assert_allclose(slot["lead_s"], max(started) - slot["started_s"], atol=1e-7)
    assert 0 <= slot["waiting_s"] <= slot["t_b_s"] + 1e-9
    assert "kernel" in slot["name"]


def by(rows, *names):
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


@sizes(2, 3, timeout_s=120)
def case_report_agrees_with_the_raw_trace():
    folder = shared_folder()
    fit(build(), [CommunicationReport(folder, every_n_steps=2)])
    tfscale.barrier()
    rows = read_rows(folder)
    steps, slots = of_kind(rows, "step"), of_kind(rows, "slot")
    recorded = [(0, 1), (0, 3), (0, 5), (0, 7), (1, 1), (1, 3), (1, 5), (1, 7)]
    assert sorted({(s["epoch"], s["step"]) for s in steps}) == recorded
    assert len(steps) == len(recorded) * runtime.size()
    of_step = by(slots, "epoch", "step", "rank")
    on_all_ranks = by(slots, "epoch", "step", "slot")
    for step in steps:
        own = of_step[step["epoch"], step["step"], step["rank"]]
        assert len(own) == 3 and sum(s["bytes"] for s in own) == 3 * 64 * 64 * 4
        check_step(step, own)
        for slot in own:
            check_slot(slot, on_all_ranks[slot["epoch"], slot["step"], slot["slot"]])
    if runtime.rank() == 0:
        assert "Collectives of rank 0" in (folder / "communication.md").read_text()
        assert (folder / "communication.png").stat().st_size > 1000
    tfscale.barrier()


class Late(keras.callbacks.Callback):
    """The last rank sleeps within each recorded step, before its function runs."""

    def on_train_batch_begin(self, batch, logs=None):
        if runtime.rank() == runtime.size() - 1:
            time.sleep(0.03)


@sizes(2, timeout_s=60)
def case_a_report_has_averages_that_overlap_with_training():
    folder = shared_folder()
    exchange = tfscale.LocalSGD(2, interval=4, overlap=2)
    fit(build(exchange), [CommunicationReport(folder, every_n_steps=1)])
    tfscale.barrier()
    slots = of_kind(read_rows(folder), "slot")
    assert {s["name"] for s in slots} >= {"posted average of parameters"}
    # Sent after steps 4 and 8 of two epochs.
    sent = [s for s in slots if s["name"].startswith("posted average") and s["rank"] == 0]
    assert len(sent) == 4 and all(s["bytes"] >= 3 * 64 * 64 * 4 for s in sent)


@sizes(2, timeout_s=120)
def case_others_wait_for_a_late_rank():
    folder = shared_folder()
    fit(build(), [CommunicationReport(folder, every_n_steps=1), Late()], epochs=1)
    tfscale.barrier()
    steps = of_kind(read_rows(folder), "step")
    waiting = [[s["waiting_s"] for s in steps if s["rank"] == rank] for rank in (0, 1)]
    assert np.median(waiting[0]) > 2 * np.median(waiting[1]), waiting
    assert np.median(waiting[0]) > 0.01, waiting  # the other sleeps for 0.03 s
    tfscale.barrier()


class LateRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is known late on rank 1, which sends its parameters late."""

    def __call__(self, step):
        def wait(_):
            time.sleep(0.03 * runtime.rank())
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
    """Batches that take 100 ms each; then parameters that rank 1 sends 30 ms late."""
    spec = (tf.TensorSpec((4, 64)), tf.TensorSpec((4, 64)))
    slow = tf.data.Dataset.from_generator(slow_batches, output_signature=spec)
    fast = tf.data.Dataset.from_tensors(next(slow_batches())).repeat(N_STEPS)
    medians = []
    for data, rate in ((slow, 1e-3), (fast, LateRate())):
        layers = [keras.layers.Dense(64, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        sharded = tfscale.Sharded(bucket_mb=0, dense="weights")
        optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(rate), exchange=sharded)
        model.compile(optimizer, loss="mse")
        folder = shared_folder()
        start = BroadcastGlobalVariablesCallback(0)
        report = CommunicationReport(folder, every_n_steps=1)
        model.fit(data, verbose=0, callbacks=[start, report], steps_per_epoch=N_STEPS)
        tfscale.barrier()
        steps = [step for step in of_kind(read_rows(folder), "step") if step["rank"] == 0]
        names = ("input_s", "forward_wait_s", "compute_s", "exposed_s")
        for step in steps:
            assert all(step[name] >= 0 for name in names), step
            total = sum(step[name] for name in names)
            np.testing.assert_allclose(total, step["step_s"], atol=1e-7)
        medians.append([np.median([step[name] for step in steps]) for name in names[:2]])
        tfscale.barrier()
    slow, late = medians
    assert slow[0] > 5 * late[0] and late[1] > 5 * slow[1], medians


@sizes(2, timeout_s=120)
def case_steps_executed_together():
    folder = shared_folder()
    fit(build(steps_per_execution=4), [CommunicationReport(folder, every_n_steps=1)], epochs=2)
    tfscale.barrier()
    rows = read_rows(folder)
    steps, slots = of_kind(rows, "step"), of_kind(rows, "slot")
    assert {s["n_steps"] for s in steps} == {4}
    assert {s["repeat"] for s in slots} == {0, 1, 2, 3}
    assert all(s["exposed_s"] < s["step_s"] for s in steps)
    tfscale.barrier()


@sizes(2)
def case_dependencies_of_a_traced_function():
    seen = []

    @tf.function
    def step(x):
        first = tfscale.allreduce(x, name="first")
        second = tfscale.allreduce(first * 2, name="second")
        seen.append(tf.compat.v1.get_default_graph())
        return second

    step(tf.ones([3]))
    before = collectives_before(seen[0])
    plan = next(iter(before)).plan
    assert before == {Key(plan, 0): frozenset(), Key(plan, 1): frozenset([Key(plan, 0)])}


@sizes(2)
def case_updates_need_their_own_gradients_only():
    """Unless the optimizer clips by the norm of all gradients."""
    for clipping in ({}, {"global_clipnorm": 1.0}):
        model = build()
        model.optimizer.global_clipnorm = clipping.get("global_clipnorm")
        x = np.ones((4, 64), "float32")
        model.train_on_batch(x, x)
        listener = recorder.Listener()
        model.train_on_batch(x, x)
        events = listener.take()
        stamps = events[(events["slot"] < 0) & (events["slot"] > recorder.INPUT_SLOT)]
        gradients = events[events["slot"] >= 0]
        assert len(stamps) == len(gradients) == 3
        assert sum(events["slot"] == recorder.INPUT_SLOT) == 1  # of the batch
        before = collectives_before(runtime.backend().graph_of(int(stamps[0]["plan"])))
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
