"""Virtual ranks that run whole plans take as long as the planner says."""

import pytest
import simulate_engine
import simulate_steps
from simulate_steps import allreduce_input, timed, written

from tfscale.plan.choose import plain_plan
from tfscale.plan.costs import Scenario, allreduce_s
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine
from tfscale.plan.parts import bucketed
from tfscale.plan.published import dense
from tfscale.plan.simulate import simulate

MACHINE = Machine("1 Gbit/s", 40e-6, 125e6, 4e9, 100e9, 15e9)
INSIDE = {"host_latency_s": 5e-6, "host_bytes_per_s": 4e9}
TABLE = LayerTable("tiny", tuple(dense(f"dense{i}", 700, 500 + 130 * i) for i in range(4)))


@pytest.fixture(scope="module")
def program():
    """The simulator; compiling it takes a minute where nothing is built yet."""
    return simulate_engine.build(times_steps=True)


@pytest.mark.parametrize("kind", ["allreduce", "sharded"])
@pytest.mark.parametrize("per_host", [1, 4])
def test_a_step_of_16_ranks_is_predicted(program, kind, per_host):
    inside = INSIDE if per_host > 1 else {}
    machine = Machine(**{**vars(MACHINE), "ranks_per_host": per_host, **inside})
    scenario = Scenario(TABLE, machine, 16, 16 * 64)
    plan = plain_plan(scenario) if kind == "allreduce" else bucketed(TABLE, 2**20, "sharded")
    first, again = (timed(program, written(scenario, plan, n_steps=5)) for _ in range(2))
    assert first == again
    assert first.step_s == pytest.approx(simulate(scenario, plan).step_s, rel=0.1)
    if per_host == 1:  # of each vector and its sums all but the own segments
        sent = 2 * 15 / 16 * sum(p.n_bytes for p in TABLE.parameters)
        assert first.n_bytes == pytest.approx(sent, rel=0.1)


def test_short_vectors_are_relayed_in_fewer_messages(program):
    """64 KB on 64 ranks: 15 messages instead of 126, which take less than half of the time."""
    relayed, direct = (
        timed(program, allreduce_input(MACHINE, 64, 65536, radix))
        for radix in (simulate_steps.BEST_WAY, 0)
    )
    assert (relayed.n_messages, direct.n_messages) == (15, 126)
    assert relayed.step_s == pytest.approx(allreduce_s(65536, 64, MACHINE, "direct"), rel=0.1)
    assert direct.step_s > 2 * relayed.step_s


def test_a_plan_that_cannot_be_read_is_an_error(program):
    with pytest.raises(RuntimeError, match="steps were not simulated"):
        timed(program, "16 1")
