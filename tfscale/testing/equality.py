"""Comparisons that fail with an AssertionError: of values, and of values between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import tfscale


def require_identical(found: Iterable[Any], expected: Iterable[Any], message: str = "") -> None:
    """Require equal arrays, tensors or variables, pair by pair."""
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(_array(mine), _array(wanted), err_msg=message)


def require_close(
    found: Iterable[Any],
    expected: Iterable[Any],
    *,
    atol: float = 1e-10,
    rtol: float = 0.0,
    message: str = "",
) -> None:
    """Require arrays, tensors or variables that differ by `atol + rtol * abs(expected)` at most."""
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            _array(mine), _array(wanted), rtol=rtol, atol=atol, err_msg=message
        )


def require_equal_ranks(variables: Iterable[Any]) -> None:
    """Require that variables are equal bit for bit on all ranks. Collective.

    The error is the same on all ranks, so that none of them waits for another.
    """
    own = [(getattr(v, "path", ""), np.asarray(_array(v))) for v in variables]
    every = tfscale.allgather_object(own)
    for rank, theirs in enumerate(every):
        for (name, value), (_, first) in zip(theirs, every[0], strict=True):
            if value.dtype != first.dtype or value.tobytes() != first.tobytes():
                message = f"{name or 'a value'} of rank {rank} differs from that of rank 0"
                np.testing.assert_array_equal(value, first, err_msg=message, strict=True)
                raise AssertionError(f"{message}: in the sign of a zero or the bits of a NaN")


def _array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else value
