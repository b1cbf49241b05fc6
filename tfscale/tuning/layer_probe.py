"""Times of a model's layers, from steps that exchange each layer alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tfscale import objects, runtime
from tfscale.plan.chunks import owner_of
from tfscale.plan.costs import share
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import LayerTimes, Machine
from tfscale.plan.parts import bucketed
from tfscale.plan.simulate import simulate
from tfscale.plan.specs import BYTES_PER_VALUE
from tfscale.plan.times import Scenario
from tfscale.trace.recorder import Listener
from tfscale.tuning.message_probe import fitted, measure_messages

UNMEASURED_STEPS = 3  # tracing, comparing plans, warming up
MEASURED_STEPS = 7
_FREE = 1e15  # a rate that costs nothing


@dataclass(frozen=True)
class LayerMeasurement:
    """What ranks measured: medians over steps, then of the rank that matters; equal on all ranks.

    Attributes:
        layers: Paths of the layers that were exchanged, in the order of the model.
        n_bytes: Of each layer's gradients.
        ready_s: When they existed, from the first one's; of the slowest rank.
        message_s: What each message kept the wire busy for, however short.
        byte_s: What each byte of gradients added to it; of the rank that waited least.
        before_s: From the begin of a step to the first gradient.
        after_s: From the end of the last exchange to the end of the step.
        step_s: Whole steps.
    """

    layers: tuple[str, ...]
    n_bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    message_s: float
    byte_s: float
    before_s: float
    after_s: float
    step_s: float

    @property
    def wire_s(self) -> float:
        """How long the wire was busy in a step."""
        return len(self.layers) * self.message_s + sum(self.n_bytes) * self.byte_s


class LayerProbe:
    """Watches steps in which each layer's gradients travel alone."""

    def __init__(self, layers: Sequence[str]) -> None:
        """Begin to watch.

        Args:
            layers: Paths of the layers that own the exchanged variables, in the order of the model.
        """
        self._places = {path: i for i, path in enumerate(layers)}
        self._ends: list[int] = []
        self._engine: Any = runtime.backend()
        self._listener = Listener()

    def step(self) -> LayerMeasurement | None:
        """Count a step; after the last one, measure. Collective, on the main thread.

        Returns:
            None before the last step, and where less than two layers were exchanged.
        """
        self._ends.append(self._engine.clock_ns())
        if not self.is_over:
            return None
        events = self._listener.take()
        self._listener.close()
        rows = [
            row
            for begin, end in pairwise(self._ends[UNMEASURED_STEPS - 1 :])
            if (row := self._row(events, begin, end))
        ]
        seen = sorted(rows[0]["n_bytes"]) if rows else []
        whole = [row for row in rows if sorted(row["n_bytes"]) == seen]
        ready = [np.median([row["ready"][place] for row in whole]) for place in seen]
        times = [float(np.median([row[name] for row in whole])) for name in _WHOLE] if whole else []
        n_bytes = [whole[0]["n_bytes"][place] for place in seen]
        every = objects.allgather_object((seen, ready, times, n_bytes), name="times of layers")
        return self._agree(every, measure_messages())

    @property
    def is_over(self) -> bool:
        """Whether the last step was counted."""
        return len(self._ends) >= UNMEASURED_STEPS + MEASURED_STEPS

    def _row(self, events: np.ndarray, begin: int, end: int) -> dict[str, Any]:
        """Return one step's times in seconds; nothing where it exchanged nothing."""
        ready: dict[int, int] = {}
        service = 0.0  # of several messages that are under way at once, only the sum is known
        n_bytes: dict[int, int] = {}
        busy_until = 0
        posted = events["posted_ns"]
        inside = events[(posted >= begin) & (posted <= end) & (events["slot"] >= 0)]
        for event in np.sort(inside, order="ended_ns"):
            name = self._engine.slot_name(int(event["plan"]), int(event["slot"]))
            place = self._places.get(owner_of(name.split(" .. ")[0]))
            if place is None:
                continue
            began = max(int(event["started_ns"]), busy_until)
            busy_until = int(event["ended_ns"])
            ready[place] = max(ready.get(place, 0), int(event["posted_ns"]))
            service += (busy_until - began) / 1e9
            n_bytes[place] = n_bytes.get(place, 0) + int(event["bytes"])
        if not ready:
            return {}
        first = min(ready.values())
        return {
            "ready": {place: (time - first) / 1e9 for place, time in ready.items()},
            "n_bytes": n_bytes,
            "before": (first - begin) / 1e9,
            "after": (end - busy_until) / 1e9,
            "step": (end - begin) / 1e9,
            "service": service,
        }

    def _agree(
        self, every: Sequence[Any], messages: tuple[float, float]
    ) -> LayerMeasurement | None:
        seen, *_, n_bytes = every[0]
        if len(seen) < 2 or any(rank[0] != seen for rank in every):
            return None
        paths = list(self._places)
        before, after, step = np.max([rank[2][:3] for rank in every], axis=0)
        wire_s = min(rank[2][3] for rank in every)
        message_s, byte_s = fitted(messages, len(seen), sum(n_bytes), wire_s)
        return LayerMeasurement(
            layers=tuple(paths[place] for place in seen),
            n_bytes=tuple(n_bytes),
            ready_s=tuple(map(float, np.max([rank[1] for rank in every], axis=0))),
            message_s=message_s,
            byte_s=byte_s,
            before_s=float(before),
            after_s=float(after),
            step_s=float(step),
        )


