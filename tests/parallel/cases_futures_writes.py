"""Writing a parameter whose gather is pending, and parameters that are ordinary again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import outcome
from tests.helpers.spawn import sizes
from tests.parallel.futures_model import Subject, X, build
from tfscale.comm import runtime
from tfscale.optimizer import futures

ENGINE_ONLY = "nothing is posted past the end of a step"


def ways_of_writing(
    model: keras.Model, new: list[np.ndarray], folder: str
) -> dict[str, Callable[[], Any]]:
    """Return functions that give the model's variables new values."""
    pairs = list(zip(model.trainable_variables, new, strict=True))
    other = build()
    other.set_weights(new)
    other.save_weights(f"{folder}/model.weights.h5")
    path = tf.train.Checkpoint(model=other).write(f"{folder}/checkpoint")
    return {
        "assign": lambda: [v.assign(value) for v, value in pairs],
        "assign_add": lambda: [v.assign_add(value - v) for v, value in pairs],
        "traced": tf.function(lambda: [v.assign(value) for v, value in pairs] and None),
        "raw": tf.function(lambda: [v.value.assign(value) for v, value in pairs] and None),
        "set_weights": lambda: model.set_weights(new),
        "load_weights": lambda: model.load_weights(f"{folder}/model.weights.h5"),
        "checkpoint": lambda: tf.train.Checkpoint(model=model).read(path),
    }


@sizes(2, 3)
def case_assignments_wait_and_win():
    subject = Subject()
    model, variables = subject.model, subject.posts.variables
    paths = [v.path for v in variables]
    new = [np.full(v.shape, 7.0, "float32") for v in variables]
    with tempfile.TemporaryDirectory() as folder:
        for name, write in ways_of_writing(model, new, folder).items():
            subject.step += 1
            subject.assigned.clear()
            subject.posts.post_late(subject.step, subject.step % tfscale.size())
            write()
            tfscale.barrier()
            assert runtime.backend()._library.call("num_pending") == 0, name
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
    assert runtime.backend()._library.call("num_pending") == 0
    for v, value in zip(subject.posts.variables, subject.posts.expected(5), strict=True):
        assert type(v) is keras.Variable
        np.testing.assert_array_equal(v.numpy(), value)
    graph = tf.function(lambda: subject.model(X)).get_concrete_function().graph
    assert not [op for op in graph.get_operations() if op.type == "TfscaleAwait"]
