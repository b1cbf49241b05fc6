"""Ranks that begin a `fit` with the same samples, or with different weights: neither is meant."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.data.keras_pass import argument_of_fit
from tfscale.fit import adapted_layers
from tfscale.optimizer.distributed import is_distributed

logger = logging.getLogger("tfscale")

_PROBED_BYTES = 1 << 16
_NOT_BUILT = "not built"
# These make weights equal before the first step, or look behind it.
_EQUALISING = {
    "BroadcastGlobalVariablesCallback",
    "ConsistencyCheck",
    "ParameterAveraging",
}


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


def ranks_of(model: Any) -> list[int]:
    """Return the ranks that train the same model as this one."""
    process_set = getattr(getattr(model, "optimizer", None), "process_set", None)
    return list(getattr(process_set, "ranks", None) or range(runtime.size()))


def first_weights(model: Any, callbacks: set[str]) -> str:
    """Return a digest of what a new model begins with, for comparison with that of other ranks.

    Args:
        model: Compiled.
        callbacks: Names of tfscale's classes among the callbacks of `fit`.

    Returns:
        "" where nothing is to be compared: the model trains alone, or a callback looks after its
        weights. The same text for all models that have trained.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if not is_distributed(optimizer) or callbacks & _EQUALISING:
        return ""
    if int(optimizer.iterations.numpy()) > 0:
        return "trained"
    if not model.built:
        return _NOT_BUILT
    digest = 0
    for variable in [*model.trainable_variables, *adapted_layers.statistics(model)]:
        if optimizer.is_local_var(variable):
            continue
        digest = zlib.crc32(np.ascontiguousarray(variable.numpy()).view(np.uint8), digest)
    return f"{digest:08x}"


def compare_weights(model: Any, callbacks: set[str]) -> None:
    """Warn where ranks begin with different weights. Collective.

    Args:
        model: Compiled.
        callbacks: As for `first_weights`.
    """
    own = {"ranks": ranks_of(model), "first weights": first_weights(model, callbacks)}
    _warn_of_unequal_weights(objects.allgather_object(own, name="first weights"))


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
        first_rank = other["ranks"][0] if rank in other["ranks"] else rank
        digests = every[first_rank]["first weights"], other["first weights"]
        is_unknown = _NOT_BUILT in digests
        if rank == first_rank or not all(digests) or (digests[0] == digests[1] and not is_unknown):
            continue
        if runtime.rank() == first_rank:
            logger.warning(
                "%s, and no callback makes them equal: models would stay different. Give fit "
                "tfscale.callbacks.BroadcastGlobalVariablesCallback(0), which also compares them "
                "later.",
                "Models that are built in the first step begin with weights of their own on each "
                "rank, unless seeds are equal" if is_unknown
                else f"Rank {rank} begins with other weights than rank {first_rank}",
            )  # fmt: skip
        return
