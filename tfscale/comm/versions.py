"""What software a rank runs."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

import tfscale
from tfscale.config import ExchangeError


def versions() -> str:
    """Return the versions that must be equal on all ranks, as one line."""
    return f"tfscale {tfscale.__version__}, tensorflow {tf.__version__}, keras {keras.__version__}"


def require_equal(every: Sequence[str]) -> None:
    """Refuse ranks that run different software.

    Args:
        every: What `versions` returns on each rank, in rank order.

    Raises:
        ExchangeError: They differ.
    """
    other = next((rank for rank, text in enumerate(every) if text != every[0]), None)
    if other is not None:
        raise ExchangeError(
            "All ranks must run the same software. Received: "
            f"{every[0]} on rank 0 and {every[other]} on rank {other}. Install the same versions."
        )
