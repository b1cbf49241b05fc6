"""Choose the exchange of `"auto"` and of `Chunked("auto")` from measured steps."""

from __future__ import annotations

import abc
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import keras

from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import dense
from tfscale.exchange.auto import Auto, Outcome, per_layer, strategy_of
from tfscale.exchange.base import Exchange
from tfscale.exchange.chunked import Chunked
from tfscale.internals.keras import layers_of
from tfscale.internals.optimizers import update_rule
from tfscale.measure import layer_times
from tfscale.measure.model_layers import read_layers
from tfscale.optimizer.distributed import accumulators, distributed_of
from tfscale.optimizer.rules import LAYERWISE
from tfscale.plan.buckets import BYTES_PER_VALUE, Kind, owner_of
from tfscale.plan.choose import Choice, best_first_chunk, choose
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import explain
from tfscale.plan.layers import Layer, LayerTable
from tfscale.trace.events import has_events

logger = logging.getLogger("tfscale")

T = TypeVar("T")
# Yields the strategy of the next step if it changes, and is resumed after that step.
Course = Generator[Exchange | None, None, T]


class Watch(abc.ABC):
    """Measurements over the steps of `fit`, after which the strategy may change."""

    may_cut: bool  # whether it may return a strategy that shards parameters

    def __init__(
        self, strategy: Any, layers: Sequence[str], model: Any, why_uncut: Callable[[Any], str]
    ) -> None:
        """Begin; `layers` are the paths of those that own exchanged variables."""
        self._strategy, self._layers = strategy, list(layers)
        self._model, self._why_uncut = model, why_uncut
        self._data: Any = None
        self._callbacks: Sequence[Any] = ()
        self._course = self._run()

    def step(self, data: Any = None, callbacks: Sequence[Any] = ()) -> Exchange | None:
        """Count a step; return the strategy for the next step if it changes. Collective.

        `data` and `callbacks` are those of the `fit`; None and empty outside of `fit`.
        """
        self._data, self._callbacks = data, callbacks
        return next(self._course)

    @abc.abstractmethod
    def _run(self) -> Iterator[Exchange | None]:
        """Yield the strategy of the next step if it changes; resumed after that step."""


