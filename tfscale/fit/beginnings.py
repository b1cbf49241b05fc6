"""Ranks that begin a `fit` with the same samples, or with different weights: neither is meant."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale import runtime
from tfscale.data.keras_pass import argument_of_fit

logger = logging.getLogger("tfscale")

_PROBED_BYTES = 1 << 16


def first_samples() -> str:
    """Return a digest of the first samples that this rank was given; "" if they are no arrays."""
    arrays = tf.nest.flatten(argument_of_fit("x"))
    if not arrays or not all(isinstance(a, np.ndarray) and a.size for a in arrays):
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        rows = max(1, _PROBED_BYTES // max(1, array[0:1].nbytes))
        digest.update(np.ascontiguousarray(array[:rows]).tobytes())
    return digest.hexdigest()


def first_weights(optimizer: Any, variables: Sequence[keras.Variable]) -> str:
    """Return a digest of what a new model begins with; "" if it has trained or trains alone.

    Args:
        optimizer: The model's.
        variables: Those that have the same gradients on all ranks.
    """
    if not hasattr(optimizer, "_self_reducer") or int(optimizer.iterations.numpy()) > 0:
        return ""
    digest = 0
    for variable in variables:
        digest = zlib.crc32(np.ascontiguousarray(variable.numpy()).view(np.uint8), digest)
    return f"{digest:08x}"


def warn(every: Sequence[dict[str, Any]]) -> None:
    """Warn on the first rank of those concerned.

    Args:
        every: What `agreement.describe` returned on each rank.
    """
    _warn_of_equal_samples([rank["first samples"] for rank in every])
    _warn_of_unequal_weights(every)


def _warn_of_equal_samples(digests: list[str]) -> None:
    for digest in {d for d in digests if d and digests.count(d) > 1}:
        ranks = [rank for rank, other in enumerate(digests) if other == digest]
        if runtime.rank() == ranks[0]:
            logger.warning(
                "Ranks %s were given the same samples. Unless each shuffles them in its own way, "
                "they compute the same gradients, and so many ranks gain nothing. "
                "tfscale.data.GlobalBatches gives every rank its part.",
                ", ".join(map(str, ranks)),
            )


def _warn_of_unequal_weights(every: Sequence[dict[str, Any]]) -> None:
    for rank, other in enumerate(every):
        first = every[other["ranks"][0]]
        digests = first["first weights"], other["first weights"]
        if all(digests) and digests[0] != digests[1]:
            if runtime.rank() == other["ranks"][0]:
                logger.warning(
                    "Rank %d begins with other weights than rank %d, and no callback makes them "
                    "equal: their models will stay different. Give fit "
                    "tfscale.callbacks.BroadcastGlobalVariablesCallback(0), which also compares "
                    "them later, or call tfscale.broadcast_variables(model.weights) before it.",
                    rank, runtime.rank(),
                )  # fmt: skip
            return
