"""The step at which gradients begin to have few bits."""

import pytest

from tfscale import Compression
from tfscale.exchange.residuals import Residuals


@pytest.mark.parametrize(
    ("compression", "n_steps", "first"),
    [
        (Compression.int4, 0, 500),  # not known
        (Compression.int4, 2000, 500),
        (Compression.int4, 40000, 2000),
        (Compression.int4(start_step=3), 40000, 3),
        (Compression.int8(start_step=3), 40000, 3),
    ],
)
def test_first_step_of_few_bits(compression, n_steps, first):
    residuals = Residuals(compression)
    residuals.expect(n_steps)
    found = {}
    for step in (0, first - 1, first):
        found[step] = int(residuals.bits())
        residuals.n_steps.assign(step + 1 if step == first - 1 else first - 1)
    assert found == {0: 16, first - 1: 16, first: compression.bits}
    residuals.n_steps.assign(first)
    residuals.expect(10**9)  # a later fit does not return to 16 bits
    assert int(residuals.bits()) == compression.bits
    assert int(Residuals(Compression.int8).bits()) == 8  # from the first step on
