"""Every way of reading a parameter whose gather is pending gives the new value."""

from __future__ import annotations

import copy
import io
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

import tfscale
from tests.helpers.ranks import outcome
from tests.helpers.spawn import sizes
from tests.parallel.futures_model import Subject, X, Y, build
from tfscale import futures, runtime

NUMBER = r"-?\d+\.\d*(?:e[-+]\d+)?"
WAYS: dict[str, Callable[[keras.Model], Any]] = {}


def way(read: Callable[[keras.Model], Any]) -> Callable[[keras.Model], Any]:
    """Add a function to the table."""
    WAYS[read.__name__] = read
    return read


def each(read: Callable[[Any], Any]) -> Callable[[keras.Model], list[Any]]:
    """Read each variable in the same way."""
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
WAYS["keras functions"] = each(lambda v: [keras.ops.sum(v), keras.ops.tanh(v)])
WAYS["slices"] = each(lambda v: [v[0], v[-1:]])
WAYS["float"] = each(lambda v: float(tf.reshape(v, [-1])[0]))
WAYS["repr"] = each(lambda v: [float(x) for x in re.findall(NUMBER, repr(v).split("value=")[1])])
WAYS["deepcopy of a variable"] = each(lambda v: copy.deepcopy(v).numpy())
WAYS["pickled variable"] = each(lambda v: pickle.loads(pickle.dumps(v)).numpy())
WAYS["copy of a variable"] = each(lambda v: copy.copy(v).numpy())
WAYS["get_weights"] = lambda model: model.get_weights()
WAYS["get_weights of a layer"] = lambda model: model.layers[-1].get_weights()
WAYS["state tree"] = lambda model: list(
    tf.nest.flatten(model.get_state_tree(value_format="numpy_array")["trainable_variables"])
)
WAYS["predict"] = lambda model: model.predict(X, verbose=0)
WAYS["predict_on_batch"] = lambda model: model.predict_on_batch(X)
WAYS["evaluate"] = lambda model: model.evaluate(X, Y, verbose=0)
WAYS["test_on_batch"] = lambda model: model.test_on_batch(X, Y)
WAYS["call"] = lambda model: model(X)
WAYS["call of a layer"] = lambda model: model.layers[-1](np.ones((2, 5), "float32"))
WAYS["embedding"] = lambda model: model.layers[0](X)
WAYS["gather"] = lambda model: tf.gather(model.layers[0].embeddings, [3, 1])
WAYS["embedding_lookup"] = lambda model: tf.nn.embedding_lookup(
    model.layers[0].embeddings.value, [3, 1]
)
WAYS["part of the model"] = lambda model: keras.Model(model.inputs, model.layers[2].output)(X)
WAYS["deepcopy of the model"] = lambda model: copy.deepcopy(model).get_weights()
WAYS["pickled model"] = lambda model: pickle.loads(pickle.dumps(model)).get_weights()
WAYS["another function"] = lambda model: tf.function(lambda: model(X))()


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
def save_weights(model):
    other = build()
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model.weights.h5")
        other.load_weights(f"{folder}/model.weights.h5")
    return other.get_weights()


@way
def checkpoint(model):
    other = build()
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=model).write(f"{folder}/checkpoint")
        tf.train.Checkpoint(model=other).read(path).assert_existing_objects_matched()
    return other.get_weights()


@way
def checkpoint_manager(model):
    other = build()
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(model=model)
        path = tf.train.CheckpointManager(saved, folder, max_to_keep=1).save()
        tf.train.Checkpoint(model=other).restore(path).expect_partial()
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
def many_threads(model):
    found: dict[int, Any] = {}

    def read(i: int) -> None:
        found[i] = model.trainable_variables[i % 5].numpy()

    threads = [threading.Thread(target=read, args=[i]) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(20)]


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


@way
def functional_keras(model):
    trainable = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    return model.stateless_call(trainable, state, X)[0]


@way
def archive(model):
    file = io.BytesIO()
    np.savez(file, *model.trainable_variables)
    file.seek(0)
    return list(np.load(file).values())


@sizes(2, 3, timeout_s=240)
def case_every_way_of_reading():
    subject = Subject()
    for name, read in WAYS.items():
        subject.check(name, read)


def traced_readers(model) -> dict[str, Callable[[], Any]]:
    """Return functions of kinds that TensorFlow caches differently."""

    class Holder:
        @tf.function
        def method(self):
            return model(X)

    holder = Holder()

    @tf.function
    def inner():
        return [v + 1 for v in model.trainable_variables]

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.int32)])
    def signed(x):
        return model(x)

    return {
        "method": holder.method,
        "inner": inner,
        "outer": tf.function(lambda: inner()),
        "signed": lambda: signed(tf.constant(X, tf.int32)),
    }


