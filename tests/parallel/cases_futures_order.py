"""Forward passes begin while gathers are under way."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import require_equal_ranks, require_identical, shared_folder
from tests.helpers.spawn import sizes
from tfscale.comm import runtime
from tfscale.internals.keras import raw_variable
from tfscale.optimizer import futures

ENGINE_ONLY = "nothing is posted past the end of a step"


class Gate:
    """Ops at which a rank says that it has come so far, or waits for others that do."""

    def __init__(self) -> None:
        self.awaited: list[Path] = []
        self.told: list[Path] = []
        self.has_timed_out = False

    def wait(self, value):
        """Pass a number on when all files exist; the order is then the one that is to be seen."""
        deadline = time.monotonic() + 30
        while not all(f.exists() for f in self.awaited) and not self.has_timed_out:
            time.sleep(0.01)
            self.has_timed_out = time.monotonic() > deadline
        return value

    def tell(self, value):
        for file in self.told:
            file.touch()
        return value


class Tell(keras.layers.Layer):
    """Passes its input on and says so."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def call(self, inputs):
        with tf.control_dependencies([tf.py_function(self.gate.tell, [inputs], inputs.dtype)]):
            return tf.identity(inputs)


def sharded_model(gate: Gate) -> keras.Model:
    """Return a model that says when its first layer is computed."""
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(8), Tell(gate), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    exchange = tfscale.Sharded(bucket_mb=0, dense="weights")
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange)
    model.compile(optimizer, loss="mse")
    return model


@contextlib.contextmanager
def holding(kernel: keras.Variable | None, wait: Callable[[Any], Any]) -> Iterator[None]:
    """Let the gather of one parameter, or of all, that is traced meanwhile wait first."""
    backend = runtime.backend()
    post = backend.post_gather

    def post_held(pieces, *rest):
        if kernel is None or any(raw_variable(v) is raw_variable(kernel) for v in rest[0]):
            pieces = [tf.py_function(wait, [piece], piece.dtype) for piece in pieces]
        post(pieces, *rest)

    backend.post_gather = post_held
    try:
        yield
    finally:
        del backend.post_gather


@sizes(2, 3, timeout_s=120)
def case_training_goes_on_before_the_last_gather_has_ended():
    """And a function that a user traced before `prepare` waits for it."""
    gate = Gate()
    model = sharded_model(gate)
    kernel = model.layers[-1].kernel
    read = tf.function(lambda: kernel + 0)
    read()
    tfscale.prepare(model)
    x, y = np.ones((2, 4), "float32"), np.ones((2, 3), "float32")
    with holding(kernel, gate.wait):
        model.train_on_batch(x, y)
    for late in range(tfscale.size()):
        tfscale.barrier()
        with shared_folder() as folder:
            others = [folder / str(r) for r in range(tfscale.size()) if r != late]
            is_late = tfscale.rank() == late
            gate.awaited = others if is_late else []
            model.train_on_batch(x, y)
            gate.awaited = []
            found: list[tf.Tensor] = []
            reader = threading.Thread(target=lambda found=found: found.append(read()))
            reader.start()
            if not is_late:
                reader.join(0.2)
                assert reader.is_alive()
                gate.told = [folder / str(tfscale.rank())]
            # The late rank is still in the step before until layer 1 has told.
            model.train_on_batch(x, y)
            gate.told = []
            reader.join()
        assert not gate.has_timed_out
        require_equal_ranks(model.trainable_variables)
        futures.drain(model.variables)
        np.testing.assert_array_equal(read(), raw_variable(kernel).numpy())


def trained(wait: Callable[[Any], Any], n_steps: int = 60) -> list[np.ndarray]:
    """Return what a model becomes while another thread reads it all the time."""
    model = sharded_model(Gate())
    tfscale.prepare(model)
    rows = np.random.default_rng(tfscale.rank()).normal(size=(n_steps, 2, 4)).astype("float32")
    with holding(None, wait):
        model.train_on_batch(rows[0], rows[0][:, :3])
    is_over, n_reads = threading.Event(), []

    def read():
        while not is_over.is_set():
            assert np.isfinite(model(rows[0])).all()
            n_reads.append(len(model.get_weights()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for x in rows:
            model.train_on_batch(x, x[:, :3])
    finally:
        is_over.set()
        reader.join()
    assert n_reads
    require_equal_ranks(model.trainable_variables)
    return model.get_weights()


@sizes(2, 3, timeout_s=180)
def case_delays_change_nothing():
    """Ranks post at random times, in any order of the layers."""
    delays = random.Random(tfscale.rank())

    def wait(value):
        time.sleep(delays.random() * 0.004)
        return value

    require_identical(trained(wait), trained(tf.identity))
