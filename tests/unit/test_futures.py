"""Parameter futures in one process: what becomes of a variable, and of functions that read it."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.internals.trace import drop_traces
from tfscale.optimizer import futures


@pytest.fixture(autouse=True)
def job():
    tfscale.init()


def variable(value=1.0):
    return keras.Variable(np.full([3], value, "float32"), name="v")


class Special(keras.Variable):
    def twice(self):
        return self.value * 2


@pytest.mark.parametrize("kind", [keras.Variable, Special])
def test_a_future_is_a_variable_of_its_class(kind):
    v = kind(np.ones([3], "float32"), name="v")
    futures.make_futures([v])
    futures.make_futures([v])
    assert isinstance(v, kind) and isinstance(v, futures.Awaited)
    assert v.shape == (3,) and v.dtype == "float32" and v.path == "v" and "value=" in repr(v)
    np.testing.assert_array_equal(v.twice() if kind is Special else v + 1, [2, 2, 2])
    with futures.plain([v]):
        assert type(v) is kind
    assert isinstance(v, futures.Awaited)
    futures.release([v])
    futures.release([v])
    assert type(v) is kind and not hasattr(v, "_tfscale_future")


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_copies_are_ordinary(duplicate):
    v = variable(4.0)
    futures.make_futures([v])
    other = duplicate(v)
    assert type(other) is keras.Variable and other.path == v.path
    np.testing.assert_array_equal(other.numpy(), v.numpy())


def test_assignments_are_told():
    v, told = variable(), []

    def tell(own, value, before):
        assert own is v
        told.append((np.array(before).tolist(), np.array(value).tolist()))

    first = np.array(v).tolist()
    futures.make_futures([v], tell)
    v.assign(np.full([3], 2.0))
    v.assign_add(np.ones([3], "float32"))
    v.assign_sub(np.ones([3], "float32"))
    assert told == [(first, [2.0] * 3), ([2.0] * 3, [3.0] * 3), ([3.0] * 3, [2.0] * 3)]

    traced = []
    futures.make_futures([v], lambda own, value, before: traced.append(value))
    tf.function(lambda: [v.assign(v + 1)])()
    assert len(traced) == 1 and isinstance(traced[0].graph, tf.Graph)
    np.testing.assert_array_equal(v.numpy(), [3, 3, 3])
    with futures.plain([v]):
        v.assign(np.zeros([3]))
    assert len(traced) == 1


def test_a_restored_checkpoint_is_told(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    saved = model.get_weights()
    model.set_weights([w + 1 for w in saved])
    told = {}
    futures.make_futures(
        model.trainable_variables, lambda v, value, _: told.update({v.name: np.array(value)})
    )
    tf.train.Checkpoint(model=model).read(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(told["kernel"], saved[0])
    np.testing.assert_array_equal(told["bias"], saved[1])


def test_functions_that_read_a_variable_are_traced_anew():
    v, w, traces = variable(), variable(), []

    @tf.function
    def read_v(x):
        traces.append("v")
        return v + x

    @tf.function
    def read_w(x):
        traces.append("w")
        return w + x

    @tf.function(input_signature=[tf.TensorSpec([3])])
    def signed(x):
        traces.append("signed")
        return v + x

    x = tf.ones([3])
    for _ in range(2):
        read_v(x), read_w(x)
    names = drop_traces([v.value])
    assert "read_v" in names and "read_w" not in names
    assert traces == ["v", "w"]  # nor is anything traced for the look
    read_v(x), read_w(x), signed(x)
    assert traces == ["v", "w", "v", "signed"]
    assert "signed" in drop_traces([v.value])
    signed(x)
    assert traces[4:] == ["signed"]
