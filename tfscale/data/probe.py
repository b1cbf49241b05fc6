"""A look at a few samples, to tell whether all ranks were given the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.errors import ExchangeError

_N_VALUES = 64


def part_of(sample: Any) -> list[float] | str:
    """Return the first values of a sample: numbers, or the text of anything else."""
    values = np.ravel(np.asarray(sample))[:_N_VALUES]
    is_number = values.dtype.kind in "fiub"
    return values.astype(np.float64).tolist() if is_number else repr(values.tolist())


def require_same_samples(probes: Sequence[Sequence[Any]]) -> None:
    """Refuse a share of the samples on each rank, of which each would train on a share again.

    Args:
        probes: What `part_of` returned for the same samples of each rank.

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
