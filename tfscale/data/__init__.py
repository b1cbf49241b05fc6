"""Data: global batches whose slices the ranks share out without talking to each other."""

from tfscale.data.global_batches import GlobalBatches

__all__ = ["GlobalBatches"]
