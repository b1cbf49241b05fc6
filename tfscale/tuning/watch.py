"""Strategies that learn from the steps of a `fit`, and who learns for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import keras

from tfscale.exchange.auto import Auto
from tfscale.exchange.base import Exchange
from tfscale.exchange.chunked import Chunked
from tfscale.tuning.auto_plan import AutoWatch
from tfscale.tuning.first_chunk import FirstChunkWatch

WhyUncut = Callable[[keras.Model], str]


class Watch(Protocol):
    """Sees the steps of one `fit` after another.

    Attributes:
        may_cut: Whether it may return a strategy that shards parameters.
    """

    may_cut: bool

    def step(self) -> Exchange | None:
        """Count a step; return the strategy for the next one if it changes. Collective."""
        ...


def watch(
    strategy: Exchange, layers: Sequence[str], model: keras.Model | None, why_uncut: WhyUncut
) -> Watch | None:
    """Return who looks at steps for a strategy; None for most strategies.

    Args:
        strategy: What the user chose.
        layers: Paths of the layers that own the exchanged variables, in the order of the model.
        model: That is trained, where it is known.
        why_uncut: Returns why its parameters cannot be sharded, or an empty string.
    """
    if isinstance(strategy, Auto):
        return AutoWatch(strategy, layers, model, why_uncut)
    if isinstance(strategy, Chunked) and strategy.must_probe:
        return FirstChunkWatch(strategy, layers)
    return None
