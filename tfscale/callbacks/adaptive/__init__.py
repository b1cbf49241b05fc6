"""Batch sizes that change during one `fit`."""
