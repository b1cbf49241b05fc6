"""Gathers that fail or are given up: readers get the error, values stay, nothing is left."""

from __future__ import annotations

import gc

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import outcome
from tests.helpers.spawn import sizes
from tests.parallel.futures_model import Posts, Subject, X, Y
from tfscale.comm import runtime
from tfscale.comm.backends.base import MarkKind
from tfscale.comm.eager import has_stopped
from tfscale.internals.keras import raw_variable
from tfscale.optimizer import futures

ENGINE_ONLY = "nothing is posted past the end of a step"


def num_failed() -> int:
    """Return of how many variables this process remembers a failure."""
    return runtime.backend()._library.call("num_failed")


def post_without_last_rank(*posts: Posts) -> str:
    """Post on all ranks but the last, which stops; return what it is called."""
    last = tfscale.size() - 1
    for each in posts:
        each.run(tf.constant(1.0))
        futures.drain(each.variables)
    tfscale.barrier()
    if tfscale.rank() == last:
        runtime.backend().mark(MarkKind.STOP)
    else:
        for each in posts:
            each.run(tf.constant(2.0))
        runtime.backend().drain()
        runtime.backend().mark(MarkKind.STOP)
    return f"rank {last} stopped"


def start_anew() -> None:
    """Continue after gathers were given up, as the next `fit` does."""
    tfscale.barrier()
    runtime.start_incarnation()


def require_values(posts: Posts, step: int, read) -> None:
    for v, value in zip(posts.variables, posts.expected(step), strict=True):
        np.testing.assert_array_equal(read(v).numpy(), value)


@sizes(2, 3)
def case_a_gather_that_is_given_up():
    subject = Subject()
    model, posts = subject.model, subject.posts
    model.predict(X, verbose=0)
    why = post_without_last_rank(posts)
    require_values(posts, 1, raw_variable)
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
                assert has_stopped(error.message) and why in error.message
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
    require_values(posts, 3, lambda v: v)
    assert num_failed() == 0
    model.predict(X, verbose=0)


@sizes(2, 3)
def case_a_failure_of_one_model_is_not_that_of_another():
    one, other = Subject(), Subject()
    other.posts.run(tf.constant(5.0))
    why = post_without_last_rank(one.posts)
    require_values(other.posts, 5, lambda v: v)
    text = outcome(one.model.get_weights)
    assert (why in text) == (tfscale.rank() < tfscale.size() - 1), text
    start_anew()
    one.posts.run(tf.constant(2.0))
    other.posts.run(tf.constant(3.0))
    require_values(one.posts, 2, lambda v: v)
    require_values(other.posts, 3, lambda v: v)


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
    runtime.backend().drain()
    assert runtime.backend()._library.call("num_pending") == 0 and num_failed() == 0


@sizes(2, 3)
def case_release_after_a_failure():
    subject = Subject()
    why = post_without_last_rank(subject.posts)
    if tfscale.rank() < tfscale.size() - 1:
        assert why in outcome(lambda: futures.release(subject.model.variables))
    else:
        futures.release(subject.model.variables)
    assert all(type(v) is keras.Variable for v in subject.posts.variables)
    require_values(subject.posts, 1, lambda v: v)
    start_anew()
