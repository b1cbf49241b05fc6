"""Global batches, of which each rank serves a slice without communication."""

from tfscale.data.global_batches import GlobalBatches

__all__ = ["GlobalBatches"]
