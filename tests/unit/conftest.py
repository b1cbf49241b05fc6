"""Unit tests leave nothing: what one of them initialised is gone before the next."""

import pytest
from hypothesis import HealthCheck, settings

from tfscale.testing import inspect

# On a busy machine an example may take long though nothing is wrong.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def not_initialised():
    """Forget a job of one process that a test has joined."""
    with inspect.isolated_job():
        yield