@sizes(2, 3, timeout_s=120)
def case_functions_traced_before():
    """`attach`, which `tfscale.prepare` calls, has them traced anew, Keras's and the user's."""
    readers: dict[int, dict[str, Callable[[], Any]]] = {}

    def trace(model):
        model.predict(X, verbose=0)
        model.evaluate(X, Y, verbose=0)
        readers[id(model)] = traced_readers(model)
        for read in readers[id(model)].values():
            read()

    subject = Subject(before=trace)
    trace(subject.twin)
    for name in ("method", "inner", "signed"):
        assert name in subject.names, subject.names
    subject.check("predict", lambda model: model.predict(X, verbose=0))
    subject.check("evaluate", lambda model: model.evaluate(X, Y, verbose=0))
    for name in readers[id(subject.model)]:
        # The second time what was traced anew runs.
        for _ in range(2):
            subject.check(name, lambda model, name=name: readers[id(model)][name]())


@sizes(2, 3)
def case_an_untouched_function_is_not_traced_again():
    n_traces = []

    @tf.function
    def other(x):
        n_traces.append(1)
        return x + 1

    other(tf.constant(1))
    subject = Subject()
    other(tf.constant(2))
    assert len(n_traces) == 1 and "other" not in subject.names


@sizes(2, 3)
def case_reading_in_the_function_that_posts():
    subject = Subject()
    posts, variables = subject.posts, subject.posts.variables

    def inner(step):
        posts.post(step)

    traced_inner = tf.function(inner)

    def read_all():
        return [tf.identity(v.value) for v in variables]

    def around(post):
        def body(step):
            before = read_all()
            post(step)
            between = read_all()
            post(step + 1)
            return before, between, read_all()

        return tf.function(body)

    branches = tf.function(
        lambda step: tf.cond(step > 0, lambda: inner(step), lambda: None), autograph=False
    )
    posts.run(tf.constant(0.0))
    branches(tf.constant(0.0))
    for kind, post in (("inline", inner), ("called", traced_inner), ("branch", branches)):
        body = around(post)
        for step in (3, 7):
            posts.run(tf.constant(1.0))
            found = body(tf.constant(float(step)))
            for values, k in zip(found, (1, step, step + 1), strict=True):
                for value, expected in zip(values, posts.expected(k), strict=True):
                    np.testing.assert_array_equal(value, expected, err_msg=f"{kind} {step} {k}")


@sizes(2, 3)
def case_assignments_wait_and_win():
    subject = Subject()
    model, variables = subject.model, subject.posts.variables
    paths = [v.path for v in variables]
    new = [np.full(v.shape, 7.0, "float32") for v in variables]
    other = build()
    other.set_weights(new)
    with tempfile.TemporaryDirectory() as folder:
        other.save_weights(f"{folder}/model.weights.h5")
        path = tf.train.Checkpoint(model=other).write(f"{folder}/checkpoint")

        @tf.function
        def assign_traced():
            for v, value in zip(variables, new, strict=True):
                v.assign(value)

        @tf.function
        def assign_raw():
            for v, value in zip(variables, new, strict=True):
                v.value.assign(value)

        writes = {
            "assign": lambda: [v.assign(x) for v, x in zip(variables, new, strict=True)],
            "assign_add": lambda: [v.assign_add(new[0].flat[0] - v) for v in variables],
            "traced": assign_traced,
            "raw": assign_raw,
            "set_weights": lambda: model.set_weights(new),
            "load_weights": lambda: model.load_weights(f"{folder}/model.weights.h5"),
            "checkpoint": lambda: tf.train.Checkpoint(model=model).read(path),
        }
        for name, write in writes.items():
            subject.step += 1
            subject.assigned.clear()
            subject.posts.post_late(subject.step, subject.step % tfscale.size())
            write()
            tfscale.barrier()
            assert runtime.backend().num_pending() == 0, name
            for v in variables:
                np.testing.assert_array_equal(v.numpy(), 7.0, err_msg=name)
            # A traced assignment is told of while tracing; a raw one is not.
            expected = [] if name == "raw" else paths
            assert sorted(subject.assigned) == sorted(expected), (name, subject.assigned)


@sizes(2)
def case_xla_cannot_wait():
    subject = Subject()
    compiled = tf.function(lambda: subject.model.layers[-1].kernel + 1, jit_compile=True)
    text = outcome(compiled)
    assert "ExchangeError" in text and "jit_compile=False" in text, text
    with futures.plain(subject.model.variables):
        np.testing.assert_array_equal(compiled(), subject.model.layers[-1].kernel.numpy() + 1)


@sizes(2, 3)
def case_release_makes_ordinary_variables():
    subject = Subject()
    subject.posts.post_late(5, 0)
    futures.release(subject.model.variables)
    assert runtime.backend().num_pending() == 0
    for v, value in zip(subject.posts.variables, subject.posts.expected(5), strict=True):
        assert type(v) is keras.Variable
        np.testing.assert_array_equal(v.numpy(), value)
    graph = tf.function(lambda: subject.model(X)).get_concrete_function().graph
    assert not [op for op in graph.get_operations() if op.type == "TfscaleAwait"]
