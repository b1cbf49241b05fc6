"""Unit tests leave nothing: what one of them initialised is gone before the next."""

import pytest

from tfscale.comm import runtime


@pytest.fixture(autouse=True)
def not_initialised():
    """Forget a job of one process that a test has joined."""
    before = runtime._state
    yield
    runtime._state = before
