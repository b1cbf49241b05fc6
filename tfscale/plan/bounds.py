"""What no exchange can beat, and what each holds in memory."""

from __future__ import annotations

from tfscale.plan.costs import activation_bytes, share
from tfscale.plan.layers import Layer
from tfscale.plan.parts import ExchangePlan, Kind
from tfscale.plan.specs import BYTES_PER_VALUE
from tfscale.plan.times import Scenario


def sent_bytes(scenario: Scenario, place: int, kind: Kind) -> float:
    """Return the bytes that a rank sends for a layer's parameters in each step.

    Args:
        scenario: Model, machine, ranks, batch.
        place: Position of the layer.
        kind: How it travels.
    """
    layer = scenario.table.layers[place]
    part = share(scenario.n_ranks)
    weights = BYTES_PER_VALUE * layer.n_values
    if kind in ("allreduce", "sharded"):
        return 2 * part * weights
    n_in, n_out = layer.dense or (0, 0)
    rows = scenario.gathered_batch * layer.rows
    errors = activation_bytes(n_out, rows)
    if kind == "replicated":
        return part * (activation_bytes(n_in, rows) + errors)
    return part * (activation_bytes(n_in, rows / scenario.n_ranks) + errors + weights)


def kinds_for(layer: Layer) -> tuple[Kind, ...]:
    """Return how a layer's parameters may travel."""
    if layer.dense is None:
        return ("allreduce", "sharded")
    return ("allreduce", "sharded", "partial", "replicated")


def lower_bound_s(scenario: Scenario) -> float:
    """Return a step time that no plan beats: max(compute, least communication).

    Latency, updates and sums are left out, each layer sends as few bytes as it may, and each dense
    layer computes its weight gradient where that is fastest.
    """
    least = 0.0
    compute = scenario.rest_s()
    rate = scenario.machine.link(scenario.n_ranks).bytes_per_s
    for place, layer in enumerate(scenario.table.layers):
        errors, weights = scenario.backward_s(place)
        if layer.dense:
            gathered = scenario.gradient_s(place, scenario.gathered_batch, 1 / scenario.n_ranks)
            weights = min(weights, gathered)
        compute += scenario.forward_s(place) + errors + weights
        if layer.weights:
            least += min(sent_bytes(scenario, place, kind) for kind in kinds_for(layer))
    return max(compute, least / rate)


def memory_bytes(scenario: Scenario, plan: ExchangePlan) -> float:
    """Return the bytes a rank holds for parameters, gradients, optimizer state and exchanges.

    Activations are left out: they are the same whatever the exchange.

    Args:
        scenario: Model, machine, ranks, batch.
        plan: Of its parameters.
    """
    total, n_ranks = 0.0, scenario.n_ranks
    for part in plan.parts:
        parameters = [scenario.table.parameters[p] for p in part.parameters]
        weights = sum(p.n_bytes for p in parameters)
        total += 2 * weights  # and gradients
        is_sharded = part.kind in ("sharded", "partial")
        state = scenario.n_slots * weights
        total += state / n_ranks if is_sharded else state
        if part.kind == "allreduce":
            total += weights  # the packed bucket
        elif part.kind == "sharded":
            total += 2 * weights  # sent segments, and those of the others or all parameters
        else:
            layer = scenario.table.layers[parameters[0].layer]
            n_in, n_out = layer.dense or (0, 0)
            rows = scenario.gathered_batch * layer.rows
            kept = n_in / n_ranks if part.kind == "partial" else n_in
            total += BYTES_PER_VALUE * rows * (kept + n_out)
    return total
