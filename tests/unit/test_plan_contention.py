"""Ranks that share cores: what streams take from each other, and predictions against a cluster."""

import dataclasses

import pytest

from tests.unit.plan_scenarios import CLUSTER, TABLES, fixed, scenario_of
from tfscale.measure.auto import candidates
from tfscale.measure.layer_times import LayerMeasurement, separate
from tfscale.plan.costs import Scenario
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import LayerTimes
from tfscale.plan.published import dense
from tfscale.plan.simulate import COMMUNICATION, COMPUTE, SUMS, Speeds, Task, run, simulate

# Milliseconds of a step as measured by `python -m benchmarks step`.
MEASURED = {
    ("vgg_like", "allreduce"): 1681,
    ("vgg_like", "chunked"): 217,
    ("vgg_like", "sharded"): 881,
    ("vgg_a", "chunked"): 1032,
    ("vgg_a", "sharded"): 1571,
    ("resnet50", "chunked"): 1738,
    ("resnet50", "sharded"): 1414,
}


@pytest.mark.parametrize("name, exchange", MEASURED)
def test_steps_of_an_emulated_cluster_are_predicted(name, exchange):
    scenario = scenario_of(name)
    predicted = 1e3 * simulate(scenario, fixed(scenario, exchange)).step_s
    assert predicted == pytest.approx(MEASURED[name, exchange], rel=0.15)


EVERY = ("allreduce", "sharded", "partial", "replicated")


@pytest.mark.parametrize("name", TABLES)
def test_dense_layers_are_replicated_on_it_and_convolutions_sharded(name):
    scenario = scenario_of(name)
    found = candidates(scenario, EVERY)
    for choice in found:  # whatever is timed: nothing among it sends the large kernels
        kinds = {p: part.kind for part in choice.plan.parts for p in part.parameters}
        names = [p.name for p in scenario.table.parameters]
        large = {kinds[i] for i, own in enumerate(names) if own in ("fc1/kernel", "fc2/kernel")}
        assert large == (set() if name == "resnet50" else {"replicated"})
    kinds = [part.kind for part in found[0].plan.parts]
    if name == "resnet50":
        assert kinds.count("sharded") >= 4 and "allreduce" not in kinds
    best_fixed = fixed(scenario, "sharded" if name == "resnet50" else "chunked")
    assert found[0].predicted.step_s <= simulate(scenario, best_fixed).step_s


def test_the_best_of_each_family_is_tried_if_it_is_promising():
    scenario = scenario_of("vgg_a")
    found = candidates(scenario, EVERY)
    times = [choice.predicted.step_s for choice in found]
    assert times == sorted(times) and times[-1] <= 1.25 * times[0]
    assert len({choice.plan for choice in found}) == len(found) >= 2
    assert [c.is_plain for c in candidates(scenario, ("allreduce",))] in ([True], [False])
    alone = Scenario(scenario.table, scenario.machine, 1, 32)
    assert [choice.is_plain for choice in candidates(alone, EVERY)] == [True]


def test_streams_that_share_cores_slow_each_other():
    tasks = [Task(COMPUTE, 1.0), Task(COMMUNICATION, 1.0)]
    assert run([tasks])[1] == [1.0, 1.0]
    assert run([tasks], Speeds(compute=0.5))[1] == pytest.approx([1.5, 1.0])
    # Messages at 0.8 until 1.0 s of work at 1.0 is done; then alone.
    assert run([tasks], Speeds(messages=0.8))[1] == pytest.approx([1.0, 1.2])
    # Sums take from computing as messages do; computing begins to suffer when they begin.
    later = [Task(COMPUTE, 1.0), Task(COMPUTE, 1.0, (0,)), Task(SUMS, 0.5, (0,))]
    assert run([later], Speeds(compute=0.5))[1] == pytest.approx([1.0, 2.25, 1.5])


def measured(before_s: float, ready_s: tuple, message_s: float) -> LayerMeasurement:
    return LayerMeasurement(("a", "b"), (8, 8), ready_s, message_s, 0.0, before_s, 0.0, 3.0)


def test_steps_are_taken_apart():
    alone = measured(1.0, (0.0, 0.0), 1.0)
    # 0.6 s of back-propagation took 1.2 s, all of it with messages under way; these took 2.4 s
    # instead of 2.0 s, half of it beside back-propagation.
    found = separate(alone, measured(0.4, (1.2, 0.0), 1.2))
    assert found.compute_share == pytest.approx(0.5)
    assert found.message_share == pytest.approx(2 / 3)
    assert found.ready_s == pytest.approx((0.6, 0.0)) and found.wire_s == 2.0
    # Nothing disturbed anything; nothing was computed beside the messages.
    for ready_s in (0.6, 0.0):
        found = separate(alone, measured(0.4, (ready_s, 0.0), 1.0))
        assert (found.compute_share, found.message_share) == (1.0, 1.0)


def test_measured_gradients_of_dense_layers_count():
    table = LayerTable("t", (dense("a", 4, 5), dense("b", 5, 6)))
    times = LayerTimes(
        8, dict.fromkeys("ab", 0.1), dict.fromkeys("ab", 0.4), 0.0, {"b": (32.0, 0.1, 0.3, 0.05)}
    )
    scenario = Scenario(table, dataclasses.replace(CLUSTER, layer_times={"t": times}), 4, 32)
    assert scenario.backward_s(1) == pytest.approx((0.3, 0.1))
    assert scenario.gradient_s(1, 32) == pytest.approx(0.3)
    assert scenario.gradient_s(1, 32, 1 / 4) == pytest.approx(0.05)
    assert scenario.gradient_s(1, 32, 1 / 16) == pytest.approx(0.0125)
    assert scenario.gradient_s(1, 64) == pytest.approx(0.6)
    assert sum(scenario.backward_s(0)) == pytest.approx(0.4)
