"""The errors of backends, found in what TensorFlow makes of them."""

from __future__ import annotations

import re

import tensorflow as tf

_ENGINE_TEXT = re.compile(r"TFSCALE_(FAILED|STOPPED): (.*?)(?=\n|$)")


def engine_text(message: str) -> str:
    """Return what the engine said.

    Args:
        message: TensorFlow's: the engine's text within those of the ops around it.

    Returns:
        The engine's sentence; the whole message if there is none.
    """
    found = _ENGINE_TEXT.search(message)
    # TensorFlow puts the node's name behind the text of an op, on the same line.
    return re.sub(r"\s*\[\[\{\{node.*| \[Op:.*", "", found[2]) if found else message


def has_stopped(message: str) -> bool:
    """Return whether the collective was given up because another rank stopped."""
    return "TFSCALE_STOPPED" in message


def is_exchange_error(error: tf.errors.OpError) -> bool:
    """Return whether an error comes from a collective: the engine's, or one of Horovod's.

    Args:
        error: As TensorFlow raises it. Horovod's texts have no mark of their own: they name
            Horovod, or its op in the line that TensorFlow adds.
    """
    if isinstance(error, tf.errors.InternalError):
        return True
    message = error.message.lower()
    return bool(re.search(r"tfscale_failed|horovod|tfscale\.g\d", message))
