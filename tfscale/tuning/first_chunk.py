"""How many layers form the first chunk: chosen from the times of a few steps."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from tfscale import runtime
from tfscale.exchange.chunked import Chunked
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.search import best_first_chunk
from tfscale.plan.specs import BYTES_PER_VALUE
from tfscale.plan.times import Scenario
from tfscale.trace.recorder import has_events
from tfscale.tuning.layer_probe import LayerMeasurement, LayerProbe, measured_machine

logger = logging.getLogger("tfscale")


class FirstChunkWatch:
    """Watches steps that exchange each layer alone, then chooses where the first chunk ends."""

    may_cut = False

    def __init__(self, strategy: Chunked, layers: Sequence[str]) -> None:
        """Begin to watch.

        Args:
            strategy: One that must probe.
            layers: Paths of the layers that own the exchanged variables, in the order of the model.
        """
        self._strategy = strategy
        self._n_layers = len(layers)
        self._probe = LayerProbe(layers) if has_events() else None
        self._has_chosen = False

    def step(self) -> Chunked | None:
        """Count a step; after the last one, choose. Collective, on the main thread.

        Returns:
            The strategy, equal on all ranks; None before the last step and behind it. Half of the
            layers where the backend measures nothing, 1 where there is nothing to choose.
        """
        if self._has_chosen:
            return None
        first = max(1, self._n_layers // 2)
        if self._probe is not None:
            found = self._probe.step()
            if not self._probe.is_over:
                return None
            first = self._choose(found) if found is not None else 1
        self._has_chosen = True
        return dataclasses.replace(self._strategy, first_chunk_layers=first)

    def _choose(self, found: LayerMeasurement) -> int:
        layers = [
            Layer(path, ((f"{path}/gradients", n_bytes // BYTES_PER_VALUE),))
            for path, n_bytes in zip(found.layers, found.n_bytes, strict=True)
        ]
        table, size = LayerTable("measured", tuple(layers)), runtime.size()
        machine = measured_machine(table, found, size, 1, None)
        chunks = self._strategy.chunks if isinstance(self._strategy.chunks, int) else 2
        first = best_first_chunk(Scenario(table, machine, size, size), chunks)
        logger.info(
            "The first chunk takes %d of %d layers (%.0f MB/s, %.0f us per message).",
            first,
            len(layers),
            machine.bytes_per_s / 1e6,
            machine.latency_s * 1e6,
        )
        return first
