"""What the Horovod backend does to numbers and names before Horovod sees them. No Horovod here."""

import numpy as np
import pytest
import tensorflow as tf

from tfscale.comm.backends import horovod as backend
from tfscale.comm.backends.base import Call, Group, ReduceOp, Reduction
from tfscale.comm.backends.horovod import (
    NamedOps,
    from_wire,
    nan_flag,
    restore_nan,
    scale,
    to_wire,
    widen,
)
from tfscale.comm.eager import is_exchange_error
from tfscale.config import ExchangeError
from tfscale.fit.uneven_batches import Lookahead

PAIR = Group(0, (0, 1), 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint32", "complex64", "float64", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_every_type_travels(dtype, shape):
    tensor = tf.cast(tf.ones(shape), dtype)
    moved = from_wire(to_wire(tensor), tensor, tensor.shape[:1])
    assert moved.dtype == tensor.dtype and moved.shape == tensor.shape
    assert bool(tf.reduce_all(moved == tensor))


def test_factors_keep_the_digits_of_float64():
    assert scale(tf.constant([1.0], tf.float64), 1 / 3).numpy()[0] == 1 / 3
    assert scale(tf.constant([-7]), 0.5).numpy()[0] == -3
    assert scale(tf.constant([49]), 1 / 49).numpy()[0] == 1  # 49 * (1 / 49) is less than 1
    assert scale(tf.constant([7]), 1.5).numpy()[0] == 10
    assert widen(tf.constant([1.0], tf.bfloat16)).dtype == tf.float32


@pytest.mark.parametrize(("op", "reduce"), [(ReduceOp.MAX, np.fmax), (ReduceOp.MIN, np.fmin)])
def test_nan_survives_an_extreme_that_drops_it(op, reduce):
    ranks = [tf.constant([np.nan, 1.0, -2.0]), tf.constant([5.0, -3.0, np.nan])]
    values = reduce(*[t.numpy() for t in ranks])
    flags = reduce(*[nan_flag(t, op).numpy() for t in ranks])
    result = restore_nan(tf.constant(values), tf.constant(flags)).numpy()
    np.testing.assert_array_equal(result, [np.nan, reduce(1.0, -3.0), np.nan])


def start(inputs, name):
    """Stand for an op of Horovod's: stateless, foldable, named."""
    return [tf.raw_ops.Neg(x=inputs[0], name=name)]


def names_of(body):
    graph = tf.function(body).get_concrete_function(tf.ones([2])).graph
    return [op.name.rpartition("/")[2] for op in graph.get_operations() if op.type == "Neg"]


def test_names_are_unique_within_and_between_functions():
    """Other factors are told apart: such ranks find no counterpart, instead of a wrong sum."""
    named, alone = NamedOps(), Group(2, (0,), 0)

    def body(x):
        with tf.name_scope("dense_7"):
            bucket = Call(PAIR, "dense_7/kernel", names=("dense_7/kernel", "dense_7/bias"))
            x = named.run(bucket, [x], start)[0]
        x = named.run(Call(PAIR, "bias"), [x], start, Reduction(postscale=0.5).terms())[0]
        x = named.run(Call(PAIR, "rows", terms="dense shape [5]"), [x], start)[0]
        return named.run(Call(alone, "bias"), [x], start)[0]

    expected = [
        "tfscale.g0.p0.s0.dense.kernel",
        "tfscale.g0.p0.s1.bias.SUM..factors.1.0.and.0.5.",
        "tfscale.g0.p0.s2.rows.dense.shape..5.",
        "tfscale.g2.p0.s0.bias",
    ]
    assert names_of(body) == expected
    assert names_of(body) == [name.replace(".p0.", ".p1.") for name in expected]


def test_an_op_whose_result_nobody_uses_is_kept():
    named, counter = NamedOps(), tf.Variable(0)

    def count(inputs, name):
        with tf.control_dependencies([counter.assign_add(1)]):
            return start(inputs, name)

    @tf.function
    def inner():
        named.run(Call(PAIR, "unused"), [tf.constant([1.0])], count)

    @tf.function
    def outer():
        inner()
        inner()
        return tf.constant(1)

    outer()
    assert int(counter) == 2


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (0, 2), (2, 0), (2, 3)])
@pytest.mark.parametrize("is_ordered", [False, True])
def test_an_op_on_a_constant_runs_in_each_step(shape, is_ordered):
    """A rank that computed it while it makes its graph ready would wait there for the others."""
    named, values = NamedOps(), []
    handle = tf.Variable(0.0).handle
    constant = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)

    def append(value):
        values.append(value)
        return value

    def record(inputs, name):
        assert inputs[0].shape == shape
        return [tf.numpy_function(append, inputs, tf.float32, stateful=False, name=name)]

    @tf.function
    def step():
        call = Call(PAIR, "constant", () if is_ordered else (handle,))
        return named.run(call, [tf.constant(constant)], record)[0]

    for number in range(1, 4):
        np.testing.assert_array_equal(step(), constant)
        assert len(values) == number
        np.testing.assert_array_equal(values[-1], constant)


def test_errors_of_collectives_are_told_from_others():
    errors = tf.errors
    shapes = "Mismatched shapes [[{{node tfscale.g0.p1.s0.loss}}]]"
    assert is_exchange_error(errors.UnknownError(None, None, "Horovod has been shut down."))
    assert is_exchange_error(errors.InvalidArgumentError(None, None, shapes))
    assert not is_exchange_error(errors.InvalidArgumentError(None, None, "Shapes: [2] vs. [3]"))


def test_look_ahead_hands_every_batch_on():
    data = tf.data.Dataset.range(5).map(lambda i: (tf.fill([2], i), {"w": i})).prefetch(2)
    source = iter(data)
    ahead = Lookahead(source)
    assert ahead.iterator.element_spec == source.element_spec
    for i in range(5):
        assert ahead.has_next() and int(next(ahead.iterator)[1]["w"]) == i
    assert not ahead.has_next()


def test_missing_horovod_is_named(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'horovod'")

    monkeypatch.setattr(backend.importlib, "import_module", fail)
    with pytest.raises(ExchangeError, match="tools/build_horovod.py"):
        backend.load_horovod()
