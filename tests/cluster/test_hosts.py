"""Two hosts of several ranks: each link moves what hosts owe each other, whatever their ranks.

The ranks run this file too: python -m tests.cluster.test_hosts RESULT.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tfscale
from tests.helpers.emulated_cluster import link_bytes, run_on_cluster

pytestmark = pytest.mark.timeout(0)  # the run has a limit of its own
VALUES, CALLS = 3 << 19, 5  # of float32 in a whole vector


def vectors_sent(ranks):
    """Return the vectors that each host sends per collective; rank 1 is the broadcast's root."""
    first, second = (n / sum(ranks) for n in ranks)
    return {
        "allreduce": [1.0, 1.0],
        "reducescatter": [second, first],
        "allgather": [first, second],
        "broadcast": [1.0, 0.0],
        "alltoall": [first * ranks[1], second * ranks[0]],
    }


@pytest.mark.parametrize("ranks", [(2, 2), (4, 4), (2, 1)], ids=["2x2", "2x4", "2+1"])
def test_a_host_sends_each_byte_once(ranks, tmp_path):
    measured = run_on_cluster("tests.cluster.test_hosts", len(ranks), sum(ranks), tmp_path)
    slack = 4 * VALUES * 0.03  # headers, and answers to what was received
    for name, vectors in vectors_sent(ranks).items():
        expected = [4 * VALUES * n for n in vectors]
        assert measured[name] == pytest.approx(expected, rel=0.03, abs=slack), name


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
        before = link_bytes()
        for _ in range(CALLS):
            call()
        tfscale.barrier()
        sent = (link_bytes() - before)[0] / CALLS
        every = tfscale.allgather_object((tfscale.local_rank(), sent))
        found[name] = [moved for local, moved in every if local == 0]
        tfscale.barrier()
    if tfscale.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    tfscale.shutdown()


if __name__ == "__main__":
    main()
