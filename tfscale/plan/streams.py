"""A discrete-event simulation: tasks with dependencies on streams that run one task at a time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tfscale.errors import PlanError

COMPUTE, COMMUNICATION, SUMS = range(3)
N_STREAMS = 3
_SHORT, _LONG = 6, 32  # cycles: a rhythm mostly has come after the first number of them
_ALIKE = 3  # cycles in a row must be alike; the last one, which none follows, is not
_SAME = 1e-9  # relative


@dataclass(frozen=True)
class Task:
    """Work of one step.

    Attributes:
        stream: COMPUTE, COMMUNICATION or SUMS.
        duration_s: How long it takes.
        after: Tasks of the same step that must end first, by position.
        after_previous: Tasks of the step before that must end first; the first step has none.
        priority: Of the tasks that are ready a stream takes the earliest step's, of these the one
            with the smallest number, of these the first.
        name: For pictures.
    """

    stream: int
    duration_s: float
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    priority: int = 0
    name: str = ""


@dataclass(frozen=True)
class Rhythm:
    """How a step repeats.

    Attributes:
        step_s: Seconds per step.
        busy_s: Seconds per step that each stream works.
        begins_s: When each task of the last cycle began, from the begin of the cycle.
        is_steady: Whether the steps came to repeat exactly; else step_s is a mean with the first
            step's delay in it, hence an upper bound.
    """

    step_s: float
    busy_s: tuple[float, ...]
    begins_s: tuple[float, ...]
    is_steady: bool


@dataclass(frozen=True)
class Speeds:
    """What streams lose to each other where they share cores; 1.0 is nothing.

    Attributes:
        compute: Of computing, while messages or sums are under way.
        messages: Of both, while something is computed.
    """

    compute: float = 1.0
    messages: float = 1.0


ALONE = Speeds()


def find_rhythm(steps: Sequence[Sequence[Task]], speeds: Speeds = ALONE) -> Rhythm:
    """Repeat a cycle of steps until it has a rhythm.

    The step time is taken from cycles each task of which begins as much later than in the cycle
    before. Such cycles go on for ever, and each stream works off exactly one cycle's tasks in each,
    so that a step lasts at least as long as each stream is busy. Any other difference of two times
    may be shorter than that: work left over from one step then counts for none.

    Args:
        steps: The tasks of each step of a cycle; `after_previous` speaks of the step before, for
            the first one of the last of the cycle, and may name its tasks only if both have the
            same number of them.
        speeds: Of streams that share cores.

    Returns:
        Times per step.
    """
    flat = [task for step in steps for task in step]
    n_tasks, n_steps = len(flat), len(steps)
    busy = tuple(
        sum(task.duration_s for task in flat if task.stream == stream) / n_steps
        for stream in range(N_STREAMS)
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
    last = middle[-n_tasks:]
    return Rhythm(step_s, busy, tuple(begin - min(last) for begin in last), is_steady)


def run(steps: Sequence[Sequence[Task]], speeds: Speeds = ALONE) -> tuple[list[float], list[float]]:
    """Run steps one after another, each task as soon as it may.

    Args:
        steps: The tasks of each step.
        speeds: Of streams that share cores.

    Returns:
        When each task of each step begins and ends, in seconds.

    Raises:
        PlanError: Tasks wait for each other in a circle.
    """
    clock = _Clock(steps, speeds)
    clock.run()
    if clock.n_done < len(clock.begins):
        n_waiting = len(clock.begins) - clock.n_done
        raise PlanError(f"Tasks must not wait in a circle. Received: {n_waiting} that do.")
    return clock.begins, clock.ends


class _Clock:
    """The state of a simulation. A task is known by its place: those of the first step first."""

    def __init__(self, steps: Sequence[Sequence[Task]], speeds: Speeds) -> None:
        self.tasks = [task for step in steps for task in step]
        self.begins, self.ends = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        self.missing = [len(task.after) for task in self.tasks]
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
        self.n_done = 0
        begin, before = 0, -1
        for step in steps:
            for place, task in enumerate(step, start=begin):
                for other in task.after:
                    self.followers[begin + other].append(place)
                if before >= 0 and task.after_previous:
                    self.missing[place] += len(task.after_previous)
                    for other in task.after_previous:
                        self.followers[before + other].append(place)
            begin, before = begin + len(step), begin

    def run(self) -> None:
        """Let time pass until nothing runs."""
        for place, count in enumerate(self.missing):
            if count == 0:
                self._queue(place)
        self._start(0.0)
        while any(place is not None for place in self.running):
            now = min(self.ends[place] for place in self.running if place is not None)
            done = [p for p in self.running if p is not None and self.ends[p] <= now]
            for place in sorted(done):
                self._finish(place)
            self._start(now)

    def _queue(self, place: int) -> None:
        task = self.tasks[place]
        heapq.heappush(self.queues[task.stream], (self.numbers[place], task.priority, place))

    def _start(self, now: float) -> None:
        for stream, queue in enumerate(self.queues):
            if queue and self.running[stream] is None:
                place = heapq.heappop(queue)[2]
                self.running[stream] = place
                self.pace[stream] = 1.0
                self.begins[place], self.ends[place] = now, now + self.tasks[place].duration_s
        if self.has_losses:
            self._keep_pace(now)

    def _keep_pace(self, now: float) -> None:
        """Move the ends of what is running where others began or ended to use the same cores."""
        for stream, (speed, others) in self.lost.items():
            place = self.running[stream]
            if place is None:
                continue
            is_shared = any(self.running[other] is not None for other in others)
            pace = speed if is_shared else 1.0
            if pace != self.pace[stream]:
                left = (self.ends[place] - now) * self.pace[stream]
                self.ends[place], self.pace[stream] = now + left / pace, pace

    def _finish(self, place: int) -> None:
        self.running[self.tasks[place].stream] = None
        self.n_done += 1
        for follower in self.followers[place]:
            self.missing[follower] -= 1
            if self.missing[follower] == 0:
                self._queue(follower)
