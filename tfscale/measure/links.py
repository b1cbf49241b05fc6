"""Measure a machine: messages and sums through the backend, matrix products and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import collectives, objects, runtime
from tfscale.comm.runtime import ProcessSet, own_process_set
from tfscale.measure.layer_times import collective_s, memory_run, middle_s
from tfscale.plan.buckets import BYTES_PER_VALUE
from tfscale.plan.costs import share
from tfscale.plan.machines import Machine

_SIZES = tuple(4**n for n in range(6, 13))  # 4 KiB to 16 MiB
_ROUNDS = 7
_FREE_S = 1e-13  # per byte: sums that fully overlap with messages
_WIDTH = 2048  # of the matrix that stands for a layer
_BATCHES = (1, 2, 4, 8, 16, 32, 64)

Round = dict[str, float]


def spread_of(values: Sequence[float]) -> float:
    """Return half of the middle half's width over the median."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle else 0.0


def _collectives(n_bytes: int, members: ProcessSet) -> dict[str, Callable[[], Any]]:
    """Return an allgather with a result of `n_bytes`, and an allreduce of as many bytes."""
    n_values, size = n_bytes // BYTES_PER_VALUE, members.size()
    own, whole = tf.ones([n_values // size]), tf.ones([n_values])
    calls: dict[str, Callable[[], Any]] = {
        "allgather": lambda: collectives.allgather(own, process_set=members),
        "allreduce": lambda: collectives.allreduce(whole, process_set=members),
    }
    return {name: tf.function(call, autograph=False) for name, call in calls.items()}


def measure_links(members: ProcessSet) -> list[Round]:
    """Return latency, bandwidth and speed of sums, one entry per round. Collective."""
    size = members.size()
    runs = {n: _collectives(n, members) for n in _SIZES}
    rounds = []
    for number in range(-1, _ROUNDS):  # the first one warms up
        found: dict[str, list[float]] = {"allgather": [], "allreduce": []}
        for own in runs.values():
            for name, run in own.items():
                found[name].append(collective_s(run, members))
        if number >= 0:
            rounds.append(_link_of(size, found["allgather"], found["allreduce"]))
    return rounds


def measure_inside() -> list[Round]:
    """Return `measure_links` within the first host, on all ranks. Collective."""
    # Hosts have equally many ranks, with consecutive numbers.
    local = runtime.local_size()
    own: list[Round] = []
    for first in range(0, runtime.size(), local):
        members = own_process_set(list(range(first, first + local)))
        if first <= runtime.rank() < first + local:
            own = measure_links(members)
        collectives.barrier()
    return objects.allgather_object(own)[0]


def _link_of(size: int, gathers: Sequence[float], sums: Sequence[float]) -> Round:
    """Solve [T] table 4.1 for alpha and beta; an allreduce's remaining time is that of sums."""
    base_s, slope = fit_line(_SIZES, gathers, is_relative=True)
    rest = [
        (total - 2 * gather) / n
        for n, gather, total in zip(_SIZES[-3:], gathers[-3:], sums[-3:], strict=True)
    ]
    return {
        "latency_s": base_s / (size - 1),
        "bytes_per_s": share(size) / slope,
        "reduce_bytes_per_s": 1 / max(statistics.median(rest), _FREE_S),
        "allreduce_s": sums[-1],
    }


def fit_line(
    n_bytes: Sequence[float], seconds: Sequence[float], is_relative: bool = False
) -> tuple[float, float]:
    """Fit a line to durations by least squares; return (seconds of 0 bytes, seconds per byte).

    The first is 0 or more, the second above 0: if the fitted line falls, it is replaced by the
    largest rate. With `is_relative` short durations count as much as long ones.
    """
    sizes, durations = np.asarray(n_bytes, float), np.asarray(seconds, float)
    if len(set(sizes)) > 1:
        weights = 1 / durations if is_relative else None
        slope, base = np.polyfit(sizes, durations, 1, w=weights)
        if slope > 0:
            return max(float(base), 0.0), float(slope)
    fastest = float(np.max(sizes / np.maximum(durations, 1e-9)))
    return 0.0, 1.0 / max(fastest, 1.0)


def measure_compute() -> list[Round]:
    """Return the slowest rank's speed of matrix products and of memory per round. Collective."""
    matrix = tf.random.stateless_normal([_WIDTH, _WIDTH], seed=(1, 2))
    batches = [tf.ones([batch, _WIDTH]) for batch in _BATCHES]
    product = tf.function(lambda x: tf.matmul(x, matrix))
    update, n_bytes = memory_run()
    rounds = []
    for number in range(-1, _ROUNDS):
        times = [middle_s(partial(product, x)) for x in batches]
        memory_s = middle_s(update)
        every = np.max(objects.allgather_object([*times, memory_s]), axis=0)
        base_s, slope = fit_line(_BATCHES, every[:-1])
        if number >= 0:
            rounds.append(
                {
                    "flops_per_s": 2.0 * _WIDTH**2 / slope,
                    "half_batch": base_s / slope,
                    "memory_bytes_per_s": n_bytes / every[-1],
                }
            )
    return rounds


def machine_from(
    links: Sequence[Round], inside: Sequence[Round], compute: Sequence[Round]
) -> Machine:
    """Return a machine with the medians of measurements, and their spread over the rounds.

    `inside` is empty with one host, or one rank per host.
    """
    found = {
        name: [own[name] for own in rounds] for rounds in (links, compute) for name in rounds[0]
    }
    middle: dict[str, Any] = {name: statistics.median(own) for name, own in found.items()}
    spread = {name: spread_of(own) for name, own in found.items()}
    # The time of sums is a difference of two times, so the spread of the allreduce is used for it.
    spread["reduce_bytes_per_s"] = spread.pop("allreduce_s")
    del middle["allreduce_s"], spread["half_batch"]
    local = runtime.local_size()
    middle["bytes_per_s"] *= local  # the ranks of a host, which sent at the same time, share it
    if own := links if local == runtime.size() else inside:
        middle["host_latency_s"] = statistics.median(r["latency_s"] for r in own)
        middle["host_bytes_per_s"] = statistics.median(r["bytes_per_s"] for r in own)
    return Machine(
        name="measured",
        **middle,
        ranks_per_host=local,
        spread=spread,
        note=f"tfscale tune links with {runtime.size()} ranks, {local} of them on a host",
    )
