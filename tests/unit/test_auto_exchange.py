"""exchange="auto": before it has planned, and what its measurements become."""

from dataclasses import replace
from itertools import groupby

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.single_job import single_job  # noqa: F401
from tests.unit.plan_scenarios import CLUSTER, TABLES, fixed, scenario_of
from tfscale import Auto
from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.auto import strategy_of
from tfscale.exchange.base import resolve
from tfscale.exchange.plan import Parameter, Table
from tfscale.measure.auto import candidates
from tfscale.measure.layer_times import (
    LayerMeasurement,
    calibrated,
    fitted,
    measured_machine,
    separate,
)
from tfscale.plan.buckets import GradientSpec, owner_of
from tfscale.plan.costs import Scenario, allreduce_s, transfer_s
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import PRESETS, Machine
from tfscale.plan.parts import bucketed, chunked
from tfscale.plan.published import dense
from tfscale.plan.simulate import COMMUNICATION, Speeds, run, simulate, step_tasks
from tfscale.tune.links import fit_line


def test_names_and_machines():
    with pytest.raises(ConfigError, match="machine"):
        Auto(machine="no")
    assert resolve("auto") == Auto()
    for machine in ("ethernet-1g", PRESETS["ethernet-1g"]):
        assert Auto(machine=machine).read_machine() is PRESETS["ethernet-1g"]
    assert "Nothing is planned yet" in Auto().explain()


