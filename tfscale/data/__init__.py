"""Global batches, of which each rank serves a slice without communication."""

from typing import Any

from tfscale.data.global_batches import GlobalBatches
from tfscale.missing import lookup

__all__ = ["GlobalBatches"]


def __getattr__(name: str) -> Any:
    return lookup(f"data.{name}")
