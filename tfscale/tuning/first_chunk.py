"""How many layers form the first chunk: chosen from the times of a few steps."""

from __future__ import annotations

import logging
from collections import defaultdict

import numpy as np

from tfscale import objects, runtime
from tfscale.plan.chunks import choose_first_chunk, owner_of
from tfscale.trace.recorder import Listener, has_events

logger = logging.getLogger("tfscale")

_UNMEASURED_STEPS = 3  # tracing, comparing plans, warming up
_MEASURED_STEPS = 7


class FirstChunkProbe:
    """Watches steps that exchange each layer alone, then chooses.

    Every rank measures when its layers' gradients exist and how long their exchange takes; means
    over the ranks enter `tfscale.plan.chunks.choose_first_chunk`, so all ranks choose alike.
    """

    def __init__(self, layers: list[str]) -> None:
        """Begin to watch.

        Args:
            layers: Paths of the layers that own the exchanged variables, in the order of the model.
        """
        self._layers = layers
        self._n_steps = 0
        self._listener = Listener() if has_events() else None

    def step(self) -> int | None:
        """Count a step; after the last one, choose. Collective, on the main thread.

        Returns:
            The number of layers, equal on all ranks; None before the last step. Half of the
            layers where the backend measures nothing, 1 where there is nothing to choose.
        """
        self._n_steps += 1
        if self._listener is None:
            return max(1, len(self._layers) // 2)
        if self._n_steps == _UNMEASURED_STEPS:
            self._listener.take()
        if self._n_steps < _UNMEASURED_STEPS + _MEASURED_STEPS:
            return None
        measured = self._measure(self._listener.take())
        self._listener.close()
        every = objects.allgather_object(measured, name="times of layers")
        if len(every[0][2]) < 2:
            return 1
        ready_s, durations_s = np.mean([[rank[0], rank[1]] for rank in every], axis=0)
        n_bytes = np.array(every[0][2])
        # duration = latency + bytes / speed, by least squares; both must come out positive.
        slope, latency_s = np.polyfit(n_bytes, durations_s, 1)
        fastest = float(np.max(n_bytes / np.maximum(durations_s, 1e-9)))
        speed = 1 / slope if slope > 0 else max(fastest, 1.0)
        first = choose_first_chunk(
            list(ready_s), [int(n) for n in n_bytes], speed, max(float(latency_s), 0.0)
        )
        logger.info(
            "The first chunk takes %d of %d layers (%.0f MB/s, %.0f us per exchange).",
            first,
            len(n_bytes),
            speed / 1e6,
            max(latency_s, 0.0) * 1e6,
        )
        return first

    def _measure(self, events: np.ndarray) -> tuple[list[float], list[float], list[int]]:
        """Return seconds until ready, seconds of exchange, and bytes of each layer."""
        steps: dict[tuple[int, int], dict[int, list[np.void]]] = defaultdict(dict)
        places = {path: i for i, path in enumerate(self._layers)}
        engine = runtime.backend()
        for event in events:
            name = engine.slot_name(event["plan"], event["slot"])  # type: ignore[attr-defined]
            place = places.get(owner_of(name.split(" .. ")[0]))
            if place is not None:
                step = steps[int(event["plan"]), int(event["execution"])]
                step.setdefault(place, []).append(event)
        # Layers that exchange activations have no slot here and belong to no chunk.
        seen = sorted({place for step in steps.values() for place in step})
        whole = [step for step in steps.values() if len(step) == len(seen)]
        ready, took = np.zeros((2, len(whole), len(seen)))
        n_bytes = [0] * len(seen)
        for row, step in enumerate(whole):
            begin = min(e["posted_ns"] for own in step.values() for e in own)
            for column, place in enumerate(seen):
                own = step[place]
                ready[row, column] = (max(e["posted_ns"] for e in own) - begin) / 1e9
                took[row, column] = sum(e["ended_ns"] - e["started_ns"] for e in own) / 1e9
                n_bytes[column] = int(sum(e["bytes"] for e in own))
        return list(np.median(ready, axis=0)), list(np.median(took, axis=0)), n_bytes
