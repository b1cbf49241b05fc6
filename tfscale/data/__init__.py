"""Global batches, of which each rank serves a slice without communication."""

from typing import TYPE_CHECKING, Any

from tfscale.data.global_batches import GlobalBatches
from tfscale.missing import lookup

__all__ = ["GlobalBatches"]

if not TYPE_CHECKING:  # other names are errors for type checkers, too

    def __getattr__(name: str) -> Any:
        return lookup(f"data.{name}")
