"""Reading and writing a parameter whose gather is pending, has failed or was given up."""

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import require_engine, sizes
from tests.helpers.ranks import outcome
from tests.parallel.futures_model import Posts, Subject, X, Y, build
from tests.parallel.parameter_reads import WAYS
from tfscale.optimizer import futures
from tfscale.testing import inspect, require_identical

require_engine("nothing is posted past the end of a step")


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

    @tf.function
    def inner():
        return [v + 1 for v in model.trainable_variables]

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.int32)])
    def signed(x):
        return model(x)

    outer = tf.function(lambda: inner())
    signed_x = lambda: signed(tf.constant(X, tf.int32))  # noqa: E731
    return {"method": Holder().method, "inner": inner, "outer": outer, "signed": signed_x}


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
    assert {"method", "inner", "signed"} <= set(subject.names), subject.names
    subject.check("predict", lambda model: model.predict(X, verbose=0))
    subject.check("evaluate", lambda model: model.evaluate(X, Y, verbose=0))
    for name in 2 * list(readers[id(subject.model)]):  # at last what was traced again runs
        subject.check(name, lambda model, name=name: readers[id(model)][name]())


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
                require_identical(values, posts.expected(k), message=f"{kind} {step} {k}")


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
            assert num_pending() == 0, name
            for v in variables:
                np.testing.assert_array_equal(v.numpy(), 7.0, err_msg=name)
            # A traced assignment is told of while tracing; a raw one is not.
            expected = [] if name == "raw" else paths
            assert sorted(subject.assigned) == sorted(expected), (name, subject.assigned)


@sizes(2)
def case_xla_cannot_wait():
    subject = Subject()
    kernel = subject.model.layers[-1].kernel
    compiled = tf.function(lambda: kernel + 1, jit_compile=True)
    text = outcome(compiled)
    assert "ExchangeError" in text and "jit_compile=False" in text, text
    with futures.plain(subject.model.variables):
        np.testing.assert_array_equal(compiled(), kernel.numpy() + 1)


def num_pending() -> int:
    return inspect.pending_gathers()


def num_failed() -> int:
    return inspect.failed_gathers()


def post_without_last_rank(*posts: Posts) -> str:
    """Post on all ranks but the last, which stops; return the name of the collective."""
    last = tfscale.size() - 1
    for each in posts:
        each.run(tf.constant(1.0))
        futures.drain(each.variables)
    tfscale.barrier()
    if tfscale.rank() == last:
        inspect.leave_steps()
    else:
        for each in posts:
            each.run(tf.constant(2.0))
        inspect.wait_for_gathers()
        inspect.leave_steps()
    return f"rank {last} stopped"


def start_anew() -> None:
    """Continue after gathers were given up, as the next `fit` does."""
    tfscale.barrier()
    inspect.return_to_steps()


def require_values(posts: Posts, step: int, read=lambda v: v) -> None:
    require_identical(map(read, posts.variables), posts.expected(step))


@sizes(2, 3)
def case_a_gather_that_is_given_up():
    subject = Subject()
    model, posts = subject.model, subject.posts
    model.predict(X, verbose=0)
    why = post_without_last_rank(posts)
    require_values(posts, 1, inspect.raw_variable)
    if tfscale.rank() < tfscale.size() - 1:
        assert num_failed() == len(posts.variables)
        for v in posts.variables:
            assert outcome(v.numpy).startswith("ExchangeError") and why in outcome(v.numpy)
            assert why in outcome(lambda v=v: v + 1) and why in repr(v)
        assert why in outcome(model.get_weights)
        assert why in outcome(lambda: futures.drain(model.variables))
        for read in (lambda: model.predict(X, verbose=0), lambda: model.evaluate(X, Y, verbose=0)):
            try:
                read()
            except tf.errors.AbortedError as error:
                assert why in error.message
            else:
                raise AssertionError("no error")
        # What is assigned is there; the other variables are as before.
        for v in posts.variables[:2]:
            v.assign(tf.ones(v.shape))
            np.testing.assert_array_equal(v.numpy(), 1.0)
        assert num_failed() == len(posts.variables) - 2
        assert why in outcome(posts.variables[2].numpy)
    start_anew()
    posts.run(tf.constant(3.0))
    require_values(posts, 3)
    assert num_failed() == 0
    model.predict(X, verbose=0)


@sizes(2, 3)
def case_a_failure_of_one_model_is_not_that_of_another():
    one, other = Subject(), Subject()
    other.posts.run(tf.constant(5.0))
    why = post_without_last_rank(one.posts)
    require_values(other.posts, 5)
    text = outcome(one.model.get_weights)
    assert (why in text) == (tfscale.rank() < tfscale.size() - 1), text
    start_anew()
    one.posts.run(tf.constant(2.0))
    other.posts.run(tf.constant(3.0))
    require_values(one.posts, 2)
    require_values(other.posts, 3)


@sizes(2, 3)
def case_nothing_is_left_of_deleted_variables():
    """Neither of those whose gather failed nor of those whose gather is under way."""
    variables = [keras.Variable(np.ones([9], "float32")) for _ in range(3)]
    futures.make_futures(variables)
    posts = Posts(variables)
    post_without_last_rank(posts)
    assert num_failed() == (3 if tfscale.rank() < tfscale.size() - 1 else 0)
    del variables, posts
    gc.collect()
    assert num_failed() == 0
    start_anew()

    variables = [keras.Variable(np.ones([9], "float32")) for _ in range(3)]
    futures.make_futures(variables)
    posts = Posts(variables)
    posts.post_late(1, 0)
    del variables, posts
    gc.collect()
    inspect.wait_for_gathers()
    assert num_pending() == 0 and num_failed() == 0


@sizes(2, 3)
def case_release_makes_ordinary_variables():
    """Also after a failure, of which it tells."""
    subject = Subject()
    model, posts = subject.model, subject.posts
    posts.post_late(5, 0)
    futures.release(model.variables)
    assert num_pending() == 0 and all(type(v) is keras.Variable for v in posts.variables)
    require_identical(posts.variables, posts.expected(5))
    graph = tf.function(lambda: model(X)).get_concrete_function().graph
    assert not [op for op in graph.get_operations() if op.type == "TfscaleAwait"]

    failed = Subject()
    why = post_without_last_rank(failed.posts)
    text = outcome(lambda: futures.release(failed.model.variables))
    assert (why in text) == (tfscale.rank() < tfscale.size() - 1), text
    assert all(type(v) is keras.Variable for v in failed.posts.variables)
    require_values(failed.posts, 1)
    start_anew()
