"""How the planner takes an allreduce to be sent is how the engine sends it."""

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfscale.comm.backends import engine
from tfscale.plan import costs
from tfscale.plan.buckets import BYTES_PER_VALUE


class Way(ctypes.Structure):
    """`Way` in custom_ops/comm/arguments.h."""

    _fields_ = (("is_whole", ctypes.c_bool), ("radix", ctypes.c_size_t))


class Load(ctypes.Structure):
    """`Relay::Load` in custom_ops/comm/relay.h."""

    _fields_ = (("n_messages", ctypes.c_size_t), ("n_blocks", ctypes.c_size_t))


@pytest.fixture(scope="module")
def functions():
    """Functions of the engine, which are no part of its C interface."""
    engine.load()
    library = ctypes.CDLL("libtfscale_engine.so")  # that is loaded
    found = {}
    for name, symbol, result in (
        ("best_way", "_ZN7tfscale7BestWayEmmm", Way),
        ("gather", "_ZN7tfscale5Relay10GatherLoadEmm", Load),
        ("alltoall", "_ZN7tfscale5Relay12AlltoallLoadEmm", Load),
    ):
        found[name] = getattr(library, symbol)
        found[name].restype = result
        found[name].argtypes = [ctypes.c_size_t] * (3 if result is Way else 2)
    return found


def sent_by_engine(functions, n_bytes, n_ranks, n_hosts):
    way = functions["best_way"](n_ranks, n_hosts, n_bytes)
    if way.radix == 0:
        return None
    gather = functions["gather"](n_ranks, way.radix if way.is_whole else 2)
    if way.is_whole:
        return gather.n_messages, gather.n_blocks * n_bytes, n_ranks * n_bytes
    block = -(-n_bytes // BYTES_PER_VALUE // n_ranks) * BYTES_PER_VALUE
    alltoall = functions["alltoall"](n_ranks, way.radix)
    n_blocks = alltoall.n_blocks + gather.n_blocks
    return alltoall.n_messages + gather.n_messages, n_blocks * block, n_ranks * block


@st.composite
def cases(draw):
    """Bytes, ranks and hosts; small numbers are as likely as large ones."""
    n_ranks = draw(st.one_of(st.integers(1, 20), st.integers(1, 1024)))
    n_hosts = draw(st.one_of(st.just(n_ranks), st.integers(1, n_ranks)))
    n_values = 2 ** draw(st.integers(0, 20)) + draw(st.integers(-3, 100_000))
    return BYTES_PER_VALUE * max(0, n_values), n_ranks, n_hosts


@given(cases())
def test_the_planner_chooses_as_the_engine(functions, case):
    assert costs.relayed(*case) == sent_by_engine(functions, *case)


def test_the_planner_chooses_as_the_engine_near_every_change(functions):
    """The choice changes at few sizes, which random ones miss."""
    for n_ranks in (*range(1, 40), 64, 100, 256, 1000):
        for n_hosts in {1, (n_ranks + 1) // 2, n_ranks}:
            n_values = 0
            while n_values < 100_000:
                case = (BYTES_PER_VALUE * n_values, n_ranks, n_hosts)
                assert costs.relayed(*case) == sent_by_engine(functions, *case), case
                n_values += 1 + n_values // 50
