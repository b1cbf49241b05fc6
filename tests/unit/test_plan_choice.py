"""The planner: a plan for every parameter, the same on all ranks, never worse than plain."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfscale
from tests.unit.plan_scenarios import machines, require_fit, tables
from tfscale.config import PlanError
from tfscale.exchange.base import Exchange
from tfscale.plan.choose import best_first_chunk, choose, written_exchanges
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import explain
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import PRESETS, LayerTimes, Machine
from tfscale.plan.parts import lower_bound_s, memory_bytes
from tfscale.plan.published import published
from tfscale.plan.simulate import simulate


@settings(max_examples=60, deadline=None)
@given(tables(), machines(), st.integers(1, 1024), st.integers(1, 4096))
def test_a_choice_covers_all_and_is_never_worse(table, machine, n_ranks, batch):
    scenario = Scenario(table, machine, n_ranks, batch)
    choice = choose(scenario)
    require_fit(table, choice.plan)
    assert choice.predicted == simulate(scenario, choice.plan)
    plain_s = choice.plain_predicted.step_s
    assert choice.is_plain or choice.predicted.step_s <= 0.97 * plain_s
    assert choice.predicted.step_s >= lower_bound_s(scenario) * (1 - 1e-6)
    again = choose(Scenario(table, machine, n_ranks, batch))
    assert again == choice
    assert again.fingerprint() == choice.fingerprint()


def scenario_of(layer_bytes: list[int], ready_s: list[float], latency_s: float, rate: float):
    """Two ranks whose allreduce takes a latency and bytes / rate; gradients ready as given."""
    layers = tuple(Layer(f"l{i}", ((f"l{i}/w", n // 4),)) for i, n in enumerate(layer_bytes))
    later = [*ready_s[1:], 0.0]
    backward = {f"l{i}": a - b for i, (a, b) in enumerate(zip(ready_s, later, strict=True))}
    times = LayerTimes(1, dict.fromkeys(backward, 0.0), backward)
    machine = Machine("measured", latency_s / 2, rate, 1e30, 1e30, 1e30, layer_times={"t": times})
    return Scenario(LayerTable("t", layers), machine, 2, 2)


def test_times_of_another_model_of_the_same_name_are_refused():
    scenario = scenario_of([8, 8], [1.0, 0.5], 0.0, 200.0)
    times = scenario.machine.layer_times["t"]
    for n_values, is_refused in ((0, False), (4, False), (5, True)):
        other = dataclasses.replace(times, n_values=n_values)
        machine = dataclasses.replace(scenario.machine, layer_times={"t": other})
        known = dataclasses.replace(scenario, machine=machine)
        if is_refused:
            with pytest.raises(PlanError, match="4 trainable values, and times of .* with 5"):
                known.compute_s()
        else:
            assert known.compute_s() == scenario.compute_s()


def test_first_chunk_is_what_ends_first():
    """The last layer is large and ready at once: it alone is hidden by back-propagation."""
    assert best_first_chunk(scenario_of([8, 8, 100], [1.0, 0.6, 0.1], 0.0, 200.0)) == 1
    # The others are small: all but one layer together.
    assert best_first_chunk(scenario_of([100, 4, 4], [0.3, 0.2, 0.1], 0.0, 1e3)) == 2


def test_the_planner_refuses_where_nothing_is_gained():
    """A small model on a fast network: plain allreduce, with the reason; and one rank."""
    small = choose(Scenario(published("resnet20"), PRESETS["cori-haswell"], 8, 256))
    assert small.is_plain and "less than it must be" in small.reason
    alone = choose(Scenario(published("vgg-a"), PRESETS["ethernet-1g"], 1, 64))
    assert alone.is_plain and alone.predicted.communication_s == 0
    assert alone.fingerprint() != small.fingerprint()


def test_only_allowed_kinds_are_used_and_large_weights_are_not_sent():
    scenario = Scenario(published("vgg-a"), PRESETS["ethernet-1g"], 4, 128)
    for allowed in (("allreduce",), ("allreduce", "replicated"), ("sharded", "partial")):
        choice = choose(scenario, allowed)
        kinds = {part.kind for part in choice.plan.parts}
        assert choice.is_plain or kinds <= set(allowed)
    choice = choose(scenario)
    fc1 = next(i for i, p in enumerate(scenario.table.parameters) if p.name == "fc1/kernel")
    part = next(part for part in choice.plan.parts if fc1 in part.parameters)
    assert part.kind in ("partial", "replicated") and not choice.is_plain


def test_shards_hold_less_optimizer_state():
    scenario = Scenario(published("resnet50"), PRESETS["cori-haswell"], 256, 256, n_slots=2)
    choice = choose(scenario)
    assert "sharded" in {part.kind for part in choice.plan.parts}
    assert memory_bytes(scenario, choice.plan) < memory_bytes(scenario, choice.plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg-a", "resnet50", "resnet20", "edsr16"])
@pytest.mark.parametrize("machine", ["ethernet-1g", "cori-haswell"])
def test_exchanges_can_be_written(name, machine):
    """The words make a strategy, and none is faster than what the planner finds by 3 %."""
    for n_ranks in (1, 4, 64):
        scenario = Scenario(published(name), PRESETS[machine], n_ranks, 256)
        chosen_s = choose(scenario).predicted.step_s
        for plans in written_exchanges(scenario).values():
            for words, plan in plans.items():
                assert isinstance(eval(words, {"tfscale": tfscale}), Exchange)
                require_fit(scenario.table, plan)
                assert chosen_s <= simulate(scenario, plan).step_s / 0.97


def test_the_explanation_names_every_parameter_and_alternative():
    scenario = Scenario(published("vgg16"), PRESETS["cori-haswell"], 256, 256)
    choice = choose(scenario)
    text = explain(scenario, choice)
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert rows.keys() >= {parameter.name for parameter in scenario.table.parameters}
    assert "allreduce: +" in rows["fc1/kernel"]
    # A convolution has no activations to send: two alternatives are dashes.
    assert rows["conv1_1/kernel"].count(" - ") == 2
    assert "no plan is faster than" in text
    empty = LayerTable("mine", (Layer("a", (("a/w", 4),)), Layer("b", (("b/e", 0),))))
    scenario = Scenario(empty, PRESETS["cori-haswell"], 4, 16)
    assert "b/e" in explain(scenario, choose(scenario))
