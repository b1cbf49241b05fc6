"""Times of a model's layers where the backend records no collectives: whole steps, cut by work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

from tfscale import objects
from tfscale.plan.chunks import owner_of
from tfscale.plan.layers import Layer, LayerTable
from tfscale.tuning.layer_probe import MEASURED_STEPS, UNMEASURED_STEPS, LayerMeasurement
from tfscale.tuning.message_probe import fitted, measure_messages

_FORWARD = 1 / 3  # of what is computed: back-propagation makes two products of each one
_LEAST_COMPUTED = 0.25  # of a step, however long messages take that travel alone


class StepProbe:
    """Watches steps whose exchanges begin when all gradients exist."""

    def __init__(self, layers: Sequence[str], table: LayerTable) -> None:
        """Begin to watch.

        Args:
            layers: Paths of the layers that own the exchanged variables, in the order of the model.
            table: The model.
        """
        owned = {owner_of(x.weights[0][0]): x for x in table.layers if x.weights}
        self._layers: list[tuple[str, Layer]] = [(p, owned[p]) for p in layers if p in owned]
        self._ends: list[float] = []

    def step(self) -> LayerMeasurement | None:
        """Count a step; after the last one, measure. Collective, on the main thread.

        Returns:
            None before the last step, and where less than two layers were exchanged.
        """
        self._ends.append(time.perf_counter())
        if not self.is_over or len(self._layers) < 2:
            return None
        steps = [end - begin for begin, end in pairwise(self._ends[UNMEASURED_STEPS - 1 :])]
        step_s = max(objects.allgather_object(statistics.median(steps), name="times of steps"))
        return self._cut(step_s, measure_messages())

    @property
    def is_over(self) -> bool:
        """Whether the last step was counted."""
        return len(self._ends) >= UNMEASURED_STEPS + MEASURED_STEPS

    def _cut(self, step_s: float, messages: tuple[float, float]) -> LayerMeasurement:
        """Lay to computing what messages do not explain, and to each layer its share of work."""
        n_bytes = tuple(sum(4 * n for _, n in layer.weights) for _, layer in self._layers)
        # Horovod fuses what is ready at once: the layers travel as one message.
        wire_s = min(messages[0] + sum(n_bytes) * messages[1], (1 - _LEAST_COMPUTED) * step_s)
        message_s, byte_s = fitted(messages, len(self._layers), sum(n_bytes), wire_s)
        computed_s = step_s - wire_s
        work = [layer.flops + layer.values + layer.n_values for _, layer in self._layers]
        # The last layer's gradient is there first, each other one behind those that follow it.
        behind = list(accumulate(reversed(work)))[::-1]
        backward_s = (1 - _FORWARD) * computed_s
        ready_s = tuple(backward_s * (w - behind[-1]) / sum(work) for w in behind)
        return LayerMeasurement(
            layers=tuple(path for path, _ in self._layers),
            n_bytes=n_bytes,
            ready_s=ready_s,
            message_s=message_s,
            byte_s=byte_s,
            before_s=computed_s - ready_s[0],
            after_s=0.0,
            step_s=step_s,
        )
