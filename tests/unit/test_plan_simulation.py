"""The simulator: schedules known by hand, and bounds that nothing may beat."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan_scenarios import layer, machines, require_fit, tables
from tfscale.config import PlanError
from tfscale.plan.costs import Scenario
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import Machine
from tfscale.plan.parts import LayerPart, LayerPlan, bucketed, chunked, lower_bound_s, memory_bytes
from tfscale.plan.published import dense, published
from tfscale.plan.simulate import (
    COMMUNICATION,
    COMPUTE,
    SUMS,
    Task,
    find_rhythm,
    run,
    simulate,
    simulate_local_sgd,
    step_tasks,
)

# One operation, one byte: one second. Sums and updates take no time, nor do messages.
UNIT = Machine("unit", 0.0, 1.0, 1e30, 1.0, 1e30)


def two_layers() -> LayerTable:
    return LayerTable("two", (layer("a", 1), layer("b", 1)))


def test_priorities_and_streams():
    """A stream takes what is ready and most urgent, and never two things at a time."""
    tasks = (
        Task(COMPUTE, 2.0),
        Task(COMMUNICATION, 5.0, after=(0,), priority=2),
        Task(COMMUNICATION, 1.0, after=(0,), priority=1),
        Task(SUMS, 1.0, after=(2,)),
    )
    begins, ends = run([tasks])
    assert begins == [0.0, 3.0, 2.0, 3.0]
    assert ends == [2.0, 8.0, 3.0, 4.0]


def test_work_that_runs_into_the_next_step_counts():
    """The communication of a step is hidden by the next one's computation: 5 s, not 3 s."""
    step = (Task(COMPUTE, 3.0, after_previous=()), Task(COMMUNICATION, 5.0, after=(0,)))
    next_waits = (dataclasses.replace(step[0], after_previous=(1,)), step[1])
    assert find_rhythm([next_waits]).step_s == pytest.approx(8.0)
    hidden = (*step, Task(COMPUTE, 0.0, after_previous=(1,)))
    rhythm = find_rhythm([hidden])
    assert rhythm.step_s >= 5.0 * (1 - 1e-9)
    assert (rhythm.compute_s, rhythm.communication_s) == (3.0, 5.0)


def test_allreduce_by_hand():
    """Forward 2 s, back-propagation 1 + 2 s, 4 bytes from each of two layers over two ranks."""
    scenario = Scenario(two_layers(), UNIT, 2, 2)
    assert scenario.compute_s() == pytest.approx(5.0)  # a makes no errors for a layer below
    send = 2 * 4 * 0.5
    plan = bucketed(two_layers(), 0)
    assert len(plan.parts) == 2
    # b is ready after 4 s, a after 5 s; the wire is busy until 4 + 2 * 4.
    assert simulate(scenario, plan).step_s == pytest.approx(4 + 2 * send)
    for late in (dataclasses.replace(plan, overlap=False), bucketed(two_layers(), 10**9)):
        assert simulate(scenario, late).step_s == pytest.approx(5 + 2 * send)
        assert simulate(scenario, late).exposed_s == pytest.approx(2 * send)


def test_gathers_in_forward_order_let_the_next_step_begin_earlier():
    """Each of three layers sends for 2 s; gradients are ready at 5, 7 and 8 s, of c, b and a.

    Alltoalls end at 7, 9 and 11. Then the gathers of b and c wait, those of a is summed just then:
    b until 13, a until 15, when the next step begins, c until 17, when its forward pass reaches c.
    """
    table = LayerTable("three", (layer("a", 1), layer("b", 1), layer("c", 1)))
    scenario = Scenario(table, UNIT, 2, 2)
    plan = bucketed(table, 0, "sharded")
    assert simulate(scenario, plan).step_s == pytest.approx(15.0)


def test_sums_of_an_allreduce_overlap_with_other_messages():
    """Two layers, each sent for 2 s, summed for 4 s and sent for 2 s more, ready at 4 and 5 s.

    b is sent until 6 and summed until 10 while a is sent until 8; a is summed from 10 to 14. Where
    computation slows messages down, the thread that sums sends nothing meanwhile.
    """
    # Long enough to be sent directly.
    table = LayerTable("long", (layer("a", 10**4), layer("b", 10**4)))
    summing = dataclasses.replace(UNIT, bytes_per_s=1e4, reduce_bytes_per_s=1e4)
    for share, step_s in ((1.0, 14 + 2.0), (0.99, 4 + 2 * (2 + 4 + 2.0))):
        scenario = Scenario(table, dataclasses.replace(summing, message_share=share), 2, 2)
        assert scenario.sum_s(4 * 10**4) == pytest.approx(4.0)
        predicted = simulate(scenario, bucketed(table, 0))
        assert predicted.step_s == pytest.approx(step_s, rel=0.02)


def test_gathers_are_cut_into_messages():
    """Each message more takes the latency, once for each other host."""
    table = LayerTable("one", (layer("a", 100),))
    machine = dataclasses.replace(UNIT, latency_s=1e-5)
    scenario = Scenario(table, machine, 4, 4)
    cut, whole = (
        simulate(
            scenario, dataclasses.replace(bucketed(table, 0, "sharded"), gather_bytes=n)
        ).step_s
        for n in (10, 0)
    )
    # A segment is 100 bytes: ten messages instead of one, to three hosts.
    assert cut - whole == pytest.approx(9 * 3 * 1e-5, rel=1e-3)


