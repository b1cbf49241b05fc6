"""Two hosts of two ranks: each link moves what hosts owe each other, whatever their ranks.

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
HOSTS, SIZE = 2, 4
VALUES, CALLS = 1 << 21, 5  # of float32 in a whole vector
# Vectors that each host sends; rank 1 is the root of the broadcast.
SENT = {
    "allreduce": [1.0, 1.0],
    "reducescatter": [0.5, 0.5],
    "allgather": [0.5, 0.5],
    "broadcast": [1.0, 0.0],
    "alltoall": [1.0, 1.0],  # half of the vector of each of two ranks
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return run_on_cluster("tests.cluster.test_hosts", HOSTS, SIZE, tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize("name", SENT)
def test_a_host_sends_each_byte_once(measured, name):
    expected = [4 * VALUES * vectors for vectors in SENT[name]]
    slack = 4 * VALUES * 0.06  # headers, and answers to what was received
    assert measured[name]["bytes"] == pytest.approx(expected, rel=0.06, abs=slack)


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
        found[name] = {
            "bytes": tfscale.allgather_object(sent)[:: tfscale.local_size()],
            "seconds": statistics.median(times),
        }
        tfscale.barrier()
    if tfscale.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    tfscale.shutdown()


if __name__ == "__main__":
    main()
