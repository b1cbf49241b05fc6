"""Comparison of the ranks' callbacks and weights before their first update."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import objects
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.internals.keras import raw_variable

HINT = (
    "Give fit the same ones: a callback that talks to other ranks waits for them. To run a Keras "
    "callback on one rank, wrap it in tfscale.callbacks.RankZero on all of them."
)


def gather(
    of_rank: dict[str, Any],
    callbacks: Sequence[str] | None,
    process_set: ProcessSet = global_process_set,
) -> list[dict[str, Any]]:
    """Return the descriptions that all ranks give of the training they begin. Collective.

    A rank calls this when a `fit` with tfscale callbacks begins, or else, with None for their
    names, in the first step of a DistributedOptimizer. Both are one collective, so that ranks which
    differ in this find each other: an ExchangeError.
    """
    name = "beginning of training"
    said = objects.allgather_object((of_rank, callbacks), name=name, process_set=process_set)
    names = {
        rank: "none" if found is None else ", ".join(found)
        for rank, (_, found) in zip(process_set.ranks or [], said, strict=True)
    }
    if "none" in names.values():
        objects.require_equal_values(names, "tfscale callbacks", HINT)
    return [of_rank for of_rank, _ in said]


def compare(distributed: Any, variables: Sequence[Any]) -> bool:
    """Require equal first weights on the ranks of an optimizer. Collective.

    Returns whether they were compared: not by one rank alone, on another thread than the main one,
    or in a function that creates the variables and is traced again.
    """
    bound = distributed.bound
    group = bound.process_set.group()
    is_main = threading.current_thread() is threading.main_thread()
    if group.size == 1 or group.rank < 0 or not is_main:
        return False
    with tf.init_scope():
        if not all(bool(raw_variable(v).is_initialized()) for v in variables):
            return False
        of_rank: dict[str, Any] = {"weights": digest_of(distributed, variables)}
        of_rank["shapes"] = str([tuple(v.shape) for v in variables])
        said_by_rank = gather(of_rank, None, bound.process_set)
    # Where shapes differ, the comparison of plans names the first parameter.
    if len({said["shapes"] for said in said_by_rank}) == 1:
        digests = {r: said["weights"] for r, said in zip(group.ranks, said_by_rank, strict=True)}
        for ranks in bound.groups.ranks if bound.groups else [group.ranks]:  # groups begin apart
            require_equal_weights({r: digests[r] for r in ranks})
    return True


def digest_of(distributed: Any, variables: Sequence[Any]) -> bytes:
    """Return a digest of the weights with which an optimizer begins, to be compared over ranks.

    It is the same for all models that have trained. Local variables may differ.
    """
    if int(distributed.iterations.numpy()) > 0:
        return b"trained"
    digest = 0
    for variable in variables:
        if not distributed.is_local_var(variable):
            data = np.ascontiguousarray(variable.numpy()).view(np.uint8)
            digest = zlib.crc32(data, digest)
    return digest.to_bytes(4, "big")


def require_equal_weights(digests: dict[int, bytes]) -> None:
    """Raise an error unless all ranks, the keys of `digests`, begin with the same weights."""
    objects.require_equal_values(
        digests,
        "The first weights",
        "Give fit tfscale.callbacks.Synchronize(), or call tfscale.broadcast_variables("
        "model.variables) before the first step; set register_local_var for variables that are to "
        "differ.",
    )
