"""The ranks' program of `tfscale tune links`: measure links, and a model's layers on them.

Usage: python -m tfscale.tune.links SETTINGS, the options of the command in JSON. Messages
and sums are measured through the backend, beside matrix products and memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.comm import collectives, objects, runtime
from tfscale.comm.runtime import ProcessSet, own_process_set
from tfscale.config import ConfigError, ExchangeError, read_input_shape
from tfscale.exchange.auto import per_layer
from tfscale.measure import layer_times
from tfscale.measure.model_layers import find_model, inputs_of, read_layers
from tfscale.plan.buckets import BYTES_PER_VALUE
from tfscale.plan.costs import share
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine
from tfscale.trace import events

SIZES = tuple(4**n for n in range(6, 13))  # 4 KiB to 16 MiB
ROUNDS = 7
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
    segment, whole = tf.ones([n_values // size]), tf.ones([n_values])
    calls: dict[str, Callable[[], Any]] = {
        "allgather": lambda: collectives.allgather(segment, process_set=members),
        "allreduce": lambda: collectives.allreduce(whole, process_set=members),
    }
    return {name: tf.function(call, autograph=False) for name, call in calls.items()}


def measure_links(members: ProcessSet) -> list[Round]:
    """Return latency, bandwidth and speed of sums, one entry per round. Collective."""
    size = members.size()
    runs = {n: _collectives(n, members) for n in SIZES}
    rounds = []
    for number in range(-1, ROUNDS):  # the first one warms up
        times_by_collective: dict[str, list[float]] = {"allgather": [], "allreduce": []}
        for own in runs.values():
            for name, run in own.items():
                times_by_collective[name].append(layer_times.collective_s(run, members))
        if number >= 0:
            rounds.append(
                link_of(size, times_by_collective["allgather"], times_by_collective["allreduce"])
            )
    return rounds


def measure_inside() -> list[Round]:
    """Return `measure_links` within the first host, on all ranks. Collective."""
    # Hosts have equally many ranks, with consecutive numbers.
    local = runtime.local_size()
    rounds: list[Round] = []
    for first in range(0, runtime.size(), local):
        members = own_process_set(list(range(first, first + local)))
        if first <= runtime.rank() < first + local:
            rounds = measure_links(members)
        collectives.barrier()
    return objects.allgather_object(rounds)[0]


def link_of(size: int, gathers: Sequence[float], sums: Sequence[float]) -> Round:
    """Solve [T] table 4.1 for alpha and beta; an allreduce's remaining time is that of sums."""
    base_s, slope = fit_line(SIZES, gathers, is_relative=True)
    rest = [
        (total - 2 * gather) / n
        for n, gather, total in zip(SIZES[-3:], gathers[-3:], sums[-3:], strict=True)
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
    update, n_bytes = layer_times.memory_run()
    rounds = []
    for number in range(-1, ROUNDS):
        times = [layer_times.middle_s(partial(product, x)) for x in batches]
        memory_s = layer_times.middle_s(update)
        slowest = np.max(objects.allgather_object([*times, memory_s]), axis=0)
        base_s, slope = fit_line(_BATCHES, slowest[:-1])
        if number >= 0:
            rounds.append(
                {
                    "flops_per_s": 2.0 * _WIDTH**2 / slope,
                    "half_batch": base_s / slope,
                    "memory_bytes_per_s": n_bytes / slowest[-1],
                }
            )
    return rounds


def machine_from(
    links: Sequence[Round], inside: Sequence[Round], compute: Sequence[Round]
) -> Machine:
    """Return a machine with the medians of measurements, and their spread over the rounds.

    `inside` is empty with one host, or one rank per host.
    """
    samples = {
        name: [rounds_of[name] for rounds_of in rounds]
        for rounds in (links, compute)
        for name in rounds[0]
    }
    middle: dict[str, Any] = {
        name: statistics.median(rounds_of) for name, rounds_of in samples.items()
    }
    spread = {name: spread_of(rounds_of) for name, rounds_of in samples.items()}
    # The time of sums is a difference of two times, so the spread of the allreduce is used for it.
    spread["reduce_bytes_per_s"] = spread.pop("allreduce_s")
    del middle["allreduce_s"], spread["half_batch"]
    local, size = runtime.local_size(), runtime.size()
    n_hosts = size // local
    if rounds_of := links if local == size else inside:
        middle["host_latency_s"] = statistics.median(r["latency_s"] for r in rounds_of)
        middle["host_bytes_per_s"] = statistics.median(r["bytes_per_s"] for r in rounds_of)
    if n_hosts > 1:  # see Machine.link and Machine.messages_s
        middle["bytes_per_s"] *= share(n_hosts) / share(size)
        inside_s = (size - n_hosts) * middle.get("host_latency_s", 0.0)
        between_s = ((size - 1) * middle["latency_s"] - inside_s) / (n_hosts - 1)
        middle["latency_s"] = max(between_s, middle["latency_s"])
    return Machine(
        name="measured",
        **middle,
        ranks_per_host=local,
        spread=spread,
        note=f"tfscale tune links with {size} ranks, {local} of them on a host",
    )


# A model's layers


def measure_model(machine: Machine, options: argparse.Namespace, model: keras.Model) -> Machine:
    """Return the machine with measured times of a model's layers. Collective."""
    shape, size = read_input_shape(options.input_shape), runtime.size()
    table = read_layers(model, shape)
    random = np.random.default_rng(runtime.rank())

    def batch_of(spec: tf.TensorSpec) -> np.ndarray:
        values = random.random((options.batch, *spec.shape[1:]))
        return values.astype(spec.dtype.as_numpy_dtype)

    x = keras.tree.map_structure(batch_of, inputs_of(model, shape))
    y = keras.tree.map_structure(lambda t: np.zeros(t.shape, np.float32), model(x))
    alone, _ = _time_layers(model, table, (x, y), overlap=False)
    together, spread_s = _time_layers(model, table, (x, y), overlap=True)
    measurement = layer_times.separate(alone, together)
    improved = replace(
        machine, compute_share=measurement.compute_share, message_share=measurement.message_share
    )
    calibrated_machine = layer_times.measured_scenario(
        table, measurement, size * options.batch, improved
    ).machine
    return replace(calibrated_machine, spread={**machine.spread, f"step of {table.name}": spread_s})


def _time_layers(
    model: keras.Model, table: LayerTable, data: Any, overlap: bool
) -> tuple[layer_times.LayerMeasurement, float]:
    """Return the median of three measurements with one exchange per layer, and their spread."""
    exchange = per_layer(table, overlap)
    sgd = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-6, 0.9), exchange=exchange)
    model.compile(sgd, loss="mse")
    tfscale.prepare(model)
    owners = [name.rpartition("/")[0] for layer in table.layers for name, _ in layer.weights]
    measurements = []
    for _ in range(3):
        timing = layer_times.time_layers(list(dict.fromkeys(owners)))
        while True:
            model.train_on_batch(*data)
            try:
                next(timing)
            except StopIteration as over:
                measurements.append(over.value)
                break
        if measurements[-1] is None:
            raise ConfigError(f"{model.name} must have two layers to exchange. Received: fewer.")
    middle = sorted(measurements, key=lambda one: one.step_s)[len(measurements) // 2]
    return middle, spread_of([one.step_s for one in measurements])


# The command

_SHOWN = (
    ("latency_s", "us per message", 1e6),
    ("bytes_per_s", "MB/s per host", 1e-6),
    ("reduce_bytes_per_s", "MB/s of local sums", 1e-6),
    ("flops_per_s", "GFLOP/s per rank", 1e-9),
    ("memory_bytes_per_s", "MB/s of memory per rank", 1e-6),
)


def describe(machine: Machine) -> str:
    """Return the measured numbers, one per line."""
    lines = []
    for name, unit, factor in _SHOWN:
        spread = 100 * machine.spread.get(name, 0.0)
        lines.append(f"{getattr(machine, name) * factor:12.1f}  {unit} (+- {spread:.0f} %)")
    for name, times in machine.layer_times.items():
        total = sum(times.forward_s.values()) + sum(times.backward_s.values())
        spread = 100 * machine.spread.get(f"step of {name}", 0.0)
        caption = f"ms per step of {name}, {times.batch} samples (+- {spread:.0f} %)"
        lines.append(f"{1e3 * total:12.1f}  {caption}")
    return "\n".join([*lines, ""])


def too_noisy(machine: Machine, max_spread: float) -> list[str]:
    """Return the names of measured numbers whose relative spread is above `max_spread`."""
    return [name for name, spread in machine.spread.items() if spread > max_spread]


def main(options: argparse.Namespace) -> int:
    """Measure; rank 0 writes the file, unless the numbers are too noisy. Collective."""
    tfscale.init()
    size = runtime.size()
    if not events.has_events() or size < 2:
        raise ExchangeError(
            "backend must be the engine, with two ranks or more. Received: "
            f"backend={runtime.backend().name} with {size}. Start it with tfscale tune links -np "
            "2."
        )
    local_ranks = objects.allgather_object(runtime.local_rank(), name="local ranks")
    local = size // local_ranks.count(0)
    if local_ranks != [rank % local for rank in range(size)]:
        raise ExchangeError(
            "-np and -H must give hosts equally many ranks, started host by host. Received: "
            f"local ranks {local_ranks}, in rank order. Choose -np and -H so that they are."
        )
    model = None
    if options.model or options.model_file:  # before the measurements, which take minutes
        model = find_model(options.model, options.model_file)
        inputs_of(model, read_input_shape(options.input_shape))
    between = measure_links(tfscale.global_process_set)
    inside = measure_inside() if 1 < local < size else []
    machine = machine_from(between, inside, measure_compute())
    if model is not None:
        machine = measure_model(machine, options, model)
    noisy = too_noisy(machine, options.max_spread)
    if runtime.rank() == 0:
        sys.stdout.write(describe(machine))
        if noisy:
            sys.stderr.write(
                f"tfscale: not written: {', '.join(noisy)} spread by more than "
                f"{100 * options.max_spread:.0f} %. Measure on an idle machine, or raise "
                "--max-spread.\n"
            )
        else:
            machine.save(options.output)
            sys.stdout.write(f"Written to {options.output}.\n")
    tfscale.shutdown()
    return 1 if noisy else 0


if __name__ == "__main__":
    sys.exit(main(argparse.Namespace(**json.loads(sys.argv[1]))))
