"""Naming gradients that are not finite, among many."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale import DistributedOptimizer

N_VARIABLES = 300  # more than one op may have as inputs


@pytest.mark.parametrize("bad", [0, 127, 128, N_VARIABLES - 1])
def test_the_spoiled_gradient_of_many_is_named(bad, caplog):
    tfscale.init()
    variables = [keras.Variable(1.0, name=f"v{i}") for i in range(N_VARIABLES)]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5), nonfinite="skip")

    @tf.function
    def step(gradients):
        optimizer.apply_gradients(list(zip(tf.unstack(gradients), variables, strict=True)))

    gradients = np.ones(N_VARIABLES, np.float32)
    step(gradients)
    with caplog.at_level("WARNING", logger="tfscale"):
        gradients[bad] = np.nan
        step(gradients)
    assert f"rank 0 in v{bad}." in caplog.text
    assert optimizer.n_skipped_steps == 1
    assert [float(v) for v in variables] == [0.5] * N_VARIABLES

    functions = [f.graph for f in step.get_concrete_function(gradients).graph._functions.values()]
    python_ops = [o for g in functions for o in g.get_operations() if "PyFunc" in o.type]
    # TensorFlow visits an op again for each of its inputs: twice as many took four times as long.
    assert python_ops and max(len(o.inputs) for o in python_ops) <= 128
