"""Reading a parameter whose gather is pending gives the new value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.helpers.spawn import sizes
from tests.parallel.futures_model import Subject, X, Y
from tests.parallel.parameter_reads import WAYS

ENGINE_ONLY = "nothing is posted past the end of a step"


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
    """`attach`, which `tfscale.prepare` calls, has them traced again, Keras's and the user's."""
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
        # The second time what was traced again runs.
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
