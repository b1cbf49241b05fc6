"""Overlap of the gather of parameters: names of kernels, shares of time, table, picture."""

import keras
import pytest
import tensorflow as tf

from benchmarks.kernel_times import BACKWARD, FORWARD, by_pass, kernels_of
from benchmarks.worker_gathers import shares_of
from tests.helpers.single_job import single_job  # noqa: F401
from tfscale.testing import inspect


def test_kernels_are_told_apart_by_their_names():
    events = [
        ("net/conv/Relu:_FusedConv2D", 0, 1),
        ("net_3/dense/BiasAdd:Add", 1, 2),
        ("gradient_tape/net/conv/Conv2DBackpropFilter:Conv2DBackpropFilter", 2, 3),
        ("gradient_tape_1/net/mul:Mul", 3, 4),
        ("net/conv/TfscaleAwait:TfscaleAwait", 4, 5),
        ("network/conv/Relu:Relu", 5, 6),
        ("net/conv", 6, 7),
        ("sgd/AssignSubVariableOp:AssignSubVariableOp", 7, 8),
    ]
    passes = by_pass("net", events, 100)
    assert passes == {FORWARD: [(100, 101), (101, 102)], BACKWARD: [(102, 103), (103, 104)]}
    numbered = by_pass("net_2", [("net_2/a:Mul", 0, 1), ("net_2_1/a:Mul", 1, 2)], 0)
    assert len(numbered[FORWARD]) == 2


def test_kernels_of_a_step_lie_within_it():
    layer = keras.layers.Dense(32)
    model = keras.Sequential([keras.Input((32,)), layer], name="net")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, layer.kernel.value)

    x = tf.ones((64, 32))
    step(x)
    times = []

    def run():
        times.append(inspect.clock_ns())
        step(x)
        times.append(inspect.clock_ns())

    passes = kernels_of("net", run)
    slack = 10_000_000  # between the two clocks; the process may be off the core meanwhile
    for spans in passes.values():
        assert spans
        assert all(times[0] - slack < b <= e < times[1] + slack for b, e in spans)
    assert min(passes[FORWARD]) < min(passes[BACKWARD])


def test_every_moment_of_the_gathers_is_hidden_once_or_exposed():
    # On the wire in 0..10 and 20..30; both passes run in 5..7.
    gathers = [(0, 8), (4, 10), (20, 30)]
    passes = {FORWARD: [(5, 7), (25, 40)], BACKWARD: [(-5, 2), (5, 7)]}
    shares = shares_of(gathers, passes)
    assert shares == pytest.approx({"forward": 7 / 20, "backward": 2 / 20, "exposed": 11 / 20})
    assert shares_of(gathers, {FORWARD: [], BACKWARD: []})["exposed"] == 1