class FirstChunkWatch(Watch):
    """Measure steps that exchange each layer alone, then choose the end of the first chunk.

    The first chunk has half of the layers if the backend records no collectives, and one layer if
    fewer than two are exchanged.
    """

    may_cut = False

    def _run(self) -> Course[None]:
        strategy = self._strategy
        n_replicated = 0 if strategy.replicated_dense == "auto" else strategy.replicated_dense
        first = max(1, (len(self._layers) - n_replicated) // 2)
        if has_events():
            times = yield from layer_times.time_layers(self._layers)
            first = 1 if times is None else _best_first_chunk(strategy, times)
        yield dataclasses.replace(strategy, first_chunk_layers=first)
        while True:
            yield None


def _best_first_chunk(strategy: Chunked, measurement: layer_times.LayerMeasurement) -> int:
    layers = [
        Layer(path, ((f"{path}/gradients", n_bytes // BYTES_PER_VALUE),))
        for path, n_bytes in zip(measurement.layers, measurement.n_bytes, strict=True)
    ]
    table, size = LayerTable("measured", tuple(layers)), runtime.size()
    machine = layer_times.measured_machine(table, measurement, size, 1, None)
    chunks = strategy.chunks if isinstance(strategy.chunks, int) else 2
    first = best_first_chunk(Scenario(table, machine, size, size), chunks)
    speed = machine.bytes_per_s / 1e6, machine.latency_s * 1e6
    text = "The first chunk takes %d of %d layers (%.0f MB/s, %.0f us per message)."
    logger.info(text, first, len(layers), *speed)
    return first


# The model, and the machine it is trained on


def _why_not(model: keras.Model | None) -> str:
    """Return the reason if steps cannot be planned, else an empty string."""
    if model is None:
        return "the model is not known"
    if model.steps_per_execution > 1:
        return "several steps run at a time"
    if accumulators(model):
        return "gradients are added up over several steps before they are sent"
    return ""


def table_of(model: keras.Model) -> LayerTable:
    """Return the layer table of a model; only sizes of variables if it cannot be traced."""
    owners = {layer.path: layer for layer in layers_of(model)}
    try:
        table = read_layers(model)
    except Exception as error:  # of any type: a user's model is called with symbolic inputs
        logger.info("Dense layers send weight gradients: %s", error)
        weights_by_owner: dict[str, list[tuple[str, int]]] = {}
        for v in model.trainable_variables:
            weights_by_owner.setdefault(owner_of(v.path), []).append((v.path, math.prod(v.shape)))
        layers = [Layer(owner, tuple(weights)) for owner, weights in weights_by_owner.items()]
        table = LayerTable(model.name, tuple(layers))
    # The planner must not see layers that cannot gather activations and output gradients as dense.
    shared = dense.shared_weights(model)

    def is_dense(layer: Layer) -> bool:
        keras_layer: Any = owners[layer.name]
        has_rows = layer.dense is not None and layer.dense[0] >= runtime.size()
        return (
            has_rows
            and keras_layer.kernel.constraint is None
            and not dense.why_not(keras_layer, shared)
        )

    layers = [
        dataclasses.replace(x, dense=None) if x.dense and not is_dense(x) else x
        for x in table.layers
    ]
    return LayerTable(table.name, tuple(layers))


def _n_slots(model: keras.Model) -> int:
    """Return the number of values of optimizer state per parameter."""
    state = model.optimizer.memory_report()["complete_state"]
    weight_bytes = sum(math.prod(v.shape) * v.value.dtype.size for v in model.trainable_variables)
    return round(state / max(weight_bytes, 1))


def _measure(
    auto: Auto, layers: Sequence[str], model: keras.Model, batch: int | None
) -> Course[Scenario | None]:
    """Return the scenario to plan, or None; exchanges each layer alone if times are unknown.

    `layers` are paths of those that own exchanged variables, in the order of the model. `batch` are
    samples of all ranks together, if known.
    """
    table, size = table_of(model), runtime.size()
    saved_machine, n_slots = auto.read_machine(), _n_slots(model)
    times = None if saved_machine is None else saved_machine.layer_times.get(table.name)
    if saved_machine is not None and times is not None and not times.misfit(table):
        return Scenario(table, saved_machine, size, batch or size, n_slots)
    if not has_events():
        logger.info("Nothing is planned: the backend records no messages. Use the engine.")
        return None
    yield per_layer(table, overlap=False)
    alone = yield from layer_times.time_layers(layers)
    yield per_layer(table, overlap=True)
    together = yield from layer_times.time_layers(layers)
    if alone is None or together is None or alone.layers != together.layers:
        logger.info("Nothing is planned: there are no two layers to exchange.")
        return None
    separated = layer_times.separate(alone, together)
    scenario = layer_times.measured_scenario(table, separated, batch, saved_machine, n_slots)
    machine = scenario.machine
    logger.info(
        "Measured: %.0f MB/s and %.0f us per message; computing runs at %.0f %% while messages "
        "are under way, messages at %.0f %% while something is computed.",
        machine.bytes_per_s / 1e6,
        machine.latency_s * 1e6,
        100 * machine.compute_share,
        100 * machine.message_share,
    )
    return scenario


# Plans, tried one after another

_PLAIN = "plain allreduce"
_TIMED_STEPS = 10
_SLOWER = 1.02  # a plan slower than this multiple of plain allreduce's time is given up
_OTHER_BATCH = 2.0  # a batch that grew or shrank by this factor needs another plan
_PROMISING = 1.25  # plans predicted within this multiple of the best one's time are tried
# The best plan of each family is tried, if it is promising: predictions are not exact.
_FAMILIES: tuple[tuple[Kind, ...], ...] = (
    ("allreduce", "sharded", "partial", "replicated"),
    ("allreduce", "replicated"),
    ("sharded", "partial"),
)

Trial = tuple[Choice, float]  # and the seconds that its steps took


class AutoWatch(Watch):
    """Try exchanges one after another; decisions depend on the times of all ranks."""

    may_cut = True

    def _run(self) -> Course[None]:
        model, reason = self._model, _why_not(self._model)
        while True:
            batch = self._global_batch()
            if reason or model is None:
                logger.info("Nothing is planned: %s.", reason)
            else:
                scenario = yield from _measure(self._strategy, self._layers, model, batch)
                if scenario is None:
                    yield self._strategy  # allreduce in buckets, as before measuring
                else:
                    yield from self._try(scenario, self._allowed(model, batch))
            while not self._is_other(batch):
                yield None
            logger.info("The batch size has changed: the exchange is planned again.")

    def _allowed(self, model: keras.Model, batch: int | None) -> tuple[Kind, ...]:
        """Return the kinds of exchange the model allows, equal on all ranks. Collective."""
        swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in self._callbacks)
        reason = "SwapEMAWeights reads whole averages" if swaps else self._why_uncut(model)
        reasons = [
            r for r in objects.allgather_object(reason, name="why parameters stay whole") if r
        ]
        kinds: list[Kind] = ["allreduce"]
        if reasons:
            logger.info("Parameters are not sharded: %s.", reasons[0])
        else:
            needs_whole = type(update_rule(model.optimizer.__wrapped__)) in LAYERWISE
            kinds += ["sharded", "partial"] if batch and not needs_whole else ["sharded"]
        return (*kinds, "replicated") if batch else tuple(kinds)

    def _try(self, scenario: Scenario, allowed: Sequence[Kind]) -> Course[None]:
        """Time plain allreduce and the promising plans; end with the fastest."""
        choices = candidates(scenario, allowed)
        plans = [choice.fingerprint() for choice in choices]
        objects.require_equal(plans, "Plans", "Give all the same machine and global batch.")
        best = choices[0]
        plain_s = yield from _time(strategy_of(scenario.table, best.plain, _PLAIN))
        trials: list[Trial] = []
        for choice in () if best.is_plain else reversed(choices):
            logger.info("A plan is tried: %s, %s.", choice.name, choice.reason)
            seconds = yield from _time(strategy_of(scenario.table, choice.plan, choice.name))
            trials.append((choice, seconds))
        yield self._decide(scenario, best, plain_s, trials)

    def _decide(
        self, scenario: Scenario, best: Choice, plain_s: float, trials: list[Trial]
    ) -> Exchange:
        """Return the fastest strategy; not plain allreduce if the user set replan=False."""
        choice, plan_s = min(trials, key=lambda trial: trial[1], default=(best, plain_s))
        comparison = _compare(choice, plain_s, trials)
        is_slower = plan_s > _SLOWER * plain_s
        is_plain = choice.is_plain or (is_slower and self._strategy.replan)
        if choice.is_plain:
            text = f"Plain allreduce: {choice.reason}; {comparison}."
        elif not is_slower:
            text = f"The plan is kept: {choice.name}; {comparison}."
        elif is_plain:
            text = f"Slower than planned, plain allreduce: {comparison}."
        else:
            text = f"Slower, and kept as replan=False: {choice.name}; {comparison}."
        logger.log(logging.WARNING if is_slower else logging.INFO, text)
        predicted = choice.plain_predicted if is_plain else choice.predicted
        name, plan = (_PLAIN, choice.plain) if is_plain else (choice.name, choice.plan)
        outcome = Outcome(
            name,
            predicted.step_s,
            plain_s if is_plain else plan_s,
            choice.plain_predicted.step_s,
            plain_s,
            f"{explain(scenario, choice)}\n{text}\n",
        )
        return dataclasses.replace(strategy_of(scenario.table, plan, name), outcome=outcome)

    def _global_batch(self) -> int | None:
        if isinstance(self._data, GlobalBatches):
            return self._data.batch_size
        return (
            None if self._model is None else self._model.optimizer.bound.executor.dense.global_batch
        )

    def _is_other(self, batch: int | None) -> bool:
        now = self._global_batch()
        if batch is None or now is None:
            return False
        return max(now / batch, batch / now) >= _OTHER_BATCH


def _time(strategy: Exchange) -> Course[float]:
    """Use a strategy for some steps; return seconds per step, equal on all ranks."""
    yield strategy
    ends = []
    for _ in range(layer_times.UNMEASURED_STEPS + _TIMED_STEPS - 1):
        yield None
        ends.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(ends[-_TIMED_STEPS - 1 :])]
    return max(objects.allgather_object(statistics.median(steps), name="times of steps"))


def candidates(scenario: Scenario, allowed: Sequence[Kind]) -> list[Choice]:
    """Return the promising plans, the best prediction first; plain allreduce if there are none."""
    families = [tuple(kind for kind in allowed if kind in family) for family in _FAMILIES]
    choice_by_plan: dict[object, Choice] = {}
    for family in dict.fromkeys(families):
        if "allreduce" in family or "sharded" in family:
            choice = choose(scenario, family)
            choice_by_plan.setdefault(choice.plan, choice)
    ordered = sorted(choice_by_plan.values(), key=lambda choice: choice.predicted.step_s)
    limit = _PROMISING * ordered[0].predicted.step_s
    better = [c for c in ordered if not c.is_plain and c.predicted.step_s <= limit]
    return better or ordered[:1]


def _compare(choice: Choice, plain_s: float, trials: Sequence[Trial]) -> str:
    """Return a text that compares predicted and measured step times."""
    predicted_s = choice.plain_predicted.step_s
    clauses = [
        f"allreduce takes {1e3 * plain_s:.2f} ms per step, predicted {1e3 * predicted_s:.2f}"
    ]
    clauses += [
        f"{tried.name} {1e3 * plan_s:.2f} ms, predicted {1e3 * tried.predicted.step_s:.2f}"
        for tried, plan_s in trials
    ]
    return ", ".join(clauses)


_WATCHES = {Auto: AutoWatch, Chunked: FirstChunkWatch}


def watch_for(strategy: Exchange, *arguments: Any) -> Watch:
    """Return the watch of a strategy that measures steps; see `Watch` for the arguments."""
    return _WATCHES[type(strategy)](strategy, *arguments)


def after_step(optimizer: Any, data: Any = None, callbacks: Sequence[Any] = ()) -> bool:
    """Let an exchange that measures steps, such as "auto", observe a step. Collective.

    `fit` calls this after each step; a custom training loop with `exchange="auto"` must do the
    same, on every rank.

    Args:
        optimizer: The `DistributedOptimizer` that has made the step.
        data: The data of `fit`; the plan is made for the batch size of a `GlobalBatches`.
        callbacks: The callbacks of `fit`.

    Returns:
        Whether the step must be traced again, since the exchange has changed.

    Raises:
        ConfigError: `optimizer` is not a DistributedOptimizer.

    Examples:
        >>> tfscale.init()
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.5), exchange="auto")
        >>> weight = keras.Variable([1.0])
        >>> for gradient in ([1.0], [2.0]):
        ...     optimizer.apply([tf.constant(gradient)], [weight])
        ...     is_changed = tfscale.after_step(optimizer)
        >>> weight.numpy().tolist(), is_changed  # one rank has no exchange to choose
        ([-0.5], False)
    """
    distributed = distributed_of(optimizer)
    if distributed is None:
        raise ConfigError(
            "optimizer must be a tfscale.DistributedOptimizer. Received: "
            f"{type(optimizer).__name__}. Wrap the optimizer."
        )
    return distributed.after_step(watch_for, data, callbacks)
