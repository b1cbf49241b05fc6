"""Two nodes with links of 1 Mbit/s, a round trip of 100 ms and losses: averages are in flight long.

The nodes run this file too: python -m tests.cluster.test_slow_links RESULT. Rank 0 writes JSON: the
seconds and bytes of an average of each kind.
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.emulated_cluster import link_bytes, run_on_cluster
from tools.cluster.commands import Shape

pytestmark = pytest.mark.timeout(0)  # the run has a limit of its own
WIDTH = 1000
# Shorter than an average of float32, and longer than any of its messages.
LIMIT_S = 8
SLOW = Shape(1e6, delay_ms=25.0, loss_percent=0.1)


def test_averages_that_take_long_are_no_stall(tmp_path):
    limits = {"TFSCALE_STALL_WARNING_S": "4", "TFSCALE_STALL_SHUTDOWN_S": str(LIMIT_S)}
    # Messages of 64 KB, of which each takes half a second.
    environ = {**limits, "TFSCALE_CHUNK_BYTES": "65536", "TFSCALE_COMPARE_AVERAGES": "1"}
    found = run_on_cluster("tests.cluster.test_slow_links", 2, 2, tmp_path, SLOW, environ)
    assert found["none"]["seconds"] > LIMIT_S
    # One value in 64 and two scales of 4096: of 4 MB, 28 KB are sent.
    sparse = tfscale.Compression.sparse.n_bytes(WIDTH * WIDTH) + 4 * WIDTH
    assert sparse < 0.01 * 4 * WIDTH * WIDTH
    assert found["sparse"]["bytes"] < 1.2 * sparse  # with headers, acknowledgements and the report
    assert found["none"]["bytes"] > 4 * WIDTH * WIDTH


def one_average(compression):
    """Return the seconds and the bytes sent of one average, for which training waits.

    Ranks compare a digest of it, which is shorter than what it gives.
    """
    kernel = keras.Variable(np.full((WIDTH, WIDTH), 0.5, "float32"), name="kernel")
    bias = keras.Variable(np.zeros(WIDTH, "float32"), name="bias")
    local = tfscale.LocalSGD(2, 2, "allreduce", overlap=1)
    optimizer = tfscale.DistributedOptimizer(
        keras.optimizers.SGD(1.0), exchange=local, compression=compression
    )
    optimizer.build([kernel, bias])
    rng = np.random.default_rng(tfscale.rank())
    gradients = [np.float32(rng.normal(size=v.shape)) for v in (kernel, bias)]
    tfscale.barrier()
    before, begun = link_bytes(), time.monotonic()
    for _ in range(3):
        optimizer.apply(list(map(keras.ops.convert_to_tensor, gradients)), [kernel, bias])
    average = optimizer.bound.average
    assert average.variables  # nothing is under way
    result = {"seconds": time.monotonic() - begun, "bytes": int((link_bytes() - before)[0])}
    return result


def main():
    tfscale.init()
    found = {
        "none": one_average(tfscale.Compression.none),
        "sparse": one_average(tfscale.Compression.sparse),
    }
    if tfscale.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    assert os.environ["TFSCALE_STALL_SHUTDOWN_S"] == str(LIMIT_S)


if __name__ == "__main__":
    main()
