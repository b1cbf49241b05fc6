"""Simulate training steps on three streams until they repeat."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tfscale.config import PlanError
from tfscale.plan.buckets import BYTES_PER_VALUE
from tfscale.plan.costs import Scenario, allreduce_s, relayed
from tfscale.plan.parts import LayerPart, LayerPlan, message_bytes

COMPUTE, COMMUNICATION, SUMS = range(3)
N_STREAMS = 3
_SHORT, _LONG = 6, 32  # cycles to run: most plans repeat after the first number of them
_ALIKE = 3  # consecutive cycles that must be alike; the last one of a run is not
_SAME = 1e-9  # relative


@dataclass
class Task:
    """Work of one step.

    Among its ready tasks, a stream starts that of the earliest step, then that of the smallest
    priority, then the first.
    """

    stream: int  # COMPUTE, COMMUNICATION or SUMS
    duration_s: float
    after: tuple[int, ...] = ()  # tasks of the same step that must end first, by position
    # Tasks of the previous step that must end first, by position; ignored in the first step.
    after_previous: tuple[int, ...] = ()
    priority: int = 0
    name: str = ""  # for plots

    def wait_for(self, *tasks: int) -> None:
        """Let it begin after other tasks of its step, too."""
        self.after += tasks

    def wait_for_previous(self, *tasks: int) -> None:
        """Let it begin after these tasks of the previous step, and no others."""
        self.after_previous = tasks


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a step, as means over a cycle of steps."""

    step_s: float  # from one step to the next
    compute_s: float  # of computation
    communication_s: float  # of communication
    # Whether the steps repeat exactly; otherwise step_s is a mean that includes the delay of the
    # first step, hence an upper bound.
    is_steady: bool = True

    @property
    def exposed_s(self) -> float:
        """Time in which the rank computes nothing."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def overlap_percent(self) -> float | None:
        """R of [T] eq. 3.8; None where nothing is sent."""
        if not self.communication_s:
            return None
        hidden = self.communication_s - min(self.exposed_s, self.communication_s)
        return 100.0 * hidden / self.communication_s


@dataclass(frozen=True)
class Speeds:
    """Relative speeds of streams that share cores; 1.0 is full speed."""

    compute: float = 1.0  # of computation, during messages or sums
    messages: float = 1.0  # of messages and sums, during computation


ALONE = Speeds()


def find_rhythm(steps: Sequence[Sequence[Task]], speeds: Speeds = ALONE) -> Prediction:
    """Simulate a cycle of steps repeatedly until each takes as long as the previous one.

    The step time comes from consecutive cycles in which every task begins later by the same delay.
    Such cycles repeat for ever, and each stream completes exactly one cycle's tasks in each, so a
    step is at least as long as each stream is busy. Any other difference of two times may be too
    short, as work that one step leaves to the next would not be counted.

    `steps` has the tasks of each step of a cycle. `after_previous` of the first step refers to the
    last step of the cycle; both must then have the same number of tasks.
    """
    flat = [task for step in steps for task in step]
    n_tasks, n_steps = len(flat), len(steps)
    compute_s, communication_s = (
        sum(task.duration_s for task in flat if task.stream == stream) / n_steps
        for stream in (COMPUTE, COMMUNICATION)
    )
    for n_cycles in (_SHORT, _LONG):
        begins, ends = run([step for _ in range(n_cycles) for step in steps], speeds)
        step_s = max(ends) / (n_cycles * n_steps)
        middle = begins[-(_ALIKE + 2) * n_tasks : -n_tasks]
        delays = [b - a for a, b in zip(middle[:-n_tasks], middle[n_tasks:], strict=True)]
        is_steady = max(delays) - min(delays) <= _SAME * max(ends)
        if is_steady:
            step_s = delays[0] / n_steps
            break
    return Prediction(step_s, compute_s, communication_s, is_steady)


def run(steps: Sequence[Sequence[Task]], speeds: Speeds = ALONE) -> tuple[list[float], list[float]]:
    """Run each task of some steps as early as possible; return begin and end of each."""
    clock = _Clock(steps, speeds)
    clock.run()
    if n_waiting := sum(count > 0 for count in clock.missing):
        raise PlanError(f"tasks wait in a circle. Received: {n_waiting} that do.")
    return clock.begins, clock.ends


class _Clock:
    """State of a simulation. Tasks of all steps are numbered, those of the first step first."""

    def __init__(self, steps: Sequence[Sequence[Task]], speeds: Speeds) -> None:
        self.tasks = [task for step in steps for task in step]
        self.begins, self.ends = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        self.missing: list[int] = []  # per task, how many others must end first
        self.followers: list[list[int]] = [[] for _ in self.tasks]
        self.numbers = [number for number, step in enumerate(steps) for _ in step]
        self.queues: list[list[tuple[int, int, int]]] = [[] for _ in range(N_STREAMS)]
        self.running: list[int | None] = [None] * N_STREAMS
        self.lost = {
            COMPUTE: (speeds.compute, (COMMUNICATION, SUMS)),
            COMMUNICATION: (speeds.messages, (COMPUTE,)),
            SUMS: (speeds.messages, (COMPUTE,)),
        }
        self.has_losses = speeds != ALONE
        self.pace = [1.0] * N_STREAMS
        begin, before = 0, -1
        for step in steps:
            for task_number, task in enumerate(step, start=begin):
                others = [begin + other for other in task.after]
                if before >= 0:
                    others += [before + other for other in task.after_previous]
                self.missing.append(len(others))
                for other in others:
                    self.followers[other].append(task_number)
            begin, before = begin + len(step), begin

    def run(self) -> None:
        """Advance the time until no task runs."""
        for number, count in enumerate(self.missing):
            if count == 0:
                self._queue(number)
        self._start(0.0)
        while any(number is not None for number in self.running):
            now = min(self.ends[number] for number in self.running if number is not None)
            done = [p for p in self.running if p is not None and self.ends[p] <= now]
            for number in sorted(done):
                self._finish(number)
            self._start(now)

    def _queue(self, number: int) -> None:
        task = self.tasks[number]
        heapq.heappush(self.queues[task.stream], (self.numbers[number], task.priority, number))

    def _start(self, now: float) -> None:
        for stream, queue in enumerate(self.queues):
            if queue and self.running[stream] is None:
                number = heapq.heappop(queue)[2]
                self.running[stream] = number
                self.pace[stream] = 1.0
                self.begins[number], self.ends[number] = now, now + self.tasks[number].duration_s
        if self.has_losses:
            self._keep_pace(now)

    def _keep_pace(self, now: float) -> None:
        """Move the ends of running tasks after others began or ceased to share their cores."""
        for stream, (speed, others) in self.lost.items():
            number = self.running[stream]
            if number is None:
                continue
            is_shared = any(self.running[other] is not None for other in others)
            pace = speed if is_shared else 1.0
            if pace != self.pace[stream]:
                left = (self.ends[number] - now) * self.pace[stream]
                self.ends[number], self.pace[stream] = now + left / pace, pace

    def _finish(self, number: int) -> None:
        self.running[self.tasks[number].stream] = None
        for follower in self.followers[number]:
            self.missing[follower] -= 1
            if self.missing[follower] == 0:
                self._queue(follower)


_MOST_PIECES = 16


def step_tasks(
    scenario: Scenario, plan: LayerPlan, n_groups: int = 0, is_average_due: bool = False
) -> tuple[Task, ...]:
    """Return the tasks of a step; with `n_groups` local SGD averages parameters when it is due."""
    return _Builder(scenario, plan, n_groups, is_average_due).build()


class _Builder:
    """Builds the tasks of a step; methods return positions in `tasks`."""

    def __init__(
        self, scenario: Scenario, plan: LayerPlan, n_groups: int, is_average_due: bool
    ) -> None:
        self.scenario, self.plan = scenario, plan
        self.n_groups, self.is_average_due = n_groups, is_average_due
        self.tasks: list[Task] = []
        self.parameters = scenario.table.parameters
        n_layers = len(scenario.table.layers)
        self.forward = [-1] * n_layers
        self.backward = [-1] * n_layers
        # Layers whose weight gradients come from gathered activations and output gradients.
        self.gathered = {
            self.parameters[part.parameters[0]].layer
            for part in plan.parts
            if part.kind in ("partial", "replicated") and scenario.n_ranks > 1
        }
        # The last task of each part; -1 if the forward pass waits for it already.
        self.finals: list[tuple[LayerPart, int]] = []

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
        self, duration_s: float, n_bytes: float, after: tuple[int, ...], name: str, priority: int
    ) -> int:
        """Send a vector in pieces, so that a more urgent one can overtake it."""
        limit = self.plan.piece_bytes
        n_pieces = max(1, min(_MOST_PIECES, math.ceil(n_bytes / limit))) if limit else 1
        for _ in range(n_pieces):
            after = (self._add(COMMUNICATION, duration_s / n_pieces, after, name, priority),)
        return after[0]

    def _compute(self) -> None:
        """Add the forward pass and back-propagation, one layer after another."""
        scenario = self.scenario
        last: tuple[int, ...] = ()
        for layer_index, layer in enumerate(scenario.table.layers):
            extra = scenario.rest_s() if layer_index == 0 else 0.0
            duration = scenario.forward_s(layer_index) + extra
            self.forward[layer_index] = self._add(COMPUTE, duration, last, f"forward {layer.name}")
            last = (self.forward[layer_index],)
        for layer_index in reversed(range(len(scenario.table.layers))):
            inputs_s, weights_s = scenario.backward_s(layer_index)
            duration = inputs_s + (0.0 if layer_index in self.gathered else weights_s)
            name = f"backward {scenario.table.layers[layer_index].name}"
            self.backward[layer_index] = self._add(COMPUTE, duration, last, name)
            last = (self.backward[layer_index],)

    def _first_layer(self, part: LayerPart) -> int:
        return min(self.parameters[p].layer for p in part.parameters)

    def _ready(self, part: LayerPart) -> tuple[int, ...]:
        """Return the tasks that must end before the gradients of a part can be sent."""
        return (self.backward[self._first_layer(part) if self.plan.overlap else 0],)

    def _n_bytes(self, part: LayerPart) -> int:
        return sum(self.parameters[p].n_bytes for p in part.parameters)

    def _order(self, part: LayerPart) -> int:
        """Return a priority below back-propagation's, in the order of the next forward pass."""
        return 1 + self._first_layer(part)

    def _allreduce(self, part: LayerPart) -> int:
        n_bytes, size, machine = self._n_bytes(part), self.scenario.n_ranks, self.scenario.machine
        is_direct = (
            self.plan.algorithm == "direct"
            and size > 1
            and relayed(n_bytes, size, machine.n_hosts(size)) is None
        )
        # Sums overlap with messages of other buckets, unless a call of MPI blocks or computation
        # takes cores from the thread that sums and sends: measured steps are those of one stream.
        has_core = machine.message_share == 1.0
        if not (is_direct and has_core and self.plan.piece_bytes):
            duration = allreduce_s(n_bytes, size, machine, self.plan.algorithm)
            sent = self._send(duration, n_bytes, self._ready(part), "allreduce", 0)
            return self._whole_update(part, (sent,))
        half_s = self.scenario.transfer_s(n_bytes)
        sent = self._send(half_s, n_bytes, self._ready(part), "allreduce", 0)
        summed = self._add(SUMS, self.scenario.sum_s(n_bytes), (sent,), "sum")
        sent = self._send(half_s, n_bytes, (summed,), "sums", 0)
        return self._whole_update(part, (sent,))

    def _whole_update(self, part: LayerPart, after: tuple[int, ...]) -> int:
        n_bytes = self._n_bytes(part)
        duration = self.scenario.update_s(n_bytes / BYTES_PER_VALUE)
        done = self._add(COMPUTE, duration, after, "update", 1)
        return self._average(part, n_bytes, done)

    def _average(self, part: LayerPart, n_bytes: float, after: int) -> int:
        """Average parameters across groups, with local SGD only."""
        if not self.n_groups:
            return after
        size, machine = self.scenario.n_ranks, self.scenario.machine
        algorithm = "recursive" if self.plan.algorithm == "direct" else self.plan.algorithm
        duration = 0.0
        if self.is_average_due:
            # [L] eq. 7; eq. 5 with the number of groups in its second logarithm.
            link = machine.link(size * self.n_groups)
            duration = allreduce_s(n_bytes, self.n_groups, machine, algorithm, link)
        return self._add(COMMUNICATION, duration, (after,), "average", self._order(part))

    def _shard_update(self, part: LayerPart, after: tuple[int, ...], summed_s: float) -> int:
        """Sum and update the rank's own segment, then gather all segments."""
        scenario, n_bytes = self.scenario, self._n_bytes(part)
        segment = n_bytes / scenario.n_ranks
        if summed_s:
            after = (self._add(SUMS, summed_s, after, "sum", self._order(part)),)
        priority = -1 if self.plan.has_early_gradients else self._order(part)
        duration = scenario.update_s(segment / BYTES_PER_VALUE)
        done = self._add(COMPUTE, duration, after, "update", priority)
        done = self._average(part, segment, done)
        seconds = scenario.transfer_s(n_bytes, self.plan.gather_bytes)
        return self._send(seconds, n_bytes, (done,), "gather", self._order(part))

    def _sharded(self, part: LayerPart) -> int:
        scenario, n_bytes = self.scenario, self._n_bytes(part)
        seconds = scenario.transfer_s(n_bytes)
        sent = self._send(seconds, n_bytes, self._ready(part), "alltoall", 0)
        return self._shard_update(part, (sent,), scenario.sum_s(n_bytes))

    def _activations(self, part: LayerPart) -> tuple[int, int]:
        """Send a dense layer's inputs and its output gradients as soon as they are computed."""
        layer_index = self._first_layer(part)
        messages = message_bytes(self.scenario, layer_index, part.kind)[:2]
        inputs_s, outputs_s = map(self.scenario.transfer_s, messages)
        inputs: tuple[int, ...] = (self.backward[0],)
        gradients = inputs
        if self.plan.overlap:
            is_last = layer_index + 1 == len(self.backward)
            inputs = (self.forward[layer_index - 1],) if layer_index > 0 else ()
            gradients = (self.forward[layer_index] if is_last else self.backward[layer_index + 1],)
        first = self._add(COMMUNICATION, inputs_s, inputs, "activations")
        return first, self._add(COMMUNICATION, outputs_s, gradients, "output gradients")

    def _partial(self, part: LayerPart) -> int:
        scenario, size, layer_index = self.scenario, self.scenario.n_ranks, self._first_layer(part)
        sent = self._activations(part)
        duration = (
            scenario.gradient_s(layer_index, scenario.gathered_batch, 1 / size) if size > 1 else 0
        )
        made = self._gradient(duration, (*sent, self.backward[layer_index]))
        return self._shard_update(part, (made,), 0.0)

    def _gradient(self, duration_s: float, after: tuple[int, ...]) -> int:
        """Compute a weight gradient, before the rest of back-propagation or after it."""
        priority = -1 if self.plan.has_early_gradients else 1
        return self._add(COMPUTE, duration_s, after, "gradient", priority)

    def _replicated(self, part: LayerPart) -> int:
        scenario, layer_index = self.scenario, self._first_layer(part)
        sent = self._activations(part)
        size = scenario.n_ranks
        duration = scenario.gradient_s(layer_index, scenario.gathered_batch) if size > 1 else 0.0
        if "replicated" not in self.plan.lazy or not self.plan.overlap:
            made = self._gradient(duration, (*sent, self.backward[layer_index]))
            return self._whole_update(part, (made,))
        # Delayed until the next step's forward pass reaches the layer, [T] algorithm 2.
        reached = (self.forward[layer_index - 1],) if layer_index > 0 else ()
        made = self._add(COMPUTE, duration, reached, "gradient")
        self.tasks[made].wait_for_previous(*sent, self.backward[layer_index])
        done = self._whole_update(part, (made,))
        self.tasks[self.forward[layer_index]].wait_for(done)
        return -1

    def _join_steps(self) -> None:
        """Let the forward pass, and messages sent before it, wait for the previous step."""
        for task in self.tasks:
            if task.stream == COMMUNICATION and not task.after:  # inputs of the first layer
                task.wait_for_previous(self.backward[0])
        needed: dict[int, set[int]] = {0: {self.backward[0]}}
        for part, final in self.finals:
            if final < 0:
                continue
            is_lazy = self.plan.overlap and part.kind in self.plan.lazy
            owners = {self.parameters[p].layer for p in part.parameters} if is_lazy else {0}
            for layer_index in owners:
                needed.setdefault(layer_index, set()).add(final)
        for layer_index, own in needed.items():
            self.tasks[self.forward[layer_index]].wait_for_previous(*sorted(own))


def simulate(scenario: Scenario, plan: LayerPlan) -> Prediction:
    """Predict a step.

    All ranks do the same at the same time, so one rank is simulated: a compute stream that
    prefers back-propagation to updates, one communication thread, and a stream for local sums.
    """
    return _predict(scenario, [step_tasks(scenario, plan)])


def simulate_local_sgd(
    scenario: Scenario, within: LayerPlan, n_groups: int, interval: int
) -> Prediction:
    """Predict the mean step of local SGD from one average to the next.

    `n_ranks` and `global_batch` are those of one group, whose ranks exchange `within` in every
    step. Each rank averages its segment of sharded parameters across groups before the gather;
    other parameters are averaged whole. Source: [L] III-B.
    """
    plain = step_tasks(scenario, within, n_groups)
    last = step_tasks(scenario, within, n_groups, is_average_due=True)
    return _predict(scenario, [plain] * (interval - 1) + [last])


def _predict(scenario: Scenario, steps: Sequence[Sequence]) -> Prediction:
    machine = scenario.machine
    return find_rhythm(steps, Speeds(machine.compute_share, machine.message_share))
