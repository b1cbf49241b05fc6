"""What `exchange="auto"` plans for: the model, and the machine as its first steps show it."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Generator, Sequence
from typing import Any

import keras

from tfscale import runtime
from tfscale.exchange import dense
from tfscale.exchange.auto import Auto
from tfscale.exchange.base import Exchange
from tfscale.exchange.plans import per_layer
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import Machine
from tfscale.plan.times import Scenario
from tfscale.trace.recorder import has_events
from tfscale.tuning.compute_probe import measure_gradients, measure_memory
from tfscale.tuning.contention import separate
from tfscale.tuning.layer_probe import (
    LayerMeasurement,
    LayerProbe,
    calibrated,
    measured_machine,
)
from tfscale.tuning.model_layers import read_layers
from tfscale.tuning.step_probe import StepProbe

logger = logging.getLogger("tfscale")

Course = Generator[Exchange | None, None, Any]


def why_not(model: keras.Model | None) -> str:
    """Return why steps cannot be planned, or an empty string."""
    if model is None:
        return "the model is not known"
    if model.steps_per_execution > 1:
        return "several steps run at a time"
    if getattr(model.optimizer, "_self_accumulator", None) is not None:
        return "gradients are added up over several steps before they travel"
    return ""


def table_of(model: keras.Model) -> LayerTable:
    """Return the model; only its variables' sizes where it cannot be read."""
    owners = {layer.path: layer for layer in model._flatten_layers()}
    try:
        table = read_layers(model)
    except Exception as error:  # whatever a model of the user's does with inputs made up
        logger.info("Dense layers send weight gradients: %s", error)
        table = LayerTable(model.name, tuple(_bare(model)))
    # What cannot gather activations and errors is no dense layer to the planner.
    shared = dense.shared_weights(model)

    def is_dense(layer: Layer) -> bool:
        own: Any = owners[layer.name]
        has_rows = layer.dense is not None and layer.dense[0] >= runtime.size()
        return has_rows and own.kernel.constraint is None and not dense.why_not(own, shared)

    layers = [
        dataclasses.replace(x, dense=None) if x.dense and not is_dense(x) else x
        for x in table.layers
    ]
    return LayerTable(table.name, tuple(layers))


def _bare(model: keras.Model) -> list[Layer]:
    owners: dict[str, list[tuple[str, int]]] = {}
    for variable in model.trainable_variables:
        owner = variable.path.rpartition("/")[0] or variable.path
        owners.setdefault(owner, []).append((variable.path, math.prod(variable.shape)))
    return [Layer(owner, tuple(weights)) for owner, weights in owners.items()]


def _n_slots(model: keras.Model) -> int:
    """Return how many values of optimizer state there are per parameter."""
    state = model.optimizer.memory_report()["complete_state"]
    own = sum(math.prod(v.shape) * v.value.dtype.size for v in model.trainable_variables)
    return round(state / max(own, 1))


def measure(
    auto: Auto, layers: Sequence[str], model: keras.Model, batch: int | None
) -> Generator[Exchange | None, None, Scenario | None]:
    """Exchange each layer alone for some steps, with and without overlap, unless all is known.

    Args:
        auto: What the user chose.
        layers: Paths of the layers that own the exchanged variables, in the order of the model.
        model: That is trained.
        batch: Samples of all ranks together, where they are known.

    Returns:
        What is to be planned; None where it cannot be measured.
    """
    table, size = table_of(model), runtime.size()
    samples, known, n_slots = batch or size, auto.read_machine(), _n_slots(model)
    if known is not None and _has_times(known, table):
        return Scenario(table, known, size, samples, n_slots)
    parts = yield from _measure_layers(layers, table)
    if parts is None:
        logger.info("Nothing is planned: there are no two layers to exchange.")
        return None
    together, found, compute_share, message_share = parts
    # Updates are measured by themselves; what is left of the step is calibrated below.
    found = dataclasses.replace(found, after_s=0.0)
    local = max(1, samples // size)
    machine = measured_machine(table, found, size, local, known)
    if known is None:
        machine = dataclasses.replace(
            machine,
            memory_bytes_per_s=measure_memory(),
            compute_share=compute_share,
            message_share=message_share,
        )
    times = machine.layer_times[table.name]
    gradients = measure_gradients(table, size, batch) if batch else {}
    times = dataclasses.replace(times, gradient_s=gradients)
    machine = dataclasses.replace(machine, layer_times={table.name: times})
    logger.info(
        "Measured: %.0f MB/s and %.0f us per message; computing runs at %.0f %% while messages "
        "are under way, messages at %.0f %% while something is computed.",
        machine.bytes_per_s / 1e6,
        machine.latency_s * 1e6,
        100 * machine.compute_share,
        100 * machine.message_share,
    )
    scenario = Scenario(table, machine, size, samples, n_slots)
    # Without a record of collectives, what is not explained was laid to computing already.
    return calibrated(scenario, together) if has_events() else scenario


def _has_times(machine: Machine, table: LayerTable) -> bool:
    """Return whether all layers were measured; Keras renumbers those of a model made again."""
    times = machine.layer_times.get(table.name)
    if times is None or times.n_values not in (0, table.n_values):
        return False
    return all(layer.name in times.forward_s for layer in table.layers)


def _measure_layers(
    layers: Sequence[str], table: LayerTable
) -> Generator[
    Exchange | None, None, tuple[LayerMeasurement, LayerMeasurement, float, float] | None
]:
    """Return a measurement as made, the same taken apart, and the shares of `separate`."""
    if not has_events():
        found = yield from _probe(StepProbe(layers, table), table, overlap=False)
        return None if found is None else (found, found, 1.0, 1.0)
    alone = yield from _probe(LayerProbe(layers), table, overlap=False)
    together = yield from _probe(LayerProbe(layers), table, overlap=True)
    if alone is None or together is None or alone.layers != together.layers:
        return None
    return (together, *separate(alone, together))


def _probe(
    probe: LayerProbe | StepProbe, table: LayerTable, overlap: bool
) -> Generator[Exchange | None, None, LayerMeasurement | None]:
    yield per_layer(table, overlap)
    while True:
        found = probe.step()
        if probe.is_over:
            return found
        yield None