def test_one_rank_sends_nothing():
    for kind in ("allreduce", "sharded"):
        scenario = Scenario(two_layers(), UNIT, 1, 2)
        predicted = simulate(scenario, bucketed(two_layers(), 0, kind))
        assert predicted.step_s == pytest.approx(scenario.compute_s())
        assert predicted.overlap_percent is None


def test_replicated_layers_pay_for_the_whole_batch():
    table = LayerTable("dense", (dense("a", 3, 5),))
    scenario = Scenario(table, dataclasses.replace(UNIT, bytes_per_s=1e30), 4, 8)
    plan = chunked(table, 1, replicated=1)
    weights = 2 * 3 * 5 * 8
    assert simulate(scenario, plan).compute_s == pytest.approx(2 * 3 * 5 * 2 + weights)
    sharded = bucketed(table, None, "sharded", {0: "partial"})
    assert simulate(scenario, sharded).compute_s == pytest.approx(2 * 3 * 5 * 2 + weights / 4)


def test_activations_of_the_first_layer_do_not_travel_steps_ahead():
    machine = Machine("any", 0.01, 4e10, 1e6, 1e9, 1e9, 0.0)
    scenario = Scenario(LayerTable("dense", (dense("a", 2, 1),)), machine, 24, 1)
    plan = LayerPlan((LayerPart("partial", (0, 1)),), overlap=True, lazy=())
    predicted = simulate(scenario, plan)
    assert predicted.step_s >= predicted.communication_s * (1 - 1e-6)


@st.composite
def plans(draw, table: LayerTable) -> LayerPlan:
    """Any plan: kinds at random, neighbours together or alone, all switches."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    dense_places = [place for place, own in enumerate(table.layers) if own.dense]
    drawn = {place: one_of("partial", "replicated", None) for place in dense_places}
    special = {place: kind for place, kind in drawn.items() if kind}
    plan = bucketed(table, one_of(0, 10**5, 10**9), "sharded", special)
    parts = tuple(
        LayerPart(
            one_of("allreduce", part.kind) if part.kind == "sharded" else part.kind, part.parameters
        )
        for part in plan.parts
    )
    lazy = one_of((), ("sharded", "partial"), ("allreduce", "replicated"))
    switches = {"overlap": draw(st.booleans()), "has_early_gradients": draw(st.booleans())}
    algorithm = one_of("direct", "recursive", "mpi")
    return LayerPlan(
        parts, lazy=lazy, piece_bytes=one_of(0, 10**5), algorithm=algorithm, **switches
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), tables(), machines(), st.integers(1, 1024), st.integers(1, 4096))
def test_nothing_beats_the_lower_bound(data, table, machine, n_ranks, batch):
    plan = data.draw(plans(table))
    require_fit(table, plan)
    scenario = Scenario(table, machine, n_ranks, batch)
    predicted = simulate(scenario, plan)
    least = max(predicted.compute_s, predicted.communication_s)
    assert predicted.step_s >= least * (1 - 1e-6)
    assert predicted.step_s >= lower_bound_s(scenario) * (1 - 1e-6)
    assert memory_bytes(scenario, plan) >= 2 * 4 * table.n_values


@settings(max_examples=40, deadline=None)
@given(st.data(), tables(), machines(), st.integers(1, 64), st.integers(1, 8))
def test_local_sgd_averages_less_often(data, table, machine, group_size, interval):
    plan = data.draw(plans(table))
    scenario = Scenario(table, machine, group_size, 4 * group_size)
    alone = simulate(scenario, plan)
    averaged = simulate_local_sgd(scenario, plan, n_groups=4, interval=interval)
    assert averaged.communication_s >= alone.communication_s * (1 - 1e-9)
    assert averaged.step_s >= averaged.communication_s * (1 - 1e-6)
    rarely = simulate_local_sgd(scenario, plan, n_groups=4, interval=2 * interval)
    assert rarely.communication_s <= averaged.communication_s * (1 + 1e-9)


def test_memory_by_hand():
    """Two layers of 4 bytes on two ranks: parameters, gradients, one slot, and what is sent."""
    scenario = Scenario(two_layers(), UNIT, 2, 2)
    whole, cut = (bucketed(two_layers(), 0, kind) for kind in ("allreduce", "sharded"))
    assert memory_bytes(scenario, whole) == 2 * (2 * 4 + 4 + 4)
    assert memory_bytes(scenario, cut) == 2 * (2 * 4 + 4 / 2 + 2 * 4)


def test_errors():
    with pytest.raises(PlanError, match="circle"):
        run([(Task(COMPUTE, 1.0, after=(1,)), Task(COMPUTE, 1.0, after=(0,)))])
    with pytest.raises(PlanError, match="must have trainable variables"):
        LayerTable("none", (Layer("pool"),))
    with pytest.raises(PlanError, match="must be 1 or more"):
        Scenario(two_layers(), UNIT, 0, 2)


def test_a_thousand_ranks_are_as_few_events_as_two():
    """Simulated ranks are all alike: a step of 161 parameters is some hundred tasks."""
    table = published("resnet50")
    plan = bucketed(table, 0, "sharded")
    n_tasks = [len(step_tasks(Scenario(table, UNIT, n, 1024), plan)) for n in (2, 1024)]
    assert n_tasks[0] == n_tasks[1] < 2 * 108 + 4 * 161
    assert simulate(Scenario(table, UNIT, 1024, 1024), plan).is_steady
