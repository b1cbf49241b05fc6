"""What a rank's link moves per training step, by exchange; run on every node of a cluster.

Usage: python -m tests.cluster.training_bytes RESULT. Rank 0 writes JSON: per exchange the bytes
that each rank sent and received in a step, and the number of collectives of rank 0.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import tfscale
from tfscale.comm import runtime

WIDTHS = (1024, 1024, 1024, 512, 256)  # inputs and outputs of the layers
BATCH, WARM_UP, STEPS = 64, 2, 4


def exchanges():
    """Return what is measured, by name; groups of two ranks each."""
    sharded, whole = tfscale.Sharded(dense="weights"), tfscale.Allreduce()
    return {
        "chunked": tfscale.Chunked(first_chunk_layers=1, replicated_dense=2),
        "sharded": sharded,
        "sharded partial": tfscale.Sharded(dense="partial"),
        "groups, sharded": tfscale.LocalSGD(2, 1000, sharded),
        "groups, sharded, averaged": tfscale.LocalSGD(2, 1, sharded),
        "groups, allreduce": tfscale.LocalSGD(2, 1000, whole),
        "groups, allreduce, averaged": tfscale.LocalSGD(2, 1, whole),
    }


def link_bytes() -> np.ndarray:
    """Return the bytes that this node's link has sent and received so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return np.array([int(fields[8]), int(fields[0])])


def measure(strategy) -> dict[str, object]:
    """Train for some steps; return bytes per step of each rank, and collectives per step."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(units, activation="relu") for units in WIDTHS[1:]]
    model = keras.Sequential([keras.Input((WIDTHS[0],)), *layers])
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-3), exchange=strategy)
    model.compile(optimizer, loss="mse")
    tfscale.prepare(model)
    n = BATCH // tfscale.size()
    x, y = np.ones((n, WIDTHS[0]), "float32"), np.ones((n, WIDTHS[-1]), "float32")
    for _ in range(WARM_UP):
        model.train_on_batch(x, y)
    model.get_weights()  # waits for what is under way
    tfscale.barrier()
    runtime.backend().take_events()
    before = link_bytes()
    for _ in range(STEPS):
        model.train_on_batch(x, y)
    model.get_weights()
    tfscale.barrier()
    moved = (link_bytes() - before) / STEPS
    events = [e for e in runtime.backend().take_events() if e.plan >= 0 and e.slot >= 0]
    every = [[float(b) for b in rank] for rank in tfscale.allgather_object(moved)]
    return {"bytes": every, "collectives": len(events) / STEPS}


def main() -> None:
    """Measure all, and write."""
    tfscale.init()
    found = {name: measure(strategy) for name, strategy in exchanges().items()}
    if tfscale.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    tfscale.shutdown()


if __name__ == "__main__":
    main()
