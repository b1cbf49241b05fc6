"""Every public way of reading the parameters of a model."""

import copy
import pickle
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.parallel.futures_model import X, Y, build
from tfscale.optimizer import futures

NUMBER = r"-?\d+\.\d*(?:e[-+]\d+)?"
WAYS: dict[str, Callable[[keras.Model], Any]] = {}


def way(read: Callable[[keras.Model], Any]) -> Callable[[keras.Model], Any]:
    WAYS[read.__name__] = read
    return read


def each(read: Callable[[Any], Any]) -> Callable[[keras.Model], list[Any]]:
    return lambda model: [read(v) for v in model.trainable_variables]


WAYS["numpy"] = each(lambda v: v.numpy())
WAYS["np.array"] = each(np.array)
WAYS["value"] = each(lambda v: v.value.numpy())
WAYS["value.read_value"] = each(lambda v: v.value.read_value())
WAYS["handle"] = each(lambda v: tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32))
WAYS["tf.convert_to_tensor"] = each(tf.convert_to_tensor)
WAYS["keras.ops.convert_to_numpy"] = each(keras.ops.convert_to_numpy)
WAYS["eager math"] = each(lambda v: [v + 1, 2 * v, -v, abs(v), v**2, v < 0.1])
WAYS["tf functions"] = each(lambda v: [tf.reduce_sum(v), tf.square(v), tf.concat([v, v], 0)])
WAYS["slices"] = each(lambda v: [v[0], v[-1:]])
WAYS["repr"] = each(lambda v: [float(x) for x in re.findall(NUMBER, repr(v).split("value=")[1])])
WAYS["deepcopy of a variable"] = each(lambda v: copy.deepcopy(v).numpy())
WAYS["pickled variable"] = each(lambda v: pickle.loads(pickle.dumps(v)).numpy())
WAYS["copy of a variable"] = each(lambda v: copy.copy(v).numpy())
WAYS["get_weights"] = lambda model: model.get_weights()
WAYS["state tree"] = lambda model: list(
    tf.nest.flatten(model.get_state_tree(value_format="numpy_array")["trainable_variables"])
)
WAYS["predict"] = lambda model: model.predict(X, verbose=0)
WAYS["evaluate"] = lambda model: model.evaluate(X, Y, verbose=0)
WAYS["call"] = lambda model: model(X)
WAYS["gather"] = lambda model: tf.gather(model.layers[0].embeddings, [3, 1])
WAYS["embedding_lookup"] = lambda model: tf.nn.embedding_lookup(
    model.layers[0].embeddings.value, [3, 1]
)
WAYS["part of the model"] = lambda model: keras.Model(model.inputs, model.layers[2].output)(X)
WAYS["deepcopy of the model"] = lambda model: copy.deepcopy(model).get_weights()
WAYS["pickled model"] = lambda model: pickle.loads(pickle.dumps(model)).get_weights()


@way
def test_on_batch(model):
    model.reset_metrics()  # Keras 3.10 would count the training of before
    return model.test_on_batch(X, Y)


@way
def clone_model(model):
    clone = keras.models.clone_model(model)
    assert not any(isinstance(v, futures.Awaited) for v in clone.variables)
    clone.set_weights(model.get_weights())
    return clone.predict(X, verbose=0)


@way
def gradients(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X) ** 2)
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)]


@way
def mixed_precision(model):
    with keras.src.backend.common.variables.AutocastScope("float16"):
        return [tf.cast(v.value, tf.float32) for v in model.trainable_variables]


@way
def save(model):
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        model.save(f"{folder}/model.h5")
        loaded = [
            keras.models.load_model(f"{folder}/model.{end}", compile=False)
            for end in ("keras", "h5")
        ]
    return [m.get_weights() for m in loaded]


@way
def checkpoint(model):
    other = build()
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=model).write(f"{folder}/checkpoint")
        tf.train.Checkpoint(model=other).read(path).assert_existing_objects_matched()
    return other.get_weights()


@way
def export(model):
    with tempfile.TemporaryDirectory() as folder:
        model.export(f"{folder}/saved", verbose=False)
        assert b"TfscaleAwait" not in Path(f"{folder}/saved/saved_model.pb").read_bytes()
        loaded = tf.saved_model.load(f"{folder}/saved")
        return loaded.serve(X.astype("int32"))


@way
def saved_model_within_plain(model):
    with tempfile.TemporaryDirectory() as folder:
        with futures.plain(model.variables):
            tf.saved_model.save(model, folder)
        assert b"TfscaleAwait" not in Path(f"{folder}/saved_model.pb").read_bytes()
        loaded = tf.saved_model.load(folder)
        return loaded.signatures["serving_default"](tf.constant(X, tf.int32))


@way
def another_thread(model):
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append([model.get_weights(), model(X)]))
    thread.start()
    thread.join()
    return found


@way
def control_flow(model):
    @tf.function
    def read(n):
        total = tf.zeros([])
        for _ in tf.range(n):
            total += tf.reduce_sum(model.layers[-1].kernel)
        if n > 2:
            total += tf.reduce_sum(model.layers[-1].bias)
        return total

    return [read(tf.constant(2)), read(tf.constant(3))]


@way
def dataset(model):
    kernel = model.layers[-1].kernel
    data = tf.data.Dataset.range(3).map(lambda i: tf.reduce_sum(kernel) + tf.cast(i, tf.float32))
    return list(data.as_numpy_iterator())
