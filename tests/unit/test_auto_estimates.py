"""What "auto" measures, on clusters that behave as the simulator says: it finds their constants."""

import dataclasses
from itertools import groupby

import pytest

from tests.unit.test_plan_contention import CLUSTER, TABLES, fixed, scenario_of
from tfscale.measure.auto import candidates
from tfscale.measure.layer_times import (
    LayerMeasurement,
    calibrated,
    fitted,
    measured_machine,
    separate,
)
from tfscale.plan.buckets import owner_of
from tfscale.plan.costs import Scenario, allreduce_s
from tfscale.plan.machines import Machine
from tfscale.plan.parts import bucketed
from tfscale.plan.simulate import COMMUNICATION, Speeds, run, simulate, step_tasks

EVERY = ("allreduce", "sharded", "partial", "replicated")
STEP = 4  # of six: the steps have a rhythm by then


def probed(scenario: Scenario, overlap: bool) -> LayerMeasurement:
    """Return what a probe measures where each layer is exchanged alone."""
    table, machine = scenario.table, scenario.machine
    plan = dataclasses.replace(bucketed(table, None), overlap=overlap)
    tasks = step_tasks(scenario, plan)
    begins, ends = run([tasks] * 6, Speeds(machine.compute_share, machine.message_share))
    n = len(tasks)
    before, own = max(ends[(STEP - 1) * n : STEP * n]), slice(STEP * n, (STEP + 1) * n)
    timed = list(zip(tasks, begins[own], ends[own], strict=True))
    done = {task.name: end for task, _, end in timed}
    # The pieces of a message are tasks one after another, each after the one before.
    sent = [(i, end - begin) for i, (task, begin, end) in enumerate(timed) if is_sent(task)]
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


def is_sent(task) -> bool:
    return task.stream == COMMUNICATION


def first_of(tasks, place: int) -> int:
    """Return the first piece of the message that a task is a piece of."""
    while is_sent(tasks[tasks[place].after[0]]):
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
    times = dataclasses.replace(machine.layer_times[table.name], gradient_s=gradients)
    machine = dataclasses.replace(
        machine,
        memory_bytes_per_s=truth.machine.memory_bytes_per_s,
        layer_times={table.name: times},
    )
    return calibrated(dataclasses.replace(truth, machine=machine), together)


def check(truth: Scenario) -> Machine:
    """Predictions are near, and what is chosen is nearly as good as with the constants known."""
    estimate = estimated(truth)
    for exchange in ("allreduce", "chunked", "sharded"):
        plan = fixed(truth, exchange)
        expected = simulate(truth, plan).step_s
        assert simulate(estimate, plan).step_s == pytest.approx(expected, rel=0.1)
    # The one that measures fastest is kept.
    tried = [simulate(truth, choice.plan).step_s for choice in candidates(estimate, EVERY)]
    best = candidates(truth, EVERY)[0].predicted.step_s
    assert min(tried) <= 1.03 * best
    assert min(tried) <= 1.01 * min(
        simulate(truth, fixed(truth, exchange)).step_s
        for exchange in ("allreduce", "chunked", "sharded")
    )
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
    memory = dataclasses.replace(
        scenario.machine, latency_s=20e-6, bytes_per_s=2e9, compute_share=share, message_share=share
    )
    machine = check(Scenario(scenario.table, memory, 2, 32))
    assert machine.compute_share == pytest.approx(share, abs=0.15)
