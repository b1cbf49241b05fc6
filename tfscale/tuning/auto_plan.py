"""`exchange="auto"`: measure, plan, compare with plain allreduce, and take the faster one."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Generator, Sequence
from itertools import pairwise

import keras

from tfscale import objects, runtime
from tfscale.data.global_batches import GlobalBatches
from tfscale.data.keras_pass import data_of_fit
from tfscale.errors import ConfigError, PlanError
from tfscale.exchange import dense
from tfscale.exchange.auto import KINDS, Auto, Planned, planned
from tfscale.exchange.base import Exchange
from tfscale.plan.choose import Choice, choose
from tfscale.plan.explain import explain
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.times import Scenario
from tfscale.trace.recorder import has_events
from tfscale.tuning.layer_probe import UNMEASURED_STEPS, LayerProbe, calibrated, measured_machine
from tfscale.tuning.model_layers import read_layers

logger = logging.getLogger("tfscale")

_TIMED_STEPS = 10
_SLOWER = 1.02  # a plan that takes so many times plain allreduce's time is given up
_OTHER_BATCH = 2.0  # a batch that grew or shrank so many times asks for another plan

Course = Generator[Exchange | None, None, None]


class AutoWatch:
    """Tries exchanges one after another; each decision is made from what all ranks measured."""

    def __init__(self, strategy: Auto, layers: Sequence[str], model: keras.Model | None) -> None:
        """Begin to watch.

        Args:
            strategy: What the user chose.
            layers: Paths of the layers that own the exchanged variables, in the order of the model.
            model: That is trained.
        """
        self._auto = strategy
        self._layers = list(layers)
        self._model = model
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
        while True:
            batch = self._global_batch()
            scenario = yield from self._measure(batch)
            if scenario is not None:
                yield from self._try(scenario, batch)
            self._times.clear()
            while not self._is_other(batch):
                self._times.clear()
                yield None
            logger.info("The batch size has changed: the exchange is planned again.")

    def _measure(self, batch: int | None) -> Generator[Exchange | None, None, Scenario | None]:
        """Return what is to be planned; None where it is not known."""
        reason = _why_not(self._model)
        if reason:
            logger.info("Nothing is planned: %s.", reason)
            return None
        table, size = self._table(), runtime.size()
        local, machine = max(1, (batch or size) // size), self._auto.read_machine()
        if machine is None or table.name not in machine.layer_times:
            if not has_events():
                logger.info("Nothing is planned: this backend measures no exchange.")
                return None
            probe = LayerProbe(self._layers)
            yield self._per_layer(table)
            while True:
                found = probe.step()
                if probe.is_over:
                    break
                yield None
            if found is None:
                logger.info("Nothing is planned: there are no two layers to exchange.")
                return None
            machine = measured_machine(table, found, size, local, machine)
            return calibrated(Scenario(table, machine, size, batch or size), found)
        return Scenario(table, machine, size, batch or size)

    def _try(self, scenario: Scenario, batch: int | None) -> Course:
        """Time plain allreduce and the plan; end with the faster one."""
        allowed = KINDS if batch else ("allreduce",)
        choice = choose(scenario, allowed)
        _require_equal(choice)
        chosen = planned(scenario.table, choice.plan, choice.name)
        plain = planned(scenario.table, choice.plain, "plain allreduce")
        text = explain(scenario, choice)
        plain_s = yield from self._time(plain)
        if choice.is_plain:
            words = f"{choice.reason}; {_compare(choice, plain_s, None)}"
            logger.info("Plain allreduce is kept: %s.", words)
            yield _with_text(plain, text, f"Plain allreduce: {words}.")
            return
        logger.info("The plan is tried: %s, %s.", choice.name, choice.reason)
        plan_s = yield from self._time(chosen)
        words = _compare(choice, plain_s, plan_s)
        if plan_s <= _SLOWER * plain_s:
            logger.info("The plan is kept: %s.", words)
            yield _with_text(chosen, text, f"The plan is kept: {words}.")
        elif not self._auto.replan:
            logger.warning("The plan is slower than allreduce, and kept: %s.", words)
            yield _with_text(chosen, text, f"Slower, and kept as replan=False: {words}.")
        else:
            logger.warning("The plan is slower than allreduce, which is used: %s.", words)
            yield _with_text(plain, text, f"Slower than planned, plain allreduce: {words}.")

    def _time(self, strategy: Planned) -> Generator[Exchange | None, None, float]:
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

    def _table(self) -> LayerTable:
        """Return the model; only its variables' sizes where it cannot be read."""
        model = self._model
        assert model is not None
        owners = {layer.path: layer for layer in model._flatten_layers()}
        try:
            table = read_layers(model)
        except ConfigError as error:
            logger.info("Dense layers send weight gradients: %s", error)
            table = LayerTable(model.name, tuple(_bare(model)))
        # What cannot gather activations and errors is no dense layer to the planner.
        shared = dense.shared_weights(model)
        layers = tuple(
            layer
            if layer.dense is None or not dense.why_not(owners[layer.name], shared)
            else dataclasses.replace(layer, dense=None)
            for layer in table.layers
        )
        return LayerTable(table.name, layers)

    def _per_layer(self, table: LayerTable) -> Planned:
        groups = (tuple(name for name, _ in layer.weights) for layer in table.layers)
        return Planned(name="one allreduce per layer", groups=tuple(filter(None, groups)))


def _require_equal(choice: Choice) -> None:
    """Require the same plan on all ranks. Collective.

    Raises:
        PlanError: Machines or batch sizes differ; on every rank.
    """
    prints = objects.allgather_object(choice.fingerprint(), name="plan")
    if len(set(prints)) > 1:
        raise PlanError(
            f"All ranks must plan alike. Received: plans {prints}, in rank order. Give every rank "
            "the same machine and global batch."
        )


def _why_not(model: keras.Model | None) -> str:
    """Return why steps cannot be planned, or an empty string."""
    if model is None:
        return "the model is not known"
    if model.steps_per_execution > 1:
        return "several steps run at a time"
    if getattr(model.optimizer, "_self_accumulator", None) is not None:
        return "gradients are added up over several steps before they travel"
    return ""


def _bare(model: keras.Model) -> list[Layer]:
    owners: dict[str, list[tuple[str, int]]] = {}
    for variable in model.trainable_variables:
        owner = variable.path.rpartition("/")[0] or variable.path
        owners.setdefault(owner, []).append((variable.path, math.prod(variable.shape)))
    return [Layer(owner, tuple(weights)) for owner, weights in owners.items()]


def _compare(choice: Choice, plain_s: float, plan_s: float | None) -> str:
    """Return predicted against measured steps in words."""
    words = [
        f"allreduce takes {1e3 * plain_s:.2f} ms per step, "
        f"predicted {1e3 * choice.plain_predicted.step_s:.2f}"
    ]
    if plan_s is not None:
        words.append(
            f"the plan {1e3 * plan_s:.2f} ms, predicted {1e3 * choice.predicted.step_s:.2f}"
        )
    return ", ".join(words)


def _with_text(strategy: Planned, text: str, outcome: str) -> Planned:
    return dataclasses.replace(strategy, explanation=f"{text}\n{outcome}\n")
