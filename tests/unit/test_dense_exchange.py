"""Options of dense layers that exchange activations and errors, and what pays."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfscale
from tfscale.config import ConfigError
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
