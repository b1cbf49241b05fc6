"""A look at a few samples, to tell whether all ranks were given the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfscale.config import ConfigError, ExchangeError
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import argument_of_fit
from tfscale.data.slices import check_slices

_ARGUMENTS = ("x", "validation_data")  # of `fit`


def describe() -> dict[str, dict[str, Any] | None]:
    """Describe the data of the running `fit`.

    Returns:
        What ranks compare of each argument: None of other data than `GlobalBatches`.
    """
    return {name: _describe(argument_of_fit(name), name == "x") for name in _ARGUMENTS}


def require_usable(every: Sequence[dict[str, dict[str, Any] | None]]) -> None:
    """Refuse data that a rank cannot use.

    Args:
        every: What all ranks have described.

    Raises:
        ConfigError: A rank cannot use its data; on all ranks.
    """
    for rank, described in enumerate(every):
        for name, one in described.items():
            if one and one["error"]:
                raise ConfigError(
                    f"All ranks must be able to use {name} of fit. Received: {one['error']} (on "
                    f"rank {rank}). Give it data that it can read, in batches that all can share."
                )


def agree(every: Sequence[dict[str, dict[str, Any] | None]]) -> None:
    """Begin with the same epoch of the same data on all ranks.

    Validation data is compared where it is given: a rank may have none, or share it out by hand.

    Args:
        every: What all ranks have described, and can use.

    Raises:
        ExchangeError: They differ; on all ranks.
    """
    trained, validated = ([rank[name] for rank in every] for name in _ARGUMENTS)
    if any(trained):
        if None not in trained:
            _take_up_epoch([rank["state"] for rank in trained if rank])
        _require_equal([rank or {"state": None, "samples": []} for rank in trained], "x")
    _require_equal(validated, "validation_data")


def _describe(data: Any, is_trained_on: bool) -> dict[str, Any] | None:
    if not isinstance(data, GlobalBatches):
        return None
    epochs = data._epochs
    try:
        slices = epochs.slices(data.batch_size)
        check_slices(slices, is_training=is_trained_on or epochs.is_shuffled)
        state, samples = data.state(), epochs.source.probe()
    except Exception as error:  # whatever it is, the other ranks wait for this description
        return {"error": f"{type(error).__name__}: {error}"}
    if not is_trained_on:
        state.pop("epoch")  # only training counts it, perhaps that of another model
    return {"error": "", "state": state, "samples": samples}


def _take_up_epoch(states: Sequence[dict[str, int]]) -> None:
    """Train on from the latest epoch: a rank that stopped behind its last batch has not counted it.

    Args:
        states: Of the training data on all ranks; changed.
    """
    data = argument_of_fit("x")
    data.epoch = max(state["epoch"] for state in states)
    for state in states:
        state["epoch"] = data.epoch


def _require_equal(described: Sequence[dict[str, Any] | None], name: str) -> None:
    states = {rank: one["state"] for rank, one in enumerate(described) if one}
    if any(state != next(iter(states.values())) for state in states.values()):
        raise ExchangeError(
            f"All ranks must cut the same global batches. Received: {name} of fit by rank: "
            f"{states}. Give GlobalBatches the same samples, batch_size and seed on every rank; it "
            "gives each its own slice."
        )
    require_same_samples([one["samples"] if one else None for one in described], name)


def require_same_samples(probes: Sequence[Sequence[Any] | None], name: str = "x") -> None:
    """Refuse a share of the samples on each rank, of which each would use a share again.

    Args:
        probes: What the sources of the ranks returned; None where there is none.
        name: The argument of `fit`.

    Raises:
        ExchangeError: They differ by more than rounding: ranks may have computed them.
    """
    given = [(rank, probe) for rank, probe in enumerate(probes) if probe is not None]
    for rank, probe in given:
        first_rank, first = given[0]
        if len(probe) == len(first) and all(map(_is_alike, probe, first)):
            continue
        raise ExchangeError(
            "All ranks must have all samples in the same order. Received: other samples on rank "
            f"{rank} than on rank {first_rank}, as {name} of fit. Give GlobalBatches everything, "
            "it gives each rank its own slice, made with one tf.random.set_seed on all ranks; or "
            "pass data that was shared out by hand to fit as it is."
        )


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    is_close = len(one) == len(other) and np.allclose(one, other, 1e-2, 1e-4, equal_nan=True)
    return bool(is_close)
