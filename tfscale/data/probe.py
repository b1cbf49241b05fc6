"""A look at a few samples, to tell whether all ranks were given the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.data.global_batches import GlobalBatches
from tfscale.data.slices import check_slices
from tfscale.errors import ExchangeError


def describe(data: Any) -> dict[str, Any] | None:
    """Return what ranks compare of the data of a `fit`: None of other data than `GlobalBatches`.

    Raises:
        ConfigError: It cannot be trained on.
    """
    if not isinstance(data, GlobalBatches):
        return None
    epochs = data._epochs
    check_slices(epochs.present().slices, is_training=True)
    return {"state": data.state(), "samples": epochs.source.probe()}


def agree(data: Any, every: Sequence[dict[str, Any] | None]) -> None:
    """Begin with the same epoch of the same data on all ranks.

    Args:
        data: This rank's.
        every: What all ranks have described.

    Raises:
        ExchangeError: They differ; on all ranks.
    """
    described = [rank or {"state": None, "samples": []} for rank in every]
    if None not in every:
        # A rank that stopped behind the last batch of an epoch has not counted this epoch.
        data.epoch = max(rank["state"]["epoch"] for rank in described)
        for rank in described:
            rank["state"]["epoch"] = data.epoch
    states = [rank["state"] for rank in described]
    if any(state != states[0] for state in states):
        raise ExchangeError(
            f"All ranks must cut the same global batches. Received: {states}, in rank order. Give "
            "GlobalBatches the same samples, batch_size and seed on every rank; it gives each its "
            "own slice."
        )
    require_same_samples([rank["samples"] for rank in described])


def require_same_samples(probes: Sequence[Sequence[Any]]) -> None:
    """Refuse a share of the samples on each rank, of which each would train on a share again.

    Args:
        probes: What the sources of the ranks returned.

    Raises:
        ExchangeError: They differ by more than rounding: ranks may have computed them.
    """
    for rank, probe in enumerate(probes):
        if len(probe) == len(probes[0]) and all(map(_is_alike, probe, probes[0])):
            continue
        raise ExchangeError(
            "All ranks must have all samples in the same order. Received: other samples on rank "
            f"{rank} than on rank 0. Give GlobalBatches everything, it gives each rank its own "
            "slice; or pass data that was shared out by hand to fit as it is."
        )


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    is_close = len(one) == len(other) and np.allclose(one, other, 1e-2, 1e-4, equal_nan=True)
    return bool(is_close)
