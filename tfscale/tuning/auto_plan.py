"""`exchange="auto"`: measure, plan, compare with plain allreduce, and take the fastest."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise

import keras

from tfscale import objects
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import callbacks_of_fit, data_of_fit
from tfscale.errors import PlanError
from tfscale.exchange.auto import Auto
from tfscale.exchange.base import Exchange
from tfscale.exchange.plans import Outcome, Planned, PlannedShards, strategy_of
from tfscale.plan.choose import Choice, choose
from tfscale.plan.explain import explain
from tfscale.plan.parts import Kind
from tfscale.plan.times import Scenario
from tfscale.tuning.auto_scenario import Course, measure, why_not
from tfscale.tuning.layer_probe import UNMEASURED_STEPS
from tfscale.update.loss_scale import update_rule
from tfscale.update.rules import LAYERWISE

logger = logging.getLogger("tfscale")

_TIMED_STEPS = 10
_SLOWER = 1.02  # a plan that takes so many times plain allreduce's time is given up
_OTHER_BATCH = 2.0  # a batch that grew or shrank so many times asks for another plan
_PROMISING = 1.25  # plans are tried that are predicted to take so many times the best one's time
# The best plan of each of these is tried, if it is promising: predictions err.
_FAMILIES: tuple[tuple[Kind, ...], ...] = (
    ("allreduce", "sharded", "partial", "replicated"),
    ("allreduce", "replicated"),
    ("sharded", "partial"),
)

Trial = tuple[Choice, float]  # and the seconds that its steps took


class AutoWatch:
    """Tries exchanges one after another; each decision is made from what all ranks measured."""

    may_cut = True

    def __init__(
        self,
        strategy: Auto,
        layers: Sequence[str],
        model: keras.Model | None,
        why_uncut: Callable[[keras.Model], str],
    ) -> None:
        """Begin to watch.

        Args:
            strategy: What the user chose.
            layers: Paths of the layers that own the exchanged variables, in the order of the model.
            model: That is trained.
            why_uncut: Returns why its parameters cannot be sharded, or an empty string.
        """
        self._auto = strategy
        self._layers = list(layers)
        self._model = model
        self._why_uncut = why_uncut
        self._course = self._run()
        self._times: list[float] = []

    def step(self) -> Exchange | None:
        """Count a step. Collective, on the main thread.

        Returns:
            The strategy of the next step if it changes, equal on all ranks.
        """
        self._times.append(time.perf_counter())
        return next(self._course)

    def _run(self) -> Course:
        model, reason = self._model, why_not(self._model)
        while True:
            batch = self._global_batch()
            if reason or model is None:
                logger.info("Nothing is planned: %s.", reason)
            else:
                scenario = yield from measure(self._auto, self._layers, model, batch)
                if scenario is None:
                    yield self._auto  # allreduce in buckets, as before there was anything to know
                else:
                    yield from self._try(scenario, self._allowed(model, batch))
            while not self._is_other(batch):
                self._times.clear()
                yield None
            logger.info("The batch size has changed: the exchange is planned again.")

    def _allowed(self, model: keras.Model, batch: int | None) -> tuple[Kind, ...]:
        """Return what the model's parameters may do, equal on all ranks. Collective."""
        swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks_of_fit())
        own = "SwapEMAWeights reads whole averages" if swaps else self._why_uncut(model)
        reasons = [r for r in objects.allgather_object(own, name="why parameters stay whole") if r]
        kinds: list[Kind] = ["allreduce"]
        if reasons:
            logger.info("Parameters are not sharded: %s.", reasons[0])
        else:
            needs_whole = type(update_rule(model.optimizer.__wrapped__)) in LAYERWISE
            kinds += ["sharded", "partial"] if batch and not needs_whole else ["sharded"]
        return (*kinds, "replicated") if batch else tuple(kinds)

    def _try(self, scenario: Scenario, allowed: Sequence[Kind]) -> Course:
        """Time plain allreduce and what is promising; end with the fastest."""
        choices = candidates(scenario, allowed)
        _require_equal(choices)
        best, plain_plan = choices[0], choices[0].plain
        plain = strategy_of(scenario.table, plain_plan, "plain allreduce")
        plain_s = yield from self._time(plain)
        if best.is_plain:
            words = f"{best.reason}; {_compare(best, plain_s, [])}"
            logger.info("Plain allreduce is kept: %s.", words)
            yield _done(plain, scenario, (best, plain_s), plain_s, f"Plain allreduce: {words}.")
            return
        trials: list[Trial] = []
        for choice in reversed(choices):
            logger.info("A plan is tried: %s, %s.", choice.name, choice.reason)
            seconds = yield from self._time(strategy_of(scenario.table, choice.plan, choice.name))
            trials.append((choice, seconds))
        yield self._decide(scenario, plain_s, trials)

    def _decide(self, scenario: Scenario, plain_s: float, trials: list[Trial]) -> Exchange:
        """Return the fastest of what was tried."""
        choice, plan_s = min(trials, key=lambda trial: trial[1])
        words = _compare(choice, plain_s, trials)
        chosen = strategy_of(scenario.table, choice.plan, choice.name)
        if plan_s <= _SLOWER * plain_s:
            logger.info("The plan is kept: %s: %s.", choice.name, words)
            text = f"The plan is kept: {words}."
        elif not self._auto.replan:
            logger.warning("The plan is slower than allreduce, and kept: %s.", words)
            text = f"Slower, and kept as replan=False: {words}."
        else:
            logger.warning("The plan is slower than allreduce, which is used: %s.", words)
            chosen = strategy_of(scenario.table, choice.plain, "plain allreduce")
            text = f"Slower than planned, plain allreduce: {words}."
        return _done(chosen, scenario, (choice, plan_s), plain_s, text)

    def _time(self, strategy: Exchange) -> Generator[Exchange | None, None, float]:
        """Use a strategy for some steps; return seconds per step, equal on all ranks."""
        yield strategy
        self._times.clear()
        for _ in range(UNMEASURED_STEPS + _TIMED_STEPS - 1):
            yield None
        times = self._times[-_TIMED_STEPS - 1 :]
        steps = [after - before for before, after in pairwise(times)]
        own_s = statistics.median(steps)
        return max(objects.allgather_object(own_s, name="times of steps"))

    def _global_batch(self) -> int | None:
        if self._auto.global_batch is not None:
            return self._auto.global_batch
        data = data_of_fit()
        return data.batch_size if isinstance(data, GlobalBatches) else None

    def _is_other(self, batch: int | None) -> bool:
        now = self._global_batch()
        if batch is None or now is None:
            return False
        return max(now / batch, batch / now) >= _OTHER_BATCH


