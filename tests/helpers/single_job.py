"""A job of one process, for unit tests that are no ranks of a larger one."""

from collections.abc import Iterator

import pytest

import tfscale


@pytest.fixture(autouse=True)
def single_job() -> Iterator[None]:
    """Be a job of one process during each test of a module that imports this."""
    tfscale.init()
    yield
    tfscale.shutdown()
