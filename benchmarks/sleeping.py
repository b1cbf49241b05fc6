"""Models whose layers sleep for as long as the real ones compute, so that cores stay idle.

On a machine with few cores, ranks that compute take cores from each other and from the exchange,
so that overlap cannot be told from contention. Here gradients, shapes of weights, buckets,
codecs, links and the optimizer are real. Only what a layer computes is replaced by waiting on a
core that each process has for itself: see sleep_op.cc. Dense layers are Keras's own, so that
they can exchange activations; their products sleep, for the rows that they have then.
The times are those of benchmarks/layer_times.json. Gradients of embeddings are dense.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import layer_tables
from benchmarks.places import SLOW_MOTION
from benchmarks.provenance import ROOT
from benchmarks.workloads import Workload
from tfscale.native import compiler as native

_MATMUL, _TENSORDOT = tf.matmul, tf.tensordot


@functools.cache
def _operation() -> Callable[..., list[tf.Tensor]]:
    """BenchSleep, compiled where its source is newer."""
    folder = ROOT / "build" / "bench"
    tensorflow = native.find_tensorflow(folder)
    flags = ["-std=c++17", "-O2", "-fPIC", *tensorflow.compile_flags]
    source = native.Source(Path(__file__).with_name("sleep_op.cc"), flags, tensorflow.version)
    compiler = native.find_compiler("g++")
    (made,) = native.compile_objects([source], folder, compiler)
    library = folder / "libsleep.so"
    if not library.exists() or library.stat().st_mtime < made.stat().st_mtime:
        # A library that other ranks may have loaded is replaced, not written to.
        partial = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", str(made), "-o", str(partial), *tensorflow.link_flags]
        native.run_quietly(command, "Linking the op that sleeps")
        partial.replace(library)
    return tf.load_op_library(str(library)).bench_sleep


def build_operation() -> None:
    """Compile the op, before several ranks need it."""
    _operation()


def sleep(
    x: tf.Tensor,
    waits_for: Sequence[tf.Tensor],
    shapes: Sequence[tuple[int | None, ...]],
    seconds: float,
    seconds_per_row: float = 0.0,
) -> list[tf.Tensor]:
    """Tensors of some shapes, after a time on this process's core.

    Args:
        x: Float32. An unknown first dimension of a result is that of x.
        waits_for: The time begins when these are there, too: weights that are read.
        shapes: Of the results.
        seconds: The time.
        seconds_per_row: Time in addition for each row of x.
    """
    factor = float(os.environ.get(SLOW_MOTION, "1"))
    n_rows = x.shape[0] if x.shape.rank else 1
    listed = [tf.TensorShape([n_rows if n is None else n for n in shape]) for shape in shapes]
    return _operation()(
        x=x,
        waits_for=list(waits_for),
        m=len(listed),
        shapes=listed,
        seconds=seconds * factor,
        seconds_per_row=seconds_per_row * factor,
    )


class Nap(keras.layers.Layer):
    """A layer with weights that sleeps.

    Args:
        forward_s, backward_s: The seconds of its forward pass, and of back-propagation through it.
        weights: Shapes of its trainable weights.
        outputs: Shape of a sample's output.
    """

    def __init__(
        self,
        forward_s: float,
        backward_s: float,
        weights: Sequence[Sequence[int]] = (),
        outputs: Sequence[int] = (1,),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._seconds = (forward_s, backward_s)
        self._shapes = [tuple(shape) for shape in weights]
        self._outputs = tuple(outputs)

    def build(self, _: Any) -> None:
        """Make the weights."""
        self._made = [
            self.add_weight(shape=shape, initializer="zeros", name=f"weight{i}")
            for i, shape in enumerate(self._shapes)
        ]

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Sleep, and sleep again for the gradients."""
        forward_s, backward_s = self._seconds
        shapes = [tuple(x.shape), *self._shapes]

        @tf.custom_gradient
        def nap(x: tf.Tensor, *weights: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            (outputs,) = sleep(x, weights, [(None, *self._outputs)], forward_s)

            def back(of_outputs: tf.Tensor) -> list[tf.Tensor]:
                return sleep(of_outputs, (), shapes, backward_s)

            return outputs, back

        return nap(x, *(tf.convert_to_tensor(weight) for weight in self._made))

    def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The batch, and the shape of a sample's output."""
        return (shape[0], *self._outputs)


class Products:
    """`tf.matmul` and `tf.tensordot` where the products of a model's dense layers sleep.

    Args:
        products: By the shape of a kernel: of each product the seconds, and those for each row.
    """

    def __init__(self, products: Mapping[tuple[int, int], Mapping[str, Sequence[float]]]) -> None:
        self._products = products

    def matmul(
        self, a: Any, b: Any, transpose_a: bool = False, transpose_b: bool = False, **more: Any
    ) -> tf.Tensor:
        """The product of two float32 tensors, slept for if it is that of a dense layer."""
        a, b = tf.convert_to_tensor(a), tf.convert_to_tensor(b)
        if transpose_a and not transpose_b and a.shape.rank == b.shape.rank == 2:
            return self._kernel_gradient(a, b)
        known = self._products.get(tuple(b.shape))
        if known is None or transpose_a:
            return _MATMUL(a, b, transpose_a=transpose_a, transpose_b=transpose_b, **more)
        name = "input_gradients" if transpose_b else "outputs"
        width = b.shape[0] if transpose_b else b.shape[1]
        return self._product(a, b, width, known[name])

    def tensordot(self, a: Any, b: Any, axes: Any, **more: Any) -> tf.Tensor:
        """The sum over axes of two tensors, which Keras calls for inputs with inner dimensions."""
        if axes == [[-1], [0]] and tuple(b.shape) in self._products:
            return self.matmul(a, b)
        return _TENSORDOT(a, b, axes, **more)

    def install(self) -> None:
        """Let TensorFlow call these."""
        tf.matmul, tf.tensordot = self.matmul, self.tensordot

    def _product(
        self, a: tf.Tensor, kernel: tf.Tensor, width: int, times: Sequence[float]
    ) -> tf.Tensor:
        inner = tuple(a.shape[1:-1])
        n_inner = int(np.prod(inner))

        @tf.custom_gradient
        def product(a: tf.Tensor, kernel: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            (outputs,) = sleep(a, [kernel], [(None, *inner, width)], times[0], times[1] * n_inner)

            def back(of_outputs: tf.Tensor) -> list[tf.Tensor]:
                rows = tf.reshape(of_outputs, [-1, width])
                of_kernel = self.matmul(tf.reshape(a, [-1, a.shape[-1]]), rows, transpose_a=True)
                return [self.matmul(of_outputs, kernel, transpose_b=True), of_kernel]

            return outputs, back

        return product(a, kernel)

    def _kernel_gradient(self, a: tf.Tensor, of_outputs: tf.Tensor) -> tf.Tensor:
        """The gradient of a kernel, or of a rank's share of its rows."""
        n_in, n_out = a.shape[1], of_outputs.shape[1]
        shapes = [shape for shape in self._products if shape[1] == n_out and shape[0] >= n_in]
        # The share of a row is that of a whole kernel, to the nearest part.
        shape = min(shapes, key=lambda shape: abs(shape[0] / n_in - round(shape[0] / n_in)))
        share = n_in / shape[0]
        seconds, per_row = self._products[shape]["kernel_gradient"]
        (gradient,) = sleep(a, [of_outputs], [(n_in, n_out)], seconds * share, per_row * share)
        return gradient


def build(name: str, speed: float = 1.0) -> keras.Model:
    """Make the model of a table, and let the products of its dense layers sleep.

    Args:
        name: Of the table.
        speed: How many times as fast as the core of the table.
    """
    table = layer_tables.read()[name]
    rows = table["layers"]
    model = keras.Sequential([keras.Input((1,))])
    products = {}
    for i, row in enumerate(rows):
        after = rows[i + 1] if i + 1 < len(rows) else {}
        outputs = after["dense"]["input_shape"] if "dense" in after else (1,)
        forward_s, backward_s = row["forward_s"] / speed, row["backward_s"] / speed
        if "dense" not in row:
            model.add(Nap(forward_s, backward_s, row["weights"], outputs, name=row["name"]))
            continue
        kernel, *bias = map(tuple, row["weights"])
        found = {
            key: [x / speed for x in seconds] for key, seconds in row["dense"]["products"].items()
        }
        n_inner = int(np.prod(row["dense"]["input_shape"][:-1]))
        n_rows = table["samples"] * n_inner
        spent = {key: seconds[0] + seconds[1] * n_rows for key, seconds in found.items()}
        products[kernel] = found
        model.add(keras.layers.Dense(kernel[1], use_bias=bool(bias), name=row["name"]))
        # Its activation, and whatever follows.
        forward_s = max(forward_s - spent["outputs"], 0.0)
        backward_s = max(backward_s - spent["input_gradients"] - spent["kernel_gradient"], 0.0)
        model.add(Nap(forward_s, backward_s, (), outputs, name=f"{row['name']}_rest"))
    Products(products).install()
    return model


def workload(name: str, n_ranks: int, speed: float = 1.0) -> Workload:
    """The workload of a table: as many samples per rank as it was measured with."""
    n_samples = layer_tables.read()[name]["samples"]
    return Workload(lambda: build(name, speed), n_samples * n_ranks, (1,), 0)