def candidates(scenario: Scenario, allowed: Sequence[Kind]) -> list[Choice]:
    """Return what is worth a trial, the best prediction first: plain allreduce alone, or plans.

    Args:
        scenario: Model, machine, ranks, batch.
        allowed: Kinds that may be used.
    """
    families = [tuple(kind for kind in allowed if kind in family) for family in _FAMILIES]
    found: dict[object, Choice] = {}
    for family in dict.fromkeys(families):
        if "allreduce" in family or "sharded" in family:
            choice = choose(scenario, family)
            found.setdefault(choice.plan, choice)
    ordered = sorted(found.values(), key=lambda choice: choice.predicted.step_s)
    limit = _PROMISING * ordered[0].predicted.step_s
    better = [c for c in ordered if not c.is_plain and c.predicted.step_s <= limit]
    return better or ordered[:1]


def _require_equal(choices: Sequence[Choice]) -> None:
    """Require the same plans on all ranks. Collective.

    Raises:
        PlanError: Machines or batch sizes differ; on every rank.
    """
    own = [choice.fingerprint() for choice in choices]
    prints = objects.allgather_object(own, name="plan")
    if any(other != prints[0] for other in prints):
        raise PlanError(
            f"All ranks must plan alike. Received: plans {prints}, in rank order. Give every rank "
            "the same machine and global batch."
        )


def _compare(choice: Choice, plain_s: float, trials: Sequence[Trial]) -> str:
    """Return predicted against measured steps in words."""
    words = [
        f"allreduce takes {1e3 * plain_s:.2f} ms per step, "
        f"predicted {1e3 * choice.plain_predicted.step_s:.2f}"
    ]
    words += [
        f"{tried.name} {1e3 * plan_s:.2f} ms, predicted {1e3 * tried.predicted.step_s:.2f}"
        for tried, plan_s in trials
    ]
    return ", ".join(words)


def _done(
    strategy: Planned | PlannedShards, scenario: Scenario, trial: Trial, plain_s: float, text: str
) -> Exchange:
    """Return a strategy that knows its outcome."""
    choice, plan_s = trial
    is_plain = strategy.name == "plain allreduce"
    outcome = Outcome(
        strategy.name,
        (choice.plain_predicted if is_plain else choice.predicted).step_s,
        plain_s if is_plain else plan_s,
        choice.plain_predicted.step_s,
        plain_s,
        f"{explain(scenario, choice)}\n{text}\n",
    )
    return dataclasses.replace(strategy, outcome=outcome)
