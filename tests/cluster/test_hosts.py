"""Two hosts of several ranks: each link moves what hosts owe each other, whatever their ranks.

The ranks run this file too: python -m tests.cluster.test_hosts RESULT.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tfscale
from tests.helpers.emulated_cluster import link_bytes, run_on_cluster

pytestmark = pytest.mark.timeout(0)  # the run has a limit of its own
VALUES, CALLS = 3 << 19, 5  # of float32 in a whole vector
COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")


def vectors_sent(name, ranks):
    """Return the vectors that each host sends; rank 1 is the root of the broadcast."""
    first, second = (n / sum(ranks) for n in ranks)
    return {
        "allreduce": [1.0, 1.0],
        "reducescatter": [second, first],
        "allgather": [first, second],
        "broadcast": [1.0, 0.0],
        "alltoall": [first * ranks[1], second * ranks[0]],
    }[name]


@pytest.fixture(scope="module", params=[(2, 2), (4, 4), (2, 1)], ids=["2x2", "2x4", "2+1"])
def ranks(request):
    return request.param


@pytest.fixture(scope="module")
def measured(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    return run_on_cluster("tests.cluster.test_hosts", len(ranks), sum(ranks), folder)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_host_sends_each_byte_once(measured, ranks, name):
    expected = [4 * VALUES * vectors for vectors in vectors_sent(name, ranks)]
    slack = 4 * VALUES * 0.03  # headers, and answers to what was received
    assert measured[name]["bytes"] == pytest.approx(expected, rel=0.03, abs=slack)


def main() -> None:
    tfscale.init()
    whole = np.arange(VALUES, dtype=np.float32)
    part = whole[: VALUES // tfscale.size()]
    collectives = {
        "allreduce": lambda: tfscale.allreduce(whole, op=tfscale.Sum),
        "reducescatter": lambda: tfscale.reducescatter(whole, op=tfscale.Sum),
        "allgather": lambda: tfscale.allgather(part),
        "broadcast": lambda: tfscale.broadcast(whole, root_rank=1),
        "alltoall": lambda: tfscale.alltoall(whole),
    }
    found = {}
    for name, call in collectives.items():
        call()
        tfscale.barrier()
        before, times = link_bytes(), []
        for _ in range(CALLS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        tfscale.barrier()
        sent = (link_bytes() - before)[0] / CALLS
        every = tfscale.allgather_object((tfscale.local_rank(), sent))
        found[name] = {
            "bytes": [moved for local, moved in every if local == 0],
            "seconds": statistics.median(times),
        }
        tfscale.barrier()
    if tfscale.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    tfscale.shutdown()


if __name__ == "__main__":
    main()
