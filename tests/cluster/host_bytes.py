"""What the links of hosts with several ranks move per collective; run on every rank of a cluster.

Usage: python -m tests.cluster.host_bytes RESULT [VALUES]. Rank 0 writes JSON: per collective the
bytes that each host sent, and the median of the seconds that a call took.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

import tfscale
from tests.cluster.training_bytes import link_bytes

VALUES = 1 << 21  # float32, of the whole vector
CALLS = 5


def main() -> None:
    tfscale.init()
    n_values = int(sys.argv[2]) if len(sys.argv) > 2 else VALUES
    whole = np.arange(n_values, dtype=np.float32)
    part = whole[: n_values // tfscale.size()]
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
