"""The tasks of one training step under a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tfscale.plan import costs
from tfscale.plan.parts import ExchangePlan, Part
from tfscale.plan.specs import BYTES_PER_VALUE
from tfscale.plan.streams import COMMUNICATION, COMPUTE, SUMS, Task
from tfscale.plan.times import Scenario

_MOST_PIECES = 16


@dataclass(frozen=True)
class Averaging:
    """What local SGD adds to a step.

    Attributes:
        n_groups: Groups whose parameters are averaged.
        is_due: Whether they are in this step; else the tasks are there and take no time.
    """

    n_groups: int
    is_due: bool


def step_tasks(
    scenario: Scenario, plan: ExchangePlan, averaging: Averaging | None = None
) -> tuple[Task, ...]:
    """Return the tasks of a step, in no particular order.

    Args:
        scenario: Model, machine, ranks, batch.
        plan: One that `check_plan` accepts.
        averaging: For local SGD.
    """
    return _Builder(scenario, plan, averaging).build()


class _Builder:
    """Collects the tasks of a step; positions in `tasks` stand for tasks."""

    def __init__(self, scenario: Scenario, plan: ExchangePlan, averaging: Averaging | None) -> None:
        self.scenario, self.plan, self.averaging = scenario, plan, averaging
        self.tasks: list[Task] = []
        self.parameters = scenario.table.parameters
        n_layers = len(scenario.table.layers)
        self.forward = [-1] * n_layers
        self.backward = [-1] * n_layers
        # Layers whose weight gradients come from gathered activations and errors.
        self.gathered = {
            self.parameters[part.parameters[0]].layer
            for part in plan.parts
            if part.kind in ("partial", "replicated") and scenario.n_ranks > 1
        }
        self.finals: list[tuple[Part, int]] = []  # the last task of each part, -1: joined already

    def build(self) -> tuple[Task, ...]:
        self._compute()
        for part in self.plan.parts:
            final = {
                "allreduce": self._allreduce,
                "sharded": self._sharded,
                "partial": self._partial,
                "replicated": self._replicated,
            }[part.kind](part)
            self.finals.append((part, final))
        self._join_steps()
        return tuple(self.tasks)

    def _add(
        self, stream: int, duration_s: float, after: tuple[int, ...], name: str, priority: int = 0
    ) -> int:
        self.tasks.append(Task(stream, duration_s, after, (), priority, name))
        return len(self.tasks) - 1

    def _send(
        self,
        duration_s: float,
        n_bytes: float,
        after: tuple[int, ...],
        name: str,
        priority: int = 0,
    ) -> int:
        """Send a vector in pieces, so that what is more urgent may overtake it."""
        limit = self.plan.piece_bytes
        n_pieces = min(_MOST_PIECES, math.ceil(n_bytes / limit)) if limit else 1
        for _ in range(max(1, n_pieces)):
            piece_s = duration_s / max(1, n_pieces)
            after = (self._add(COMMUNICATION, piece_s, after, name, priority),)
        return after[0]

    def _compute(self) -> None:
        """Forward pass and back-propagation, each layer after its neighbour."""
        scenario = self.scenario
        last: tuple[int, ...] = ()
        for place, layer in enumerate(scenario.table.layers):
            extra = scenario.rest_s() if place == 0 else 0.0
            duration = scenario.forward_s(place) + extra
            self.forward[place] = self._add(COMPUTE, duration, last, f"forward {layer.name}")
            last = (self.forward[place],)
        for place in reversed(range(len(scenario.table.layers))):
            errors, weights = scenario.backward_s(place)
            duration = errors + (0.0 if place in self.gathered else weights)
            name = f"backward {scenario.table.layers[place].name}"
            self.backward[place] = self._add(COMPUTE, duration, last, name)
            last = (self.backward[place],)

    def _first_layer(self, part: Part) -> int:
        return min(self.parameters[p].layer for p in part.parameters)

    def _ready(self, place: int) -> tuple[int, ...]:
        """Return after what the gradients of a layer and of all behind it may travel."""
        return (self.backward[place if self.plan.overlap else 0],)

    def _n_bytes(self, part: Part) -> int:
        return sum(self.parameters[p].n_bytes for p in part.parameters)

    def _order(self, part: Part) -> int:
        """Return a priority behind all that back-propagation waits for."""
        return 1 + self._first_layer(part) if self.plan.has_forward_gathers else 1

    def _allreduce(self, part: Part) -> int:
        scenario, n_bytes = self.scenario, self._n_bytes(part)
        duration = costs.allreduce_s(
            n_bytes, scenario.n_ranks, scenario.machine, self.plan.algorithm
        )
        ready = self._ready(self._first_layer(part))
        sent = self._send(duration, n_bytes, ready, "allreduce")
        return self._whole_update(part, (sent,))

    def _whole_update(self, part: Part, after: tuple[int, ...]) -> int:
        scenario, n_bytes = self.scenario, self._n_bytes(part)
        duration = scenario.update_s(n_bytes / BYTES_PER_VALUE)
        done = self._add(COMPUTE, duration, after, "update", 1)
        return self._average(part, n_bytes, done)

    def _average(self, part: Part, n_bytes: float, after: int) -> int:
        """Average parameters across groups, where local SGD is asked for."""
        if self.averaging is None:
            return after
        scenario, n_groups = self.scenario, self.averaging.n_groups
        algorithm = "recursive" if self.plan.algorithm == "direct" else self.plan.algorithm
        duration = costs.average_s(n_bytes, scenario.n_ranks, n_groups, scenario.machine, algorithm)
        duration = duration if self.averaging.is_due else 0.0
        return self._add(COMMUNICATION, duration, (after,), "average", self._order(part))

    def _shard_update(self, part: Part, after: tuple[int, ...], summed_s: float) -> int:
        """Sum and update the own segment, then gather all."""
        scenario, n_bytes = self.scenario, self._n_bytes(part)
        segment = n_bytes / scenario.n_ranks
        if summed_s:
            after = (self._add(SUMS, summed_s, after, "sum", self._order(part)),)
        priority = -1 if self.plan.has_early_gradients else self._order(part)
        duration = scenario.update_s(segment / BYTES_PER_VALUE)
        done = self._add(COMPUTE, duration, after, "update", priority)
        done = self._average(part, segment, done)
        link = scenario.machine.link(scenario.n_ranks)
        gather = costs.transfer_s(n_bytes, scenario.n_ranks, link)
        return self._send(gather, n_bytes, (done,), "gather", self._order(part))

    def _sharded(self, part: Part) -> int:
        scenario = self.scenario
        spread, summed, _ = costs.sharded_s(self._n_bytes(part), scenario.n_ranks, scenario.machine)
        ready = self._ready(self._first_layer(part))
        sent = self._send(spread, self._n_bytes(part), ready, "alltoall")
        return self._shard_update(part, (sent,), summed)

    def _activations(self, part: Part, of_inputs: float, of_errors: float) -> tuple[int, int]:
        """Send a dense layer's inputs when they exist, and its errors."""
        place = self._first_layer(part)
        is_overlapped = self.plan.overlap
        inputs = (self.forward[place - 1],) if place > 0 else ()
        inputs = inputs if is_overlapped else (self.backward[0],)
        above = place + 1 if place + 1 < len(self.backward) else None
        known = self.forward[place] if above is None else self.backward[above]
        errors = (known,) if is_overlapped else (self.backward[0],)
        first = self._add(COMMUNICATION, of_inputs, inputs, "activations")
        return first, self._add(COMMUNICATION, of_errors, errors, "errors")

    def _rows(self, place: int) -> float:
        return self.scenario.gathered_batch * self.scenario.table.layers[place].rows

    def _partial(self, part: Part) -> int:
        scenario, place = self.scenario, self._first_layer(part)
        dense = scenario.table.layers[place].dense or (0, 0)
        size = scenario.n_ranks
        times = costs.partial_s(dense, self._rows(place), size, scenario.machine)
        sent = self._activations(part, times[0], times[1])
        duration = scenario.gradient_s(place, scenario.gathered_batch, 1 / size) if size > 1 else 0
        made = self._gradient(duration, (*sent, self.backward[place]))
        return self._shard_update(part, (made,), 0.0)

    def _gradient(self, duration_s: float, after: tuple[int, ...]) -> int:
        """Compute a weight gradient, before what is left of back-propagation or behind it."""
        priority = -1 if self.plan.has_early_gradients else 1
        return self._add(COMPUTE, duration_s, after, "gradient", priority)

    def _replicated(self, part: Part) -> int:
        scenario, place = self.scenario, self._first_layer(part)
        dense = scenario.table.layers[place].dense or (0, 0)
        times = costs.replicated_s(dense, self._rows(place), scenario.n_ranks, scenario.machine)
        sent = self._activations(part, *times)
        is_alone = scenario.n_ranks == 1
        duration = 0.0 if is_alone else scenario.gradient_s(place, scenario.gathered_batch)
        if "replicated" not in self.plan.lazy or not self.plan.overlap:
            made = self._gradient(duration, (*sent, self.backward[place]))
            return self._whole_update(part, (made,))
        # Delayed to the next step: where its forward pass reaches the layer, [T] algorithm 2.
        reached = (self.forward[place - 1],) if place > 0 else ()
        made = self._add(COMPUTE, duration, reached, "gradient")
        last = (*sent, self.backward[place])
        self.tasks[made] = replace(self.tasks[made], after_previous=last)
        done = self._whole_update(part, (made,))
        forward = self.tasks[self.forward[place]]
        self.tasks[self.forward[place]] = replace(forward, after=(*forward.after, done))
        return -1

    def _join_steps(self) -> None:
        """Let the forward pass, and what is sent before it, wait for the step before."""
        for number, own in enumerate(self.tasks):
            if own.stream == COMMUNICATION and not own.after:  # inputs of the first layer
                self.tasks[number] = replace(own, after_previous=(self.backward[0],))
        needed: dict[int, set[int]] = {0: {self.backward[0]}}
        for part, final in self.finals:
            if final < 0:
                continue
            is_lazy = self.plan.overlap and part.kind in self.plan.lazy
            owners = {self.parameters[p].layer for p in part.parameters} if is_lazy else {0}
            for place in owners:
                needed.setdefault(place, set()).add(final)
        for place, finals in needed.items():
            task = self.forward[place]
            self.tasks[task] = replace(self.tasks[task], after_previous=tuple(sorted(finals)))
