"""Measure the times of layers, messages and steps, and derive the machine for the planner.

`time_layers` times training steps; `separate`, `measured_machine` and `calibrated` convert its
measurements into the planner's numbers.
"""

from __future__ import annotations

import dataclasses
import statistics
import timeit
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfscale.comm import collectives, objects, runtime
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import settings
from tfscale.plan.buckets import BYTES_PER_VALUE, owner_of
from tfscale.plan.costs import Scenario, relayed, share
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import LayerTimes, Machine
from tfscale.plan.parts import bucketed
from tfscale.plan.simulate import simulate
from tfscale.trace.events import Listener, clock_ns

_REPEATS = 5
_LARGE = 2**22  # values that are read and written
_MOST_LAYERS = 8  # largest dense layers that are measured; the planner tries only these singly
_MOST_VALUES = 1 << 24  # of activations and output gradients; times of more are extrapolated
_LEAST_VALUES = 2**14  # smaller kernels are cheap in every exchange


# Computing and messages, alone


def middle_s(run: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Return the median duration of some calls in seconds."""
    # With shared cores the minimum would mislead.
    return statistics.median(timeit.repeat(run, number=1, repeat=repeats))


def memory_run() -> tuple[Callable[[], Any], int]:
    """Return a function that reads and writes memory as updates do, and the bytes it moves."""
    large = tf.Variable(tf.ones([_LARGE]))
    return tf.function(lambda: large.assign(large * 0.5 + 1.0)), 4 * _LARGE * BYTES_PER_VALUE


def _measure_memory() -> float:
    """Return bytes per second of updates, of the slowest rank. Collective."""
    run, n_bytes = memory_run()
    run()
    objects.allgather_object(None, name="all ranks begin")
    return n_bytes / max(objects.allgather_object(middle_s(run), name="speed of memory"))


def _measure_gradients(
    table: LayerTable, n_ranks: int, global_batch: int
) -> dict[str, tuple[float, ...]]:
    """Return the slowest rank's `LayerTimes.gradient_s` of the large dense layers. Collective."""
    layers = [x for x in table.layers if x.dense and x.n_values >= _LEAST_VALUES]
    times_by_layer = {}
    for layer in sorted(layers, key=lambda layer: -layer.n_values)[:_MOST_LAYERS]:
        rows = global_batch * layer.rows
        timed = min(rows, max(n_ranks, _MOST_VALUES // sum(layer.dense or (1, 0))))
        objects.allgather_object(None, name="all ranks begin")
        times_here = _gradient_times(layer, timed, n_ranks)
        times_by_rank = objects.allgather_object(times_here, name="times of gradients")
        slowest = np.max(times_by_rank, axis=0) * rows / timed
        times_by_layer[layer.name] = (float(rows), *map(float, slowest))
    return times_by_layer


def _gradient_times(layer: Layer, rows: int, n_ranks: int) -> list[float]:
    n_in, n_out = layer.dense or (0, 0)
    times = []
    for n_rows, width in ((-(-rows // n_ranks), n_in), (rows, n_in), (rows, -(-n_in // n_ranks))):
        inputs, errors = tf.ones([n_rows, width]), tf.ones([n_rows, n_out])
        run = partial(tf.matmul, inputs, errors, transpose_a=True)
        run()
        times.append(middle_s(run, 3))
    return times


def collective_s(run: Callable[[], Any], members: ProcessSet = global_process_set) -> float:
    """Return the median duration of a collective, on the member that waited least. Collective.

    `run` is a traced function: an eager call would first exchange headers.
    """
    listener = Listener()
    for _ in range(_REPEATS):
        run()
    events = listener.take()
    listener.close()
    times_here = [float(e["ended_ns"] - e["started_ns"]) / 1e9 for e in events if e["slot"] >= 0]
    times_by_rank = objects.allgather_object(
        times_here, process_set=members, name="times of messages"
    )
    return statistics.median(map(min, zip(*times_by_rank, strict=True)))


_SHORT, _LONG = 2**10, 2**20  # values
_MOST_OVERLAP = 10.0  # bound on the number of messages that are assumed to overlap


def _ranks_per_host() -> int:
    """Return the number of ranks on each host; 1 if hosts have different numbers. Collective."""
    per_host = min(settings().ranks_per_host or runtime.local_size(), runtime.size())
    by_rank = objects.allgather_object(per_host, name="ranks of a host")
    return per_host if set(by_rank) == {per_host} and runtime.size() % per_host == 0 else 1


def _measure_messages(n_hosts: int) -> tuple[float, float]:
    """Return seconds of the messages of an allreduce, and seconds per byte. Collective.

    A short one takes fewer messages than those of gradients, which go to owners and come back.
    """

    def duration_s(n_values: int) -> float:
        values, name = tf.ones([n_values]), f"speed of messages of {n_values} values"
        run = tf.function(lambda: collectives.allreduce(values, name=name), autograph=False)
        run()
        return collective_s(run)

    short_s, long_s, n_ranks = duration_s(_SHORT), duration_s(_LONG), runtime.size()
    short = relayed(_SHORT * BYTES_PER_VALUE, n_ranks, n_hosts)
    if short is not None:
        short_s *= 2 * (n_ranks - 1) / short.n_messages
    per_byte = (long_s - short_s) / ((_LONG - _SHORT) * BYTES_PER_VALUE)
    return short_s, max(per_byte, long_s / (_LONG * BYTES_PER_VALUE) / _MOST_OVERLAP)


def fitted(
    messages: tuple[float, float], n_messages: int, n_bytes: float, wire_s: float
) -> tuple[float, float]:
    """Return seconds per message and per byte of many messages that take `wire_s` together.

    `messages` are the seconds of a short message alone, and per byte of a long one. Messages
    overlap, so one may cost less than a message sent alone; the remaining time is attributed to
    the bytes.
    """
    short_s, per_byte = messages
    each_s = (wire_s - n_bytes * per_byte) / n_messages
    each_s = min(short_s, max(each_s, short_s / _MOST_OVERLAP), wire_s / (2 * n_messages))
    return each_s, (wire_s - n_messages * each_s) / n_bytes


# Steps that exchange each layer alone

UNMEASURED_STEPS = 3  # tracing, comparing plans, warming up
MEASURED_STEPS = 7


@dataclass(frozen=True)
class LayerMeasurement:
    """Times of steps, equal on all ranks: medians over steps, then of the rank that is named."""

    layers: tuple[str, ...]  # paths of exchanged layers, in the order of the model
    n_bytes: tuple[int, ...]  # of each layer's gradients
    ready_s: tuple[float, ...]  # of each layer's gradients, since the first; of the slowest rank
    message_s: float  # time on the wire of each message, without its bytes
    byte_s: float  # time on the wire per byte of gradients; of the rank that waited least
    before_s: float  # from the begin of a step to the first gradient
    after_s: float  # from the end of the last exchange to the end of the step
    step_s: float
    ranks_per_host: int = 1
    compute_share: float = 1.0  # of `separate`, see `Machine`
    message_share: float = 1.0

    @property
    def wire_s(self) -> float:
        """Time in which the wire was busy in a step."""
        return len(self.layers) * self.message_s + sum(self.n_bytes) * self.byte_s


def time_layers(layers: Sequence[str]) -> Generator[None, None, LayerMeasurement | None]:
    """Measure steps in which each layer's gradients are a separate message. Collective.

    Resumed after each step; returns None if fewer than two layers were exchanged. `layers` are the
    paths of those that own exchanged variables, in the order of the model.
    """
    listener = Listener()
    ends = [clock_ns()]
    while len(ends) < UNMEASURED_STEPS + MEASURED_STEPS:
        yield None
        ends.append(clock_ns())
    ends = ends[UNMEASURED_STEPS - 1 :]
    events = listener.take()
    listener.close()
    places = {path: layer_index for layer_index, path in enumerate(layers)}
    read = (_read_step(events, places, *pair) for pair in pairwise(ends))
    steps = [step for step in read if step.n_bytes]
    seen = sorted(steps[0].n_bytes) if steps else []
    whole = [step for step in steps if sorted(step.n_bytes) == seen]
    ready = [float(np.median([s.ready_s[layer_index] for s in whole])) for layer_index in seen]
    times = [float(np.median(own)) for own in zip(*(s.times_s for s in whole), strict=True)]
    n_bytes = [whole[0].n_bytes[layer_index] for layer_index in seen]
    times_by_rank = objects.allgather_object((seen, ready, times, n_bytes), name="times of layers")
    per_host = _ranks_per_host()
    messages = _measure_messages(runtime.size() // per_host)
    if len(seen) < 2 or any(rank[0] != seen for rank in times_by_rank):
        return None
    n_bytes = times_by_rank[0][3]
    before_s, after_s, step_s = map(float, np.max([rank[2][:3] for rank in times_by_rank], axis=0))
    wire_s = min(rank[2][3] for rank in times_by_rank)
    message_s, byte_s = fitted(messages, len(seen), sum(n_bytes), wire_s)
    return LayerMeasurement(
        tuple(layers[layer_index] for layer_index in seen),
        tuple(n_bytes),
        tuple(map(float, np.max([rank[1] for rank in times_by_rank], axis=0))),
        *(message_s, byte_s, before_s, after_s, step_s),
        ranks_per_host=per_host,
    )


class _Step(NamedTuple):
    """One step's layers by place, and seconds before, after, in all, and on the wire."""

    ready_s: dict[int, float]
    n_bytes: dict[int, int]
    times_s: tuple[float, float, float, float]


def _read_step(events: np.ndarray, places: dict[str, int], begin: float, end: float) -> _Step:
    ready: dict[int, int] = {}
    n_bytes: dict[int, int] = {}
    wire_s = 0.0  # overlapping messages are not counted twice
    busy_until = 0
    posted = events["posted_ns"]
    inside = events[(posted >= begin) & (posted <= end) & (events["slot"] >= 0)]
    for event in np.sort(inside, order="ended_ns"):
        name = runtime.backend().slot_name(int(event["plan"]), int(event["slot"]))
        layer_index = places.get(owner_of(name.split(" .. ")[0]))
        if layer_index is None:
            continue
        began = max(int(event["started_ns"]), busy_until)
        busy_until = int(event["ended_ns"])
        wire_s += (busy_until - began) / 1e9
        ready[layer_index] = max(ready.get(layer_index, 0), int(event["posted_ns"]))
        n_bytes[layer_index] = n_bytes.get(layer_index, 0) + int(event["bytes"])
    first = min(ready.values(), default=0)
    ready_s = {layer_index: (time - first) / 1e9 for layer_index, time in ready.items()}
    times = (first - begin) / 1e9, (end - busy_until) / 1e9, (end - begin) / 1e9, wire_s
    return _Step(ready_s, n_bytes, times)


# The machine with these times

_FREE = 1e15  # a rate that costs nothing


def measured_machine(
    table: LayerTable,
    measurement: LayerMeasurement,
    n_ranks: int,
    batch: int,
    measured: Machine | None,
) -> Machine:
    """Return the machine on which a model's steps take the measured times.

    The forward pass is split by the operations of its layers; back-propagation before the first
    gradient counts as forward pass. Layers without measured parameters take time in the forward
    pass only. `batch` are samples per rank, and `measured` has links that were measured before.
    """
    layer_of = {owner_of(name): layer for layer in table.layers for name, _ in layer.weights}
    byte_s = measurement.byte_s * _bytes_per_planned(measurement, layer_of)
    rate, n_hosts = 2 * share(n_ranks) / byte_s, n_ranks // measurement.ranks_per_host
    machine = measured or Machine(
        name="measured",
        latency_s=measurement.message_s / (2 * (n_ranks - 1)),
        # See `Machine.link`, which takes as long for all ranks.
        bytes_per_s=rate * share(n_hosts) / share(n_ranks) if n_hosts > 1 else rate,
        host_bytes_per_s=rate,
        ranks_per_host=measurement.ranks_per_host,
        reduce_bytes_per_s=_FREE,
        flops_per_s=_FREE,
        memory_bytes_per_s=5 * BYTES_PER_VALUE * table.n_values / max(measurement.after_s, 1e-9),
        compute_share=measurement.compute_share,
        message_share=measurement.message_share,
        note=f"from the first steps of {n_ranks} ranks",
    )
    ready = {
        layer_of[path].name: time_s
        for path, time_s in zip(measurement.layers, measurement.ready_s, strict=True)
        if path in layer_of
    }
    work = {x.name: x.flops + x.values + x.n_values for x in table.layers}
    forward = {name: measurement.before_s * own / sum(work.values()) for name, own in work.items()}
    backward, latest = {}, 0.0
    for layer in reversed(table.layers):
        time_s = max(ready.get(layer.name, latest), latest)
        backward[layer.name] = time_s - latest
        latest = time_s
    times = LayerTimes(batch, forward, backward, n_values=table.n_values)
    return machine.with_times(table.name, times)


def _bytes_per_planned(measurement: LayerMeasurement, layer_of: dict[str, Layer]) -> float:
    """Return the bytes sent per byte that the plan counts; dtype and compression change it.

    An embedding sends only the rows of a batch, so layers with matrix products are preferred: they
    send all their values. Dtype and compression give all of them the same ratio: the median.
    """
    ratios = [
        (layer.flops > 0, n_bytes / (BYTES_PER_VALUE * layer.n_values))
        for path, n_bytes in zip(measurement.layers, measurement.n_bytes, strict=True)
        if (layer := layer_of.get(path)) and layer.n_values
    ]
    whole = [ratio for is_product, ratio in ratios if is_product]
    return float(np.median(whole or [ratio for _, ratio in ratios] or [1.0]))


def calibrated(scenario: Scenario, measurement: LayerMeasurement) -> Scenario:
    """Return a scenario whose simulated steps, exchanged by layer, take the measured time.

    Time that the simulation does not model (data input, ranks that wait for each other, shared
    cores) is added to every step.
    """
    expected_s = simulate(scenario, bucketed(scenario.table, None)).step_s
    times = scenario.machine.layer_times[scenario.table.name]
    rest_s = times.rest_s + max(0.0, measurement.step_s - expected_s)
    times = dataclasses.replace(times, rest_s=rest_s)
    machine = scenario.machine.with_times(scenario.table.name, times)
    return dataclasses.replace(scenario, machine=machine)


def measured_scenario(
    table: LayerTable,
    measurement: LayerMeasurement,
    batch: int | None,
    measured: Machine | None,
    n_slots: int = 1,
) -> Scenario:
    """Return the scenario to plan, with times of updates and of dense layers. Collective.

    `batch` are samples of all ranks together, if known: only then dense layers may exchange
    activations. `measured` has links that were measured before.
    """
    n_ranks = runtime.size()
    samples = batch or n_ranks
    machine = measured_machine(table, measurement, n_ranks, max(1, samples // n_ranks), measured)
    if measured is None:
        machine = dataclasses.replace(machine, memory_bytes_per_s=_measure_memory())
    gradients = _measure_gradients(table, n_ranks, samples) if batch else {}
    times = dataclasses.replace(machine.layer_times[table.name], gradient_s=gradients)
    machine = machine.with_times(table.name, times)
    return calibrated(Scenario(table, machine, n_ranks, samples, n_slots), measurement)


_LEAST_COMPUTE_SHARE = 0.1
_LEAST_MESSAGE_SHARE = 0.2


def separate(alone: LayerMeasurement, together: LayerMeasurement) -> LayerMeasurement:
    """Return `together` with the durations of computing and messages alone, and both shares.

    The steps of `alone` send nothing before all gradients exist: computing and messages do not slow
    each other down. Those of `together` send each layer's gradients as soon as they exist.
    """
    computed = max(together.ready_s)
    wire, wire_alone = together.wire_s, alone.wire_s
    if computed <= 0 or wire <= 0:
        return together
    before_s = min(together.before_s, alone.before_s)
    undisturbed = min(1.0, max((alone.before_s - before_s) / computed, 1e-3))
    is_busy = min(1.0, wire / computed)  # share of back-propagation with pending messages
    compute_share = max(_LEAST_COMPUTE_SHARE, 1 - (1 - undisturbed) / is_busy)
    # Computing slowed messages down during this share of their time only.
    is_shared = min(1.0, computed / wire)
    message_share = 1 - (1 - wire_alone / wire) / is_shared
    message_share = min(1.0, max(_LEAST_MESSAGE_SHARE, message_share))
    # If the share was limited, computing was slower for other reasons than messages.
    undisturbed = 1 - (1 - compute_share) * is_busy
    return dataclasses.replace(
        together,
        before_s=before_s,
        ready_s=tuple(undisturbed * ready for ready in together.ready_s),
        message_s=alone.message_s,
        byte_s=alone.byte_s,
        compute_share=compute_share,
        message_share=message_share,
    )
