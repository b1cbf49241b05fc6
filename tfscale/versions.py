"""What software a rank runs."""

from __future__ import annotations

import keras
import tensorflow as tf

import tfscale


def versions() -> str:
    """Return the versions that must be equal on all ranks, as one line."""
    return f"tfscale {tfscale.__version__}, tensorflow {tf.__version__}, keras {keras.__version__}"
