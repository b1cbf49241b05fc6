"""Options of dense layers that exchange activations and errors, and what pays."""

from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfscale
from tfscale.config import ConfigError, PlanError
from tfscale.exchange.dense import require_own
from tfscale.internals.trace import context_of
from tfscale.plan.layers import is_partial_cheaper

COUNTS = st.integers(1, 5000)


@given(COUNTS, COUNTS, COUNTS, st.integers(2, 64))
def test_the_condition_of_the_thesis(n_in, n_out, batch, size):
    sent = Fraction(n_in * batch, size) + n_out * batch
    assert is_partial_cheaper(n_in, n_out, batch, size) == (sent < n_in * n_out)


def test_layers_of_vgg_a():
    """At a global batch of 256; a batch beyond which weights are fewer; one process."""
    assert is_partial_cheaper(25088, 4096, 256, 4)
    assert not is_partial_cheaper(4096, 1000, 4096, 4)
    assert not is_partial_cheaper(25088, 4096, 256, 1)


@pytest.mark.parametrize("batch", [0, -1, 2.5, True])
def test_global_batch_is_a_number_of_samples(batch):
    with pytest.raises(ConfigError, match="global_batch must be 1 or more. Received"):
        tfscale.Sharded(global_batch=batch)


def test_a_gradient_times_a_constant_is_still_the_layers_own():
    """Not so one that is multiplied by another tensor, or by which a constant is divided."""
    kernel = keras.Variable(np.ones(2), name="kernel")

    @tf.function(autograph=False)
    def step(inputs):
        made = tf.identity(inputs)
        context_of(made.graph).made[made.name] = id(kernel)
        for own in (made, made * 0.5, 0.5 * made, made / 2.0):
            require_own(own, kernel)
        for other in (inputs, made * inputs, 2.0 / made):
            with pytest.raises(PlanError, match="what back-propagation"):
                require_own(other, kernel)

    step(tf.ones(2))