def test_one_process_trains_as_without():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange="auto"), "mse")
    history = model.fit(np.ones((8, 3)), np.ones((8, 2)), epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_a_plan_becomes_a_strategy():
    table = LayerTable("t", (dense("a", 4, 5), dense("b", 5, 6), dense("c", 6, 7)))
    strategy = strategy_of(table, chunked(table, 1, 2, replicated=1), "words")
    assert strategy.layers == (("a", "replicated"),) and not strategy.is_sharding
    summed = {paths for kind, paths in strategy.parts if kind == "allreduce"}
    assert summed == {("c/bias", "c/kernel"), ("b/bias", "b/kernel")}
    # A variable that the plan does not know is sent alone, and one that is missing does not matter.
    names = ["b/kernel", "c/kernel", "c/bias", "new"]
    specs = [GradientSpec(name, (2,), "float32") for name in names]
    made = tuple(Parameter(spec, "float32", "weights") for spec in specs)
    plan = strategy.plan(Table(made), Group(0, (0, 1), 0))
    assert [part.indices for part in plan.parts] == [(3,), (2, 1), (0,)]


def test_lines_through_durations():
    assert fit_line([0, 10, 20], [1.0, 2.0, 3.0]) == pytest.approx((1.0, 0.1))
    # A falling line, or one size only: the fastest counts, with no time for nothing.
    assert fit_line([10, 20], [2.0, 1.0]) == pytest.approx((0.0, 0.05))
    assert fit_line([10, 10], [2.0, 1.0]) == pytest.approx((0.0, 0.1))


LAST = (Layer("a", (("a/w", 250),), 3.0), Layer("b", (("b/w", 1000),), 1.0))


def measured(layers, names, n_bytes, ready_s):
    """Return table, machine, and a step of 2 s whose messages take 0.2 s and 20 kB/s."""
    table, times = LayerTable("t", layers), {"message_s": 0.2, "byte_s": 0.5e-4}
    times |= {"before_s": 0.5, "after_s": 0.1, "step_s": 2.0}
    found = LayerMeasurement(names, n_bytes, ready_s, **times)
    return table, measured_machine(table, found, n_ranks=2, batch=4, measured=None), found


@pytest.mark.parametrize("n_embeddings", [1, 3])
def test_rows_of_embeddings_say_nothing_of_the_bandwidth(n_embeddings):
    """Of 4 MB that the plan counts 4 kB are sent; the later layers send twice what it counts."""
    rows = [Layer(f"e{i}", ((f"e{i}/w", 1_000_000),)) for i in range(n_embeddings)]
    names, n_bytes = [row.name for row in rows], [4000] * n_embeddings
    ready_s = (*[0.3] * n_embeddings, 0.25, 0.0)
    _, machine, _ = measured((*rows, *LAST), (*names, "a", "b"), (*n_bytes, 2000, 8000), ready_s)
    assert 1 / machine.bytes_per_s == pytest.approx(1e-4)


def test_layers_of_several_cells_are_found_by_any_of_them():
    """Which weight names the bucket of a layer depends on the order of readiness."""
    cells = Layer("rnn", (("rnn/one/w", 100), ("rnn/two/w", 150)), 3.0)
    _, machine, _ = measured((cells, LAST[1]), ("rnn/two", "b"), (2000, 8000), (0.25, 0.0))
    assert machine.layer_times["t"].backward_s == {"rnn": 0.25, "b": 0.0}
    assert 1 / machine.bytes_per_s == pytest.approx(1e-4)


def test_a_measured_machine_takes_as_long_as_the_steps_did():
    # float64: twice what the plan counts
    table, machine, found = measured(LAST, ("a", "b"), (2000, 8000), (0.25, 0.0))
    scenario = Scenario(table, machine, 2, 8)
    assert scenario.compute_s() == pytest.approx(0.5 + 0.25)
    assert scenario.update_s(table.n_values) == pytest.approx(0.1)
    # Durations are 0.2 + bytes / 10000 seconds of what the plan counts.
    assert (2 * machine.latency_s, 1 / machine.bytes_per_s) == pytest.approx((0.2, 1e-4))
    known = measured_machine(table, found, 2, 4, PRESETS["ethernet-1g"])
    assert known.bytes_per_s == PRESETS["ethernet-1g"].bytes_per_s
    assert known.layer_times["t"].backward_s == machine.layer_times["t"].backward_s
    plan = bucketed(table, None)
    assert simulate(scenario, plan).step_s < 2.0
    assert simulate(calibrated(scenario, found), plan).step_s == pytest.approx(2.0)


@pytest.mark.parametrize("per_host", [2, 4])
def test_several_ranks_per_host_take_as_long_and_send_short_vectors_as_the_engine(per_host):
    table, _, found = measured(LAST, ("a", "b"), (1000, 4000), (0.25, 0.0))
    n_ranks = 16
    apart = measured_machine(table, found, n_ranks, 4, None)
    shared = measured_machine(table, replace(found, ranks_per_host=per_host), n_ranks, 4, None)
    assert shared.link(n_ranks) == pytest.approx(apart.link(n_ranks))
    long_s, short_s = (
        [allreduce_s(n_bytes, n_ranks, machine, "direct") for machine in (apart, shared)]
        for n_bytes in (1 << 20, 16384)
    )
    assert long_s[0] == pytest.approx(long_s[1])
    # Relayed only where each rank is a host of its own.
    direct_s = 2 * transfer_s(16384, n_ranks, shared)
    assert short_s[0] != pytest.approx(direct_s, rel=0.05)
    assert short_s[1] == pytest.approx(direct_s)


@pytest.mark.parametrize(
    ("total_s", "expected"),
    [
        (1.4, (0.1, 0.01)),  # as alone
        (1.2, (0.05, 0.01)),  # they took less: messages overlapped;
        (0.54, (0.01, 0.005)),  # much less, and bytes moved faster, too;
        (2.4, (0.1, 0.02)),  # longer: bytes had to wait
    ],
)
def test_what_messages_cost_where_many_are_under_way(total_s, expected):
    """Alone 0.1 s and 0.01 s per byte: 4 of 100 bytes in all."""
    assert fitted((0.1, 0.01), 4, 100, total_s) == pytest.approx(expected)


# What "auto" measures on clusters that behave as the simulator says: it finds their constants.

EVERY = ("allreduce", "sharded", "partial", "replicated")
STEP = 4  # of six: the steps have a rhythm by then


def probed(scenario: Scenario, overlap: bool) -> LayerMeasurement:
    """Return the measurement of a probe that exchanges each layer alone."""
    table, machine = scenario.table, scenario.machine
    plan = replace(bucketed(table, None), overlap=overlap)
    tasks = step_tasks(scenario, plan)
    begins, ends = run([tasks] * 6, Speeds(machine.compute_share, machine.message_share))
    n = len(tasks)
    before, own = max(ends[(STEP - 1) * n : STEP * n]), slice(STEP * n, (STEP + 1) * n)
    timed = list(zip(tasks, begins[own], ends[own], strict=True))
    done = {task.name: end for task, _, end in timed}
    # The pieces of a message are tasks one after another, each after the one before.
    sent = [(i, b - a) for i, (task, a, b) in enumerate(timed) if task.stream == COMMUNICATION]
    alone = [sum(s for _, s in run) for _, run in groupby(sent, lambda x: first_of(tasks, x[0]))]
    layers = [layer for layer in table.layers if layer.weights]
    # One message at a time between idle ranks, as the probe measures them.
    short_s, long_s = (allreduce_s(n, scenario.n_ranks, machine, "direct") for n in (0, 1e6))
    messages = (short_s, (long_s - short_s) / 1e6)
    n_bytes = sum(4 * layer.n_values for layer in layers)
    message_s, byte_s = fitted(messages, len(layers), n_bytes, sum(alone))
    last_name = f"backward {table.layers[0].name}"
    ready = [done[f"backward {x.name}" if overlap else last_name] for x in layers]
    return LayerMeasurement(
        layers=tuple(owner_of(layer.weights[0][0]) for layer in layers),
        n_bytes=tuple(4 * layer.n_values for layer in layers),
        ready_s=tuple(time - min(ready) for time in ready),
        message_s=message_s,
        byte_s=byte_s,
        before_s=min(ready) - before,
        after_s=0.0,
        step_s=max(ends[own]) - before,
    )


def first_of(tasks, place: int) -> int:
    """Return the first piece of the message that a task is a piece of."""
    while tasks[tasks[place].after[0]].stream == COMMUNICATION:
        place = tasks[place].after[0]
    return place


def estimated(truth: Scenario) -> Scenario:
    table, rows = truth.table, truth.global_batch
    together = probed(truth, overlap=True)
    found = separate(probed(truth, overlap=False), together)
    machine = measured_machine(table, found, truth.n_ranks, truth.local_batch, None)
    gradients = {
        layer.name: (
            float(rows),
            truth.gradient_s(place, truth.local_batch),
            truth.gradient_s(place, rows),
            truth.gradient_s(place, rows, 1 / truth.n_ranks),
        )
        for place, layer in enumerate(table.layers)
        if layer.dense
    }
    times = {table.name: replace(machine.layer_times[table.name], gradient_s=gradients)}
    memory = truth.machine.memory_bytes_per_s
    machine = replace(machine, memory_bytes_per_s=memory, layer_times=times)
    return calibrated(replace(truth, machine=machine), together)


def check(truth: Scenario) -> Machine:
    """Predictions are near, and what is chosen is nearly as good as with the constants known."""
    estimate = estimated(truth)
    plans = [fixed(truth, exchange) for exchange in ("allreduce", "chunked", "sharded")]
    measured_s = [simulate(truth, plan).step_s for plan in plans]
    assert [simulate(estimate, plan).step_s for plan in plans] == pytest.approx(measured_s, rel=0.1)
    # The one that measures fastest is kept.
    tried = [simulate(truth, choice.plan).step_s for choice in candidates(estimate, EVERY)]
    best = candidates(truth, EVERY)[0].predicted.step_s
    assert min(tried) <= min(1.03 * best, *(1.01 * s for s in measured_s))
    return estimate.machine


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_constants_of_a_slow_network_are_found(name):
    machine = check(scenario_of(name))
    assert machine.compute_share == pytest.approx(CLUSTER.compute_share, rel=0.01)
    assert machine.message_share == pytest.approx(CLUSTER.message_share, rel=0.01)
    # An allreduce's sums count as a slower network.
    assert 0.9 * CLUSTER.bytes_per_s < machine.bytes_per_s < CLUSTER.bytes_per_s


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_the_constants_of_shared_memory_are_found(share):
    scenario = scenario_of("vgg_a")
    speeds = {"bytes_per_s": 2e9, "compute_share": share, "message_share": share}
    memory = replace(scenario.machine, latency_s=20e-6, **speeds)
    machine = check(Scenario(scenario.table, memory, 2, 32))
    assert machine.compute_share == pytest.approx(share, abs=0.15)
