"""Gathers of parameters: their values, their memory, and the steps that overlap with them."""

import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.cases import require_engine, sizes
from tests.helpers.ranks import in_both_modes, shared_folder
from tests.parallel.futures_model import Posts, Subject
from tfscale.comm.backends.base import Backend, Reduction
from tfscale.optimizer import futures
from tfscale.testing import inspect, require_equal_ranks, require_identical

require_engine("nothing is posted past the end of a step")

SHAPES = ((), (1,), (0,), (7,), (16,), (17,), (0, 3), (3, 5, 7), (1001,))
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


def variables_of(dtype: str, shapes=SHAPES) -> list[keras.Variable]:
    """Return variables with values that fit into any type."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(0, 50, shape) for shape in shapes]
    return [keras.Variable(tf.cast(a, dtype), dtype=dtype, name="v") for a in arrays]


def require(posts: Posts, step: int) -> None:
    expected = posts.expected(step)
    require_identical(posts.variables, expected)
    assert [v.numpy().dtype for v in posts.variables] == [value.dtype for value in expected]


@sizes(1, 2, 3, 4, timeout_s=120)
def case_types_and_sizes():
    """As this backend gathers, and as one that waits, such as Horovod's."""
    for dtype in DTYPES:
        for bucket_bytes in (0, 300, 1 << 20):
            posts = Posts(variables_of(dtype), bucket_bytes)
            futures.make_futures(posts.variables)
            for step, posts.gather in ((1, "post_gather"), (3, "gather_and_assign")):
                posts.post(step)
                require(posts, step)
                posts.run = tf.function(posts.post)
                posts.run(tf.constant(step + 1.0))
                require(posts, step + 1)


@sizes(1, 2, 3, 4, timeout_s=120)
def case_scatter_reduce():
    """As this backend does it, and as one that adds up whole vectors, such as Horovod's.

    custom_ops/test/reduction_test.cc has other types and shares.
    """

    class Waiting(Backend):
        allreduce = inspect.backend().allreduce

    rank, size = tfscale.rank(), tfscale.size()
    shapes, total = ((3, 5), (), (0,), (7,), (1000,)), 1023
    every = [[np.random.default_rng(r).integers(-9, 9, s) for s in shapes] for r in range(size)]
    flat = 2 * sum(np.concatenate([a.ravel() for a in own]) for own in every)
    even = [total * (r + 1) // size - total * r // size for r in range(size)]
    for counts in (even, [total] + [0] * (size - 1)):
        expected = flat[sum(counts[:rank]) : sum(counts[: rank + 1])]
        for dtype, backend in itertools.product(
            ("float64", "int32"), (inspect.backend(), Waiting())
        ):

            def reduce(dtype=dtype, counts=counts, backend=backend):
                call, tensors = inspect.call("g"), [tf.cast(a, dtype) for a in every[rank]]
                return backend.scatter_reduce(tensors, counts, call, Reduction(prescale=2.0))

            for result in in_both_modes(reduce):
                np.testing.assert_array_equal(result, expected)


def address_of(variable) -> int:
    tensor = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)
    # A view: TensorFlow 2.18 has no __dlpack__.
    return np.frombuffer(memoryview(tensor), np.float32).__array_interface__["data"][0]


@sizes(2)
def case_buffers_are_used_again():
    """And what somebody still reads is left alone."""
    posts = Posts([keras.Variable(np.ones([100, 100], "float32")) for _ in range(2)], 1 << 20)
    futures.make_futures(posts.variables)
    addresses, kept = set(), []
    for step in range(12):
        posts.run(tf.constant(float(step)))
        addresses.add(address_of(posts.variables[0]))
        require(posts, step)
    assert len(addresses) <= 3, addresses
    for step in range(6):
        posts.run(tf.constant(float(step)))
        kept.append([tf.identity(v.value) for v in posts.variables])
    for step, values in enumerate(kept):
        require_identical(values, [np.full([100, 100], 1 + step)] * 2)


@sizes(2, 3)
def case_in_place_updates_of_gathered_variables():
    """A slice of a shared buffer is never written in place."""
    subject = Subject()
    posts = subject.posts
    for step in (1, 2, 3):
        posts.run(tf.constant(float(step)))
        for v in posts.variables:
            v.value.assign_add(tf.ones(v.shape))
        rows = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([2]))
        subject.model.layers[0].embeddings.value.scatter_add(rows)
        changed = [value + 1 for value in posts.expected(step)]
        changed[0][2] += 1  # of the embedding
        require_identical(posts.variables, changed)


@sizes(2, 3)
def case_the_wrong_layout_is_refused():
    posts = Posts(variables_of("float32"), 1 << 20)
    futures.make_futures(posts.variables)
    (layout,) = posts.layouts
    near, far = (tuple(o + n for o in layout.offsets) for n in (1, layout.length))
    call = inspect.call("wrong")
    for text, wrong in (
        ("multiples of 64 bytes", {"offsets": near, "length": layout.length + 64}),
        ("variables lie in the buffer", {"offsets": far}),
        ("one cut more than ranks", {"cuts": (0, layout.length, 0, 0, 0, 0)}),
    ):
        own = [tf.zeros([p.count]) for p in layout.pieces(tfscale.rank())]
        bad = dataclasses.replace(layout, **wrong)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            inspect.backend().post_gather(own, posts.variables, bad, call)
    posts.post(1)
    require(posts, 1)


# Forward passes begin while gathers are under way.


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
    backend = inspect.backend()
    post = backend.post_gather

    def post_held(pieces, *rest):
        if kernel is None or any(
            inspect.raw_variable(v) is inspect.raw_variable(kernel) for v in rest[0]
        ):
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
        np.testing.assert_array_equal(read(), inspect.raw_variable(kernel).numpy())


def trained(wait: Callable[[Any], Any], n_steps: int = 60) -> list[np.ndarray]:
    """Return the weights of a model that another thread reads while it trains."""
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
