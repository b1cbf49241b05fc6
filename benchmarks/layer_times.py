"""Measure how long each layer of a model computes on one core: `python -m benchmarks.layer_times`.

Writes benchmarks/layer_times.json, by which layers of `benchmarks.sleeping` sleep. Each operation
of a model is run alone on tensors made up, forward, and forward with back-propagation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import layer_tables
from benchmarks.provenance import describe
from benchmarks.workloads import edsr, resnet50, vgg
from tfscale.files import write_atomically

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from models.transformer import transformer

# Samples of one rank and step; pictures have 224x224 pixels, sequences 128 tokens, patches 48x48.
N_SAMPLES = 8
MODELS: dict[str, Callable[[], keras.Model]] = {
    "resnet50": resnet50,
    "vgg_a": lambda: vgg(dropout=0.0),
    "transformer": lambda: transformer(tokens=8192, length=128, blocks=6, width=512, heads=8),
    "edsr16": lambda: keras.models.clone_model(edsr(), keras.Input((48, 48, 1))),
}
# Rows that a product of a gathered dense layer is measured with: those of 1, 4 and 16 ranks.
_RANKS = (1, 4, 16)


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The median duration of a call, which ends when it has computed; the first is left out."""
    durations = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[1:])


def made_up(tensor: Any) -> tf.Tensor:
    """A tensor of the shape and dtype of a symbolic one, for `N_SAMPLES` samples."""
    shape = (N_SAMPLES, *tensor.shape[1:])
    if "int" in tensor.dtype:
        return tf.zeros(shape, tensor.dtype)
    return tf.constant(np.random.default_rng(0).standard_normal(shape, np.float32))


def operation_seconds(operation: Any, inputs: Sequence[Any], repeats: int) -> tuple[float, float]:
    """The seconds of an operation forward, and of back-propagation through it.

    Args:
        operation: A layer, or an operation of `keras.ops`, of a functional model.
        inputs: The model's inputs, whose gradients are not needed.
        repeats: Runs of each.
    """
    arguments = operation._inbound_nodes[0].arguments
    is_symbolic = keras.backend.is_keras_tensor
    symbolic = [x for x in keras.tree.flatten((arguments.args, arguments.kwargs)) if is_symbolic(x)]
    values = {id(x): made_up(x) for x in symbolic}
    known = {id(x) for x in inputs}
    watched = [values[id(x)] for x in symbolic if id(x) not in known and "float" in x.dtype]
    weights = [v.value for v in getattr(operation, "trainable_variables", ())]

    def call() -> Any:
        args, kwargs = keras.tree.map_structure(
            lambda x: values.get(id(x), x), (arguments.args, arguments.kwargs)
        )
        if isinstance(operation, keras.Layer) and operation._call_has_training_arg:
            kwargs["training"] = True
        return operation(*args, **kwargs)

    def call_back(of_outputs: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = call()
        gradients = tape.gradient(outputs, [*watched, *weights], of_outputs)
        return outputs, [tf.convert_to_tensor(g) for g in gradients if g is not None]

    forward_s = median_seconds(tf.function(call, autograph=False), repeats)
    if not watched and not weights:
        return forward_s, 0.0
    of_outputs = made_up(operation.output)
    back = tf.function(call_back, autograph=False)
    both_s = median_seconds(lambda: back(of_outputs), repeats)
    return forward_s, max(both_s - forward_s, 0.0)


def product_seconds(kernel: tf.Tensor, n_rows: int, repeats: int) -> dict[str, Any]:
    """The seconds of a dense layer's three products: a constant part, and one for each row."""
    n_in, n_out = kernel.shape
    found = {}
    for name in ("outputs", "input_gradients", "kernel_gradient"):
        points = []
        for n_ranks in _RANKS if name == "kernel_gradient" else _RANKS[:2]:
            x, dy = tf.ones((n_rows * n_ranks, n_in)), tf.ones((n_rows * n_ranks, n_out))
            products = {
                "outputs": functools.partial(tf.matmul, x, kernel),
                "input_gradients": functools.partial(tf.matmul, dy, kernel, transpose_b=True),
                "kernel_gradient": functools.partial(tf.matmul, x, dy, transpose_a=True),
            }
            points.append((n_rows * n_ranks, median_seconds(products[name], repeats)))
        slope, constant = np.polyfit([p[0] for p in points], [p[1] for p in points], 1)
        if constant < 0:  # by noise: a line through the origin, and the largest product
            slope, constant = points[-1][1] / points[-1][0], 0.0
        found[name] = [max(constant, 0.0), max(slope, 0.0)]
    return found


def measure_model(model: keras.Model, repeats: int) -> list[dict[str, Any]]:
    """The rows of a model's table, one for each layer with weights, first to last.

    What computes without weights belongs to the row before it, at the beginning to the first row.
    """
    rows: list[dict[str, Any]] = []
    before = [0.0, 0.0]
    for operation in model.operations:
        if isinstance(operation, keras.layers.InputLayer):
            continue
        seconds = operation_seconds(operation, model.inputs, repeats)
        weights = [tuple(v.shape) for v in getattr(operation, "trainable_variables", ())]
        if not weights:
            row = rows[-1] if rows else None
            target = [row["forward_s"], row["backward_s"]] if row else before
            target[0] += seconds[0]
            target[1] += seconds[1]
            if row:
                row["forward_s"], row["backward_s"] = target
            continue
        row = {"name": operation.name, "weights": weights}
        row["forward_s"], row["backward_s"] = seconds[0] + before[0], seconds[1] + before[1]
        before = [0.0, 0.0]
        if type(operation) is keras.layers.Dense:
            shape = operation.input.shape[1:]
            n_rows = N_SAMPLES * int(np.prod(shape[:-1]))
            row["dense"] = {
                "input_shape": shape,
                "products": product_seconds(operation.kernel.value, n_rows, repeats),
            }
        rows.append(row)
        print(f"{model.name} {row['name']}: {1e3 * seconds[0]:.1f} + {1e3 * seconds[1]:.1f} ms")
    return rows


def main() -> int:
    """Measure the models asked for; keep the tables of others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_times", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tables = layer_tables.read()
    for name in options.models:
        layers = measure_model(MODELS[name](), options.repeats)
        keras.backend.clear_session()
        forward_s, backward_s = (sum(x[key] for x in layers) for key in ("forward_s", "backward_s"))
        print(f"{name}: {forward_s:.3f} s forward, {backward_s:.3f} s backward")
        tables[name] = {
            "command": f"python -m benchmarks.layer_times --models {name}",
            **{key: describe()[key] for key in ("commit", "machine", "versions")},
            "samples": N_SAMPLES,
            "forward_s": round(forward_s, 6),
            "backward_s": round(backward_s, 6),
            "layers": layers,
        }
        write_atomically(layer_tables.PATH, json.dumps(tables, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
