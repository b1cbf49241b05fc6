"""The ranks' program of `tfscale tune links`: measure links, and a model's layers on them.

Usage: python -m tfscale.launcher.tune.links SETTINGS, the options of the command in JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.comm import events, objects, runtime
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange.auto import per_layer
from tfscale.launcher.plan import read_input_shape
from tfscale.measure import links
from tfscale.measure.layer_times import (
    LayerMeasurement,
    measured_scenario,
    separate,
    time_layers,
)
from tfscale.measure.model_layers import find_model, inputs_of, read_layers
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine


def main(options: argparse.Namespace) -> int:
    """Measure; rank 0 writes the file, unless the numbers are too noisy. Collective."""
    tfscale.init()
    size, local = runtime.size(), runtime.local_size()
    if not events.has_events() or size < 2:
        raise ExchangeError(
            "Links are measured by the engine between two ranks or more. Received: backend="
            f"{runtime.backend().name} with {size}. Start it with tfscale tune links -np 2."
        )
    every = objects.allgather_object(local, name="ranks of a host")
    if len(set(every)) > 1:
        raise ExchangeError(
            "Links are measured where hosts have equally many ranks. Received: "
            f"{every}, of the host of each rank. Choose -np and -H so that they have."
        )
    model = None
    if options.model or options.model_file:  # before the measurements, which take minutes
        model = find_model(options.model, options.model_file)
        inputs_of(model, read_input_shape(options))
    between = links.measure_links(tfscale.global_process_set)
    inside = links.measure_inside() if 1 < local < size else []
    machine = links.machine_from(between, inside, links.measure_compute())
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


def measure_model(machine: Machine, options: argparse.Namespace, model: keras.Model) -> Machine:
    """Return the machine with measured times of a model's layers. Collective."""
    shape, size = read_input_shape(options), runtime.size()
    table = read_layers(model, shape)
    random = np.random.default_rng(runtime.rank())

    def batch_of(spec: tf.TensorSpec) -> np.ndarray:
        values = random.random((options.batch, *spec.shape[1:]))
        return values.astype(spec.dtype.as_numpy_dtype)

    x = keras.tree.map_structure(batch_of, inputs_of(model, shape))
    y = keras.tree.map_structure(lambda t: np.zeros(t.shape, np.float32), model(x))
    alone, _ = _time_layers(model, table, (x, y), overlap=False)
    together, spread_s = _time_layers(model, table, (x, y), overlap=True)
    found = separate(alone, together)
    known = replace(machine, compute_share=found.compute_share, message_share=found.message_share)
    own = measured_scenario(table, found, size * options.batch, known).machine
    return replace(own, spread={**machine.spread, f"step of {table.name}": spread_s})


def _time_layers(
    model: keras.Model, table: LayerTable, data: Any, overlap: bool
) -> tuple[LayerMeasurement, float]:
    """Return the median of three measurements with one exchange per layer, and their spread."""
    exchange = per_layer(table, overlap)
    sgd = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-6, 0.9), exchange=exchange)
    model.compile(sgd, loss="mse")
    tfscale.prepare(model)
    owners = [name.rpartition("/")[0] for layer in table.layers for name, _ in layer.weights]
    found = []
    for _ in range(3):
        timing = time_layers(list(dict.fromkeys(owners)))
        while True:
            model.train_on_batch(*data)
            try:
                next(timing)
            except StopIteration as over:
                found.append(over.value)
                break
        if found[-1] is None:
            raise ConfigError(f"{model.name} must have two layers to exchange. Received: fewer.")
    middle = sorted(found, key=lambda one: one.step_s)[len(found) // 2]
    return middle, links.spread_of([one.step_s for one in found])


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
        words = f"ms per step of {name}, {times.batch} samples (+- {spread:.0f} %)"
        lines.append(f"{1e3 * total:12.1f}  {words}")
    return "\n".join([*lines, ""])


def too_noisy(machine: Machine, max_spread: float) -> list[str]:
    """Return the names of measured numbers whose relative spread is above `max_spread`."""
    return [name for name, spread in machine.spread.items() if spread > max_spread]


if __name__ == "__main__":
    sys.exit(main(argparse.Namespace(**json.loads(sys.argv[1]))))
