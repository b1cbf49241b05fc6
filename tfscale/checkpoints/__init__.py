"""Checkpoints: their files, what they hold, writing them in the background and resuming."""

from tfscale.checkpoints.files import Found, list_checkpoints

__all__ = ["Found", "list_checkpoints"]
