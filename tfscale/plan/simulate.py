"""One training step and its neighbours, from a plan to times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfscale.plan.parts import ExchangePlan, check_plan
from tfscale.plan.step_tasks import Averaging, step_tasks
from tfscale.plan.streams import COMMUNICATION, COMPUTE, Speeds, find_rhythm
from tfscale.plan.times import Scenario


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take, in seconds; means over a cycle of steps.

    Attributes:
        step_s: From one step to the next.
        compute_s: A rank computes.
        communication_s: Its communication thread works.
        is_steady: See `tfscale.plan.streams.Rhythm`.
    """

    step_s: float
    compute_s: float
    communication_s: float
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


def simulate(scenario: Scenario, plan: ExchangePlan) -> Prediction:
    """Predict a step.

    All ranks do the same at the same time, so one of them is simulated: a compute stream that
    prefers back-propagation to updates, one communication thread, and a stream for local sums and
    updates of shards.

    Args:
        scenario: Model, machine, ranks, batch.
        plan: Of the model's parameters.

    Raises:
        PlanError: The plan does not fit the model.
    """
    check_plan(scenario.table, plan)
    return _predict(scenario, [step_tasks(scenario, plan)])


def simulate_local_sgd(
    scenario: Scenario, within: ExchangePlan, n_groups: int, interval: int
) -> Prediction:
    """Predict a step of local SGD, averaged over an interval.

    Args:
        scenario: `n_ranks` and `global_batch` are those of one group.
        within: What a group's ranks exchange at every step. Sharded parameters are averaged across
            groups before they are gathered, each rank its segment; others as a whole.
        n_groups: Number of groups.
        interval: Steps from one averaging to the next.

    Source: [L] III-B.
    """
    check_plan(scenario.table, within)
    plain = step_tasks(scenario, within, Averaging(n_groups, is_due=False))
    last = step_tasks(scenario, within, Averaging(n_groups, is_due=True))
    return _predict(scenario, [plain] * (interval - 1) + [last])


def _predict(scenario: Scenario, steps: Sequence[Sequence]) -> Prediction:
    machine = scenario.machine
    rhythm = find_rhythm(steps, Speeds(machine.compute_share, machine.message_share))
    compute, communication = rhythm.busy_s[COMPUTE], rhythm.busy_s[COMMUNICATION]
    return Prediction(rhythm.step_s, compute, communication, rhythm.is_steady)
