"""How fast ranks compute when all of them do: memory, and weight gradients of dense layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import objects
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.specs import BYTES_PER_VALUE

_REPEATS = 5
_LARGE = 2**22  # values that are read and written
_MOST_LAYERS = 8  # largest dense layers that are measured; the planner tries no others one by one
_MOST_VALUES = 1 << 24  # of activations and errors; what more would take is extrapolated
_LEAST_VALUES = 2**14  # smaller kernels cost next to nothing however they travel


def middle_s(run: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Return the median duration of some calls: where ranks share cores, that is what they get."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def memory_run() -> tuple[Callable[[], Any], int]:
    """Return what reads and writes memory as updates do, and the bytes that it moves."""
    large = tf.Variable(tf.ones([_LARGE]))
    return tf.function(lambda: large.assign(large * 0.5 + 1.0)), 4 * _LARGE * BYTES_PER_VALUE


def measure_memory() -> float:
    """Return bytes per second of updates, of the slowest rank. Collective."""
    run, n_bytes = memory_run()
    run()
    objects.allgather_object(None, name="all ranks begin")
    return n_bytes / max(objects.allgather_object(middle_s(run), name="speed of memory"))


def measure_gradients(
    table: LayerTable, n_ranks: int, global_batch: int
) -> dict[str, tuple[float, ...]]:
    """Return how long weight gradients of dense layers take. Collective.

    Args:
        table: The model.
        n_ranks: That take part.
        global_batch: Samples of all ranks together.

    Returns:
        By name of the layer: rows of the whole batch, and seconds of the gradient from this rank's
        rows, from all rows, and of 1 / n_ranks of it from all rows; the slowest rank's.
    """
    layers = [x for x in table.layers if x.dense and x.n_values >= _LEAST_VALUES]
    layers = sorted(layers, key=lambda layer: -layer.n_values)[:_MOST_LAYERS]
    found = {}
    for layer in layers:
        rows = global_batch * layer.rows
        timed = min(rows, max(n_ranks, _MOST_VALUES // sum(layer.dense or (1, 0))))
        objects.allgather_object(None, name="all ranks begin")
        own = _gradient_times(layer, timed, n_ranks)
        every = objects.allgather_object(own, name="times of gradients")
        slowest = np.max(every, axis=0) * rows / timed
        found[layer.name] = (float(rows), *map(float, slowest))
    return found


def _gradient_times(layer: Layer, rows: int, n_ranks: int) -> list[float]:
    n_in, n_out = layer.dense or (0, 0)
    ways = [(-(-rows // n_ranks), n_in), (rows, n_in), (rows, -(-n_in // n_ranks))]
    times = []
    for n_rows, width in ways:
        inputs, errors = tf.ones([n_rows, width]), tf.ones([n_rows, n_out])
        run = partial(tf.matmul, inputs, errors, transpose_a=True)
        run()
        times.append(middle_s(run, 3))
    return times
