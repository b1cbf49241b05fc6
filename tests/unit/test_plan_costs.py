"""What exchanges cost: the papers' equations by hand, and costs that only grow."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan_scenarios import machines
from tfscale.config import PlanError
from tfscale.plan import costs
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import PRESETS, LayerTimes, Machine, find_machine
from tfscale.plan.parts import KINDS, LayerPlan, message_bytes
from tfscale.plan.published import published

SIMPLE = Machine("simple", 1.0, 10.0, 4.0, 1e3, 1e3, mpi_s_per_byte=0.5)
N_BYTES = st.floats(0, 1e9)
N_RANKS = st.integers(1, 1024)
ALGORITHMS = ("direct", "recursive", "mpi")


def every_cost(n_bytes: float, n_ranks: int, machine: Machine) -> list[float]:
    # A batch of all ranks together: what is gathered does not shrink with the ranks.
    scenario = dense_scenario((64, max(1, int(n_bytes // 4096))), 4 * 1024, n_ranks, machine)
    sharded, partial, replicated = (message_bytes(scenario, 0, kind) for kind in KINDS[1:])
    # The engine sends short vectors whole, and relays, by constants of its own, which need not suit
    # the machine.
    n_direct, n_long = min(n_ranks, 8), n_bytes + 32 * 1024
    return [
        costs.transfer_s(n_bytes, n_ranks, machine),
        costs.allreduce_s(n_long, n_direct, machine, "direct"),
        *(costs.allreduce_s(n_bytes, n_ranks, machine, a) for a in ALGORITHMS[1:]),
        *map(scenario.transfer_s, (*sharded, *replicated, *partial[1:])),
    ]


def dense_scenario(dense: tuple, batch: int, n_ranks: int, machine: Machine) -> costs.Scenario:
    layer = Layer("dense", (("kernel", dense[0] * dense[1]),), dense=dense)
    return costs.Scenario(LayerTable("dense", (layer,)), machine, n_ranks, batch)


def test_equations_by_hand():
    """alpha 1 s, beta 0.1 s per byte, gamma 0.25 s per byte, 4 ranks, 8 bytes."""
    half = 3 * 1.0 + 8 * 0.75 * 0.1
    assert costs.transfer_s(8, 4, SIMPLE) == pytest.approx(half)  # table 4.1
    # Eq. 4.9, of a vector that is too long to be sent whole.
    direct_s = 2 * (3 * 1.0 + 40000 * 0.75 * 0.1) + 10000
    assert costs.allreduce_s(40000, 4, SIMPLE, "direct") == pytest.approx(direct_s)
    tree, halved = 2 * (1 + 0.8), 4 + 2 * 0.75 * 0.8  # eqs. 4.6 and 4.7
    assert costs.allreduce_s(8, 4, SIMPLE, "mpi") == pytest.approx(min(tree, halved) + 4.0)
    assert costs.allreduce_s(8, 4, SIMPLE, "recursive") == pytest.approx(min(tree, halved) + 1.5)
    scenario = dense_scenario((8, 2), 16, 4, SIMPLE)
    assert scenario.transfer_s(8) == pytest.approx(half)  # eq. 4.9
    assert scenario.sum_s(8) == 2.0
    partial, replicated = (message_bytes(scenario, 0, kind) for kind in ("partial", "replicated"))
    spread, errors, weights = map(scenario.transfer_s, partial)
    assert spread == pytest.approx(3 + 4 * 8 * 16 / 4**2 * 3 * 0.1)  # eq. 4.2
    assert errors == pytest.approx(3 + 4 * 2 * 16 / 4 * 3 * 0.1)  # eq. 4.3
    assert weights == pytest.approx(3 + 4 * 8 * 2 / 4 * 3 * 0.1)  # eq. 4.4
    assert scenario.transfer_s(replicated[0]) == pytest.approx(3 + 512 * 0.75 * 0.1)


def test_averaging_shards_moves_less():
    """[L] eqs. 5 to 8: eight groups of four average all parameters, or a fourth of them each."""
    machine = dataclasses.replace(SIMPLE, latency_s=0.0, reduce_bytes_per_s=1e30)
    for n_bytes in (100, 25):
        found = costs.allreduce_s(n_bytes, 8, machine, "recursive", machine.link(4 * 8))
        assert found == pytest.approx(2 * n_bytes * 7 / 8 * 0.1)


@given(N_BYTES, N_BYTES, N_RANKS, N_RANKS, st.floats(0, 1e-2), machines())
def test_costs_grow_with_bytes_ranks_and_latency(n_bytes, other, n_ranks, m_ranks, more_s, machine):
    slower = dataclasses.replace(machine, latency_s=machine.latency_s + more_s)
    if slower.host_latency_s is not None:
        slower = dataclasses.replace(slower, host_latency_s=slower.host_latency_s + more_s)
    least = every_cost(min(n_bytes, other), min(n_ranks, m_ranks), machine)
    for more in (
        every_cost(max(n_bytes, other), min(n_ranks, m_ranks), machine),
        every_cost(min(n_bytes, other), max(n_ranks, m_ranks), machine),
        every_cost(min(n_bytes, other), min(n_ranks, m_ranks), slower),
    ):
        assert all(x <= y * (1 + 1e-12) for x, y in zip(least, more, strict=True))


def test_ranks_of_a_host_share_its_link():
    """Half of a vector crosses between two hosts, whatever the number of their ranks."""
    inside = {"host_bytes_per_s": 50.0, "host_latency_s": 0.5}
    machine = dataclasses.replace(SIMPLE, ranks_per_host=4, **inside)
    assert machine.link(4) == costs.Link(0.5, 50.0)
    assert costs.transfer_s(1000, 8, machine) == pytest.approx(1 * 1.0 + 6 * 0.5 + 500 / 10)


def test_a_gather_of_parameters_is_sent_in_chunks():
    """As in custom_ops/comm/gather.cc: messages of 128 KiB, to each of 15 ranks."""
    machine = dataclasses.replace(SIMPLE, latency_s=40e-6, bytes_per_s=125e6)
    limit = LayerPlan(()).gather_bytes
    vector = 16 * limit
    assert limit == 128 * 1024
    for n_bytes, n_chunks in ((4, 1), (vector, 1), (vector + 1, 2), (5 * vector, 5)):
        sent_s = n_chunks * 15 * 40e-6 + n_bytes * 15 / 16 / 125e6
        assert costs.transfer_s(n_bytes, 16, machine, limit) == pytest.approx(sent_s)
    # A distance counts once, and on one host nothing is cut.
    for changed in ({"latency_s": 50e-3}, {"ranks_per_host": 16}):
        other = dataclasses.replace(machine, **changed)
        found = costs.transfer_s(5 * vector, 16, other, limit)
        assert found == costs.transfer_s(5 * vector, 16, other)


@pytest.mark.parametrize(
    ("per_host", "n_ranks", "between", "inside"),
    [(1, 16, 15, 0), (4, 4, 0, 3), (4, 16, 3, 12), (4, 32, 7, 24), (3, 7, 2, 4), (16, 9, 0, 8)],
)
def test_a_rank_sends_one_message_to_each_other_host(per_host, n_ranks, between, inside):
    machine = dataclasses.replace(SIMPLE, ranks_per_host=per_host, host_latency_s=0.25)
    assert machine.messages_s(n_ranks) == pytest.approx(between * 1.0 + inside * 0.25)
    # As between hosts, where the machine does not say.
    alike = dataclasses.replace(machine, host_latency_s=None)
    assert alike.messages_s(n_ranks) == pytest.approx(n_ranks - 1)
    # An allreduce is two rounds of them, and the latency of a host counts in both.
    slower = dataclasses.replace(machine, latency_s=3.0)
    fast_s, slow_s = (costs.allreduce_s(1e9, n_ranks, m, "direct") for m in (machine, slower))
    assert slow_s - fast_s == pytest.approx(2 * between * 2.0)


def test_allreduces_that_are_relayed_by_hand():
    """16 ranks, to the base 4: each of 2 digits is zero for 4 of the 16 blocks."""
    assert costs.relayed(1024, 16, 16) == (4, 15 * 1024, 16 * 1024)
    assert costs.relayed(65536, 16, 16) == (2 * 3 + 4, (2 * 12 + 15) * 4096, 65536)
    assert costs.relayed(65537, 16, 16) == (10, 39 * 4100, 16 * 4100)  # whole values
    assert costs.relayed(65536, 1024, 1024) == (5 * 3 + 10, (5 * 768 + 1023) * 64, 65536)
    # Digits other than zero of 0 to 16: 12 in the first place, 12 in the second, 1 in the third.
    assert costs.relayed(65536, 17, 17)[:2] == (3 + 3 + 1 + 5, (25 + 16) * 3856)
    assert costs.relayed(262144, 16, 16) is None  # few bytes rather than few messages
    # Up to 8 ranks send each other whole vectors of up to 32 KiB together.
    assert costs.relayed(8192, 4, 2) == (3, 3 * 8192, 4 * 8192)
    assert costs.relayed(8193, 4, 2) is None
    assert costs.relayed(1024, 8, 8) == (7, 7 * 1024, 8 * 1024)
    assert costs.relayed(4096, 16, 4) == (4, 15 * 4096, 16 * 4096)
    assert costs.relayed(4100, 16, 4) is None  # ranks of a host combine first
    assert costs.allreduce_s(65536, 16, SIMPLE, "direct") == pytest.approx(
        10 * 1.0 + 39 * 4096 / 10 + 65536 / 4
    )
    # Four ranks on two hosts: two messages pass the link, one stays on the host.
    inside = dataclasses.replace(SIMPLE, ranks_per_host=2, host_latency_s=0.1, host_bytes_per_s=1e6)
    assert costs.allreduce_s(40, 4, inside, "direct") == pytest.approx(
        2 * 1.0 + 0.1 + 3 * 40 * 2 / 10 + 4 * 40 / 4
    )
    # The vectors of 16 ranks pass a link of 4 of them.
    shared = dataclasses.replace(SIMPLE, ranks_per_host=4, host_bytes_per_s=1e6)
    assert costs.allreduce_s(4096, 16, shared, "direct") == pytest.approx(
        4 * 1.0 + 15 * 4096 * 4 / 10 + 16 * 4096 / 4
    )


@given(st.integers(0, 10**8), st.integers(9, 1024))
def test_relaying_pays_on_the_links_that_it_is_made_for(n_bytes, n_ranks):
    machine = dataclasses.replace(SIMPLE, latency_s=40e-6, bytes_per_s=125e6)
    machine = dataclasses.replace(machine, reduce_bytes_per_s=1e30)
    found = costs.allreduce_s(n_bytes, n_ranks, machine, "direct")
    # The last segment may be shorter than the others.
    most = 2 * costs.transfer_s(n_bytes + 4 * n_ranks, n_ranks, machine)
    assert found <= most * (1 + 1e-9)


def test_a_machine_survives_its_file_and_what_is_none_is_refused(tmp_path):
    times = {"model": LayerTimes(4, {"a": 1.0}, {"a": 2.0}, 0.1)}
    machine = dataclasses.replace(SIMPLE, layer_times=times, spread={"latency_s": 0.2})
    path = tmp_path / "made" / "below" / "machine.json"
    machine.save(path)
    assert find_machine(str(path)) == machine
    assert find_machine("cori-haswell") is PRESETS["cori-haswell"]

    for content in ("{}", "[]", "no json", '{"name": 1, "speed": 2}'):
        path.write_text(content)
        with pytest.raises(PlanError, match="machine must be one of cori-haswell"):
            find_machine(str(path))
    with pytest.raises(PlanError, match="tfscale tune links"):
        find_machine(str(tmp_path / "missing"))
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(PlanError, match="bytes_per_s"):
            dataclasses.replace(SIMPLE, bytes_per_s=value)


def test_published_models_have_their_size():
    table = published("vgg-a")
    assert table.n_values / 1e6 == pytest.approx(132.86, abs=0.01) and len(table.parameters) == 22
    for width, millions in {128: 48, 256: 76, 512: 140}.items():  # [T] 3.4
        assert round(published(f"vgg-{width}").n_values / 1e6) == millions
