"""Unit tests leave nothing: what one of them initialised is gone before the next."""

import pytest

from tfscale.testing import inspect


@pytest.fixture(autouse=True)
def not_initialised():
    """Forget a job of one process that a test has joined."""
    with inspect.isolated_job():
        yield
