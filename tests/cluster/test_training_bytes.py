"""Four nodes on this machine: links move per training step what the formulas say, within 6 %.

The nodes run this file too: python -m tests.cluster.test_training_bytes RESULT. Rank 0 writes JSON:
per exchange the bytes that each rank sent and received in a step, and its number of collectives.
"""

import itertools
import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.emulated_cluster import link_bytes, run_on_cluster
from tfscale.testing import inspect

pytestmark = pytest.mark.timeout(0)  # the run has a limit of its own
SIZE = 4
GROUPS, MEMBERS = 2, 2
WIDTHS = (1024, 1024, 1024, 512, 256)  # inputs and outputs of the layers
BATCH, WARM_UP, STEPS = 64, 2, 4
LAYERS = list(itertools.pairwise(WIDTHS))
SIZES = [n_in * n_out + n_out for n_in, n_out in LAYERS]  # values of kernel and bias
MODEL = sum(SIZES)


def once(n: int) -> float:
    """Part of a vector that a rank sends where each of n has, or gets, a part of it."""
    return (n - 1) / n


def chunked() -> float:
    """Two replicated layers gather (n_in + n_out) values per sample; the rest is allreduced."""
    gathered = sum(n_in + n_out for n_in, n_out in LAYERS[:2]) * BATCH
    return once(SIZE) * gathered + 2 * once(SIZE) * sum(SIZES[2:])


def partial() -> float:
    """[T] eq. 4.8: activations of a rank's rows, all errors; then parameters are gathered."""
    routed = sum(n_in * BATCH / SIZE + n_out * BATCH for n_in, n_out in LAYERS)
    return once(SIZE) * (routed + MODEL)


IN_GROUP = 2 * once(MEMBERS) * MODEL
VALUES = {
    "chunked": chunked(),
    "sharded": 2 * once(SIZE) * MODEL,
    "sharded partial": partial(),
    "groups, sharded": IN_GROUP,
    "groups, allreduce": IN_GROUP,
}
# What averaging adds: an allreduce over the groups of M / m values where a group shards them, or M.
AVERAGING = {
    "groups, sharded": 2 * once(GROUPS) * MODEL / MEMBERS,
    "groups, allreduce": 2 * once(GROUPS) * MODEL,
}


def test_steps_and_averages_move_what_the_formulas_say(tmp_path):
    measured = run_on_cluster("tests.cluster.test_training_bytes", SIZE, SIZE, tmp_path)
    for name, values in VALUES.items():
        for rank, ways in enumerate(measured[name]["bytes"]):
            assert ways == pytest.approx([4 * values] * 2, rel=0.06), (name, rank)
    for name, values in AVERAGING.items():
        plain, averaged = (measured[n]["bytes"] for n in (name, f"{name}, averaged"))
        added = np.subtract(averaged, plain)  # by rank and way
        np.testing.assert_allclose(added, np.full((SIZE, 2), 4 * values), rtol=0.06, err_msg=name)
    # Two chunks, and two replicated layers.
    assert measured["chunked"]["collectives"] == 2 * 2 + 2


def exchanges():
    """Return the measured exchanges by name; groups have two ranks each."""
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
    inspect.take_collectives()
    before = link_bytes()
    for _ in range(STEPS):
        model.train_on_batch(x, y)
    model.get_weights()
    tfscale.barrier()
    moved = (link_bytes() - before) / STEPS
    events = [e for e in inspect.take_collectives() if e.plan >= 0 and e.slot >= 0]
    every = [[float(b) for b in rank] for rank in tfscale.allgather_object(moved)]
    return {"bytes": every, "collectives": len(events) / STEPS}


def main() -> None:
    tfscale.init()
    found = {name: measure(strategy) for name, strategy in exchanges().items()}
    if tfscale.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    tfscale.shutdown()


if __name__ == "__main__":
    main()