_WHOLE = ("before", "after", "step", "service")


def measured_machine(
    table: LayerTable, found: LayerMeasurement, n_ranks: int, batch: int, known: Machine | None
) -> Machine:
    """Return the machine on which a model's steps take what they took.

    Args:
        table: The model; layers without measured parameters take no time but the forward pass.
        found: From a probe.
        n_ranks: That took part.
        batch: Samples per rank; 1 where it is not known.
        known: Where links are known better.

    Returns:
        One whose allreduces and layers take as long as measured. The forward pass is cut by the
        operations of its layers. What back-propagation computes before the first gradient is there
        counts as forward pass.
    """
    layer_of = {owner_of(name): layer for layer in table.layers for name, _ in layer.weights}
    byte_s = found.byte_s * _bytes_per_planned(found, layer_of)
    machine = known or Machine(
        name="measured",
        latency_s=found.message_s / (2 * (n_ranks - 1)),
        bytes_per_s=2 * share(n_ranks) / byte_s,
        reduce_bytes_per_s=_FREE,
        flops_per_s=_FREE,
        memory_bytes_per_s=_FREE,
        note=f"from the first steps of {n_ranks} ranks",
    )
    ready = {
        layer_of[path].name: time_s
        for path, time_s in zip(found.layers, found.ready_s, strict=True)
        if path in layer_of
    }
    work = np.array([layer.flops + layer.values + layer.n_values for layer in table.layers])
    forward = found.before_s * work / work.sum()
    backward, latest = {}, 0.0
    for layer in reversed(table.layers):
        time_s = max(ready.get(layer.name, latest), latest)
        backward[layer.name] = time_s - latest
        latest = time_s
    names = [layer.name for layer in table.layers]
    update_bytes = 5 * BYTES_PER_VALUE * table.n_values
    rate = update_bytes / max(found.after_s, 1e-9)
    rest_s = 0.0
    if known is not None:
        # A machine that is known has its own speed; what an update takes longer is a constant.
        rate = known.memory_bytes_per_s
        rest_s = max(0.0, found.after_s - update_bytes / rate)
    forward_s = dict(zip(names, map(float, forward), strict=True))
    times = LayerTimes(batch, forward_s, backward, rest_s, n_values=table.n_values)
    layer_times = {**machine.layer_times, table.name: times}
    return dataclasses.replace(machine, layer_times=layer_times, memory_bytes_per_s=rate)


def _bytes_per_planned(found: LayerMeasurement, layer_of: dict[str, Layer]) -> float:
    """Return what travels per byte that the plan counts, as dtype and compression make it.

    Of an embedding only the rows of a batch travel, which says nothing of the others: layers that
    multiply send all they have. One ratio holds for them, hence the median.
    """
    ratios = [
        (layer.flops > 0, n_bytes / (BYTES_PER_VALUE * layer.n_values))
        for path, n_bytes in zip(found.layers, found.n_bytes, strict=True)
        if (layer := layer_of.get(path)) and layer.n_values
    ]
    whole = [ratio for is_product, ratio in ratios if is_product]
    return float(np.median(whole or [ratio for _, ratio in ratios] or [1.0]))


def calibrated(scenario: Scenario, found: LayerMeasurement) -> Scenario:
    """Return a scenario whose steps by layer take as long as they were measured to.

    What the simulation lacks (data input, ranks that wait for each other, cores that are shared)
    becomes a part of every step.

    Args:
        scenario: On a measured machine.
        found: The same measurement.
    """
    expected_s = simulate(scenario, bucketed(scenario.table, None)).step_s
    more_s = max(0.0, found.step_s - expected_s)
    machine, name = scenario.machine, scenario.table.name
    times = machine.layer_times[name]
    times = dataclasses.replace(times, rest_s=times.rest_s + more_s)
    machine = dataclasses.replace(machine, layer_times={**machine.layer_times, name: times})
    return dataclasses.replace(scenario, machine=machine)
