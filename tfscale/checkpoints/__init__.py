"""Checkpoints: their files and content, writing in the background, and resuming."""

from tfscale.checkpoints.files import Found, list_checkpoints

__all__ = ["Found", "list_checkpoints"]
