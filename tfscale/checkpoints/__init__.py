"""Files of checkpoints: written aside, checked by a checksum, read by any number of ranks."""

from tfscale.checkpoints.folders import Found, list_checkpoints

__all__ = ["Found", "list_checkpoints"]
