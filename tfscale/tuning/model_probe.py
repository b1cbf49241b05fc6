"""How long the layers of a model take on this machine, alone and beside messages."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale import runtime
from tfscale.errors import ConfigError
from tfscale.exchange.plans import per_layer
from tfscale.forecast.command import read_numbers
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine
from tfscale.plan.times import Scenario
from tfscale.tuning.compute_probe import measure_gradients
from tfscale.tuning.contention import separate
from tfscale.tuning.layer_probe import LayerMeasurement, LayerProbe, calibrated, measured_machine
from tfscale.tuning.links import spread_of
from tfscale.tuning.model_layers import find_model, inputs_of, read_layers


def wanted_model(options: argparse.Namespace) -> keras.Model:
    """Return the model that a command line names.

    Args:
        options: Of the command line: the model and its input shape.

    Raises:
        ConfigError: There is none, or the shape of its inputs is not known.
    """
    model = find_model(options.model, options.model_file)
    inputs_of(model, _shape(options))
    return model


def _shape(options: argparse.Namespace) -> tuple[int, ...] | None:
    return read_numbers(options.input_shape, "--input-shape") if options.input_shape else None


def measure_model(
    machine: Machine, options: argparse.Namespace, model: keras.Model | None = None
) -> Machine:
    """Return a machine that knows how long the layers of a model take. Collective.

    Args:
        machine: Its links are kept.
        options: Of the command line: the model, its input shape and the batch per rank.
        model: Of `wanted_model`; None looks for it.
    """
    shape = _shape(options)
    model = wanted_model(options) if model is None else model
    table, size = read_layers(model, shape), runtime.size()
    random = np.random.default_rng(runtime.rank())

    def batch_of(spec: tf.TensorSpec) -> np.ndarray:
        values = random.random((options.batch, *spec.shape[1:]))
        return values.astype(spec.dtype.as_numpy_dtype)

    x = keras.tree.map_structure(batch_of, inputs_of(model, shape))
    y = keras.tree.map_structure(lambda t: np.zeros(t.shape, np.float32), model(x))
    alone, _ = _probe(model, table, (x, y), overlap=False)
    together, spread_s = _probe(model, table, (x, y), overlap=True)
    found, compute_share, message_share = separate(alone, together)
    own = measured_machine(table, replace(found, after_s=0.0), size, options.batch, machine)
    gradients = measure_gradients(table, size, size * options.batch)
    times = {table.name: replace(own.layer_times[table.name], gradient_s=gradients)}
    own = replace(
        own,
        layer_times={**own.layer_times, **times},
        compute_share=compute_share,
        message_share=message_share,
    )
    own = calibrated(Scenario(table, own, size, size * options.batch), together).machine
    return replace(own, spread={**machine.spread, f"step of {table.name}": spread_s})


def _probe(
    model: keras.Model, table: LayerTable, data: Any, overlap: bool
) -> tuple[LayerMeasurement, float]:
    """Train with one exchange per layer; return the middle one of three probes, and the spread.

    Raises:
        ConfigError: There is nothing to compare.
    """
    exchange = per_layer(table, overlap)
    sgd = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-6, 0.9), exchange=exchange)
    model.compile(sgd, loss="mse")
    tfscale.prepare(model)
    owners = [name.rpartition("/")[0] for layer in table.layers for name, _ in layer.weights]
    found = []
    for _ in range(3):
        probe = LayerProbe(list(dict.fromkeys(owners)))
        while not probe.is_over:
            model.train_on_batch(*data)
            last = probe.step()
        if last is None:
            raise ConfigError(f"{model.name} must have two layers to exchange. Received: fewer.")
        found.append(last)
    middle = sorted(found, key=lambda one: one.step_s)[len(found) // 2]
    return middle, spread_of([one.step_s for one in found])
