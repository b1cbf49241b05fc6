"""Exchange plans as the simulator uses them, with their bytes, memory and a lower bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfscale.plan.buckets import (
    BYTES_PER_VALUE,
    Bucket,
    GradientSpec,
    Kind,
    build_buckets,
    build_chunks,
)
from tfscale.plan.costs import Algorithm, Scenario, share
from tfscale.plan.layers import Layer, LayerTable

# What a planner chooses from.
KINDS: tuple[Kind, ...] = ("allreduce", "sharded", "partial", "replicated")


@dataclass(frozen=True)
class LayerPart:
    """Parameters that are sent together.

    "allreduce": gradients are summed everywhere. "sharded": each rank sums and updates its segment,
    then parameters are gathered. "partial": a dense layer's activations are distributed by columns
    and its output gradients gathered; each rank computes and updates its part of the weights.
    "replicated": both are gathered, and every rank computes the whole gradient.
    """

    kind: Kind
    parameters: tuple[int, ...]  # positions; of one dense layer for the last two kinds


@dataclass(frozen=True)
class LayerPlan:
    """The exchange of all parameters of a model."""

    parts: tuple[LayerPart, ...]  # in the order in which they become ready; each parameter in one
    # False: nothing is sent before back-propagation ends, and no step begins before the exchange of
    # the previous one has ended.
    overlap: bool = True
    # Kinds for which each layer of the next forward pass waits for its own parameters only.
    lazy: tuple[Kind, ...] = ("sharded", "partial")
    # Whether a gradient is computed as soon as its activations and output gradients are gathered;
    # False: after back-propagation, as in [T] 4.4.1.
    has_early_gradients: bool = True
    # Larger vectors are sent in pieces that more urgent ones can overtake, as the engine sends them
    # in chunks; 0: one piece, as with blocking MPI calls.
    piece_bytes: int = 32 * 2**20
    # Longest message of a gather of parameters between hosts, as in custom_ops/comm/gather.cc: an
    # eighth of TFSCALE_CHUNK_BYTES, so that urgent messages wait for little. 0: not cut.
    gather_bytes: int = 128 * 1024
    algorithm: Algorithm = "direct"  # for sums of whole gradients


def specs_of(table: LayerTable) -> list[GradientSpec]:
    """Return the gradients of a model, for `build_buckets` and `build_chunks`."""
    return [GradientSpec(p.name, (p.n_values,), "float32") for p in table.parameters]


def dense_layers(table: LayerTable) -> list[int]:
    """Return the positions of dense layers."""
    return [i for i, layer in enumerate(table.layers) if layer.dense and layer.weights]


def bucketed(
    table: LayerTable,
    bucket_bytes: int | None,
    kind: Kind = "allreduce",
    special: dict[int, Kind] | None = None,
) -> LayerPlan:
    """Return a plan of buckets of neighbouring parameters.

    `bucket_bytes` of 0 sends each parameter alone, None each layer alone. `special` has the kinds
    of dense layers that are "partial" or "replicated", by position of the layer.
    """

    def group(specs: Sequence[GradientSpec]) -> Sequence[Bucket]:
        if bucket_bytes is None:
            return build_chunks(specs, 1, "per_layer")
        return build_buckets(specs, bucket_bytes)

    return _grouped(table, kind, special or {}, group)


def chunked(table: LayerTable, first: int, chunks: int = 2, replicated: int = 0) -> LayerPlan:
    """Return the plan of `tfscale.Chunked`, [T] chapter 3.

    The first chunk has `first` layers. The first `replicated` dense layers gather activations and
    output gradients instead; they are in no chunk.
    """
    special: dict[int, Kind] = dict.fromkeys(dense_layers(table)[:replicated], "replicated")
    return _grouped(table, "allreduce", special, lambda s: build_chunks(s, first, chunks))


def _grouped(
    table: LayerTable,
    kind: Kind,
    special: dict[int, Kind],
    group: Callable[[Sequence[GradientSpec]], Sequence[Bucket]],
) -> LayerPlan:
    """Return a plan with the `special` layers and all other parameters grouped by `group`."""
    specs = specs_of(table)
    rest = [i for i, p in enumerate(table.parameters) if p.layer not in special]
    groups = group([specs[i] for i in rest]) if rest else ()
    parts = [LayerPart(kind, tuple(rest[i] for i in one)) for one in groups]
    parts += [LayerPart(one, table.positions(layer)) for layer, one in special.items()]
    return LayerPlan(_in_ready_order(parts))


def with_part(plan: LayerPlan, new: LayerPart) -> LayerPlan:
    """Return the plan with some parameters sent as a part of their own."""
    rest = [
        LayerPart(part.kind, tuple(i for i in part.parameters if i not in new.parameters))
        for part in plan.parts
    ]
    return replace(plan, parts=_in_ready_order([new, *(part for part in rest if part.parameters)]))


def _in_ready_order(parts: Sequence[LayerPart]) -> tuple[LayerPart, ...]:
    """Return parts in the order in which back-propagation completes them."""
    return tuple(sorted(parts, key=lambda part: (min(part.parameters), part.kind), reverse=True))


def message_bytes(scenario: Scenario, layer_index: int, kind: Kind) -> tuple[float, ...]:
    """Return the bytes of each collective of a layer, as `transfer_s` counts them.

    Source: [T] eq. 4.9 for gradients and parameters; 3.3.3 for activations and output gradients,
    (N_in + N_out) * K values; eqs. 4.2 to 4.4 for columns of the activations, the output gradients,
    and weights.
    """
    weights = BYTES_PER_VALUE * scenario.table.layers[layer_index].n_values
    if kind in ("allreduce", "sharded"):
        return weights, weights
    (n_in, n_out), rows = scenario.dense_rows(layer_index)
    outputs = BYTES_PER_VALUE * n_out * rows
    if kind == "replicated":
        return BYTES_PER_VALUE * n_in * rows, outputs
    return BYTES_PER_VALUE * n_in * (rows / scenario.n_ranks), outputs, weights


def sent_bytes(scenario: Scenario, layer_index: int, kind: Kind) -> float:
    """Return the bytes that a rank sends for a layer's parameters in each step."""
    return share(scenario.n_ranks) * sum(message_bytes(scenario, layer_index, kind))


def cheap_partial_layers(scenario: Scenario) -> dict[int, Kind]:
    """Return the dense layers that send fewer bytes "partial" than "sharded", [T] eq. 4.8."""
    return {
        layer_index: "partial"
        for layer_index in dense_layers(scenario.table)
        if sent_bytes(scenario, layer_index, "partial")
        < sent_bytes(scenario, layer_index, "sharded")
    }


def kinds_for(layer: Layer) -> tuple[Kind, ...]:
    """Return the kinds of exchange that a layer allows."""
    return KINDS if layer.dense else KINDS[:2]


def lower_bound_s(scenario: Scenario) -> float:
    """Return a step time that no plan beats: max(compute, least communication).

    Latency, updates and sums are left out, each layer sends as few bytes as possible, and each
    dense layer computes its weight gradient in the fastest way.
    """
    least = 0.0
    compute = scenario.rest_s()
    rate = scenario.machine.link(scenario.n_ranks).bytes_per_s
    for layer_index, layer in enumerate(scenario.table.layers):
        inputs_s, weights_s = scenario.backward_s(layer_index)
        if layer.dense:
            gathered = scenario.gradient_s(
                layer_index, scenario.gathered_batch, 1 / scenario.n_ranks
            )
            weights_s = min(weights_s, gathered)
        compute += scenario.forward_s(layer_index) + inputs_s + weights_s
        if layer.weights:
            least += min(sent_bytes(scenario, layer_index, kind) for kind in kinds_for(layer))
    return max(compute, least / rate)


def plan_bytes(scenario: Scenario, plan: LayerPlan) -> float:
    """The bytes that a rank sends in a step of a plan."""
    table = scenario.table
    total = 0.0
    for part in plan.parts:
        for parameter in (table.parameters[number] for number in part.parameters):
            share = parameter.n_values / max(1, table.layers[parameter.layer].n_values)
            total += share * sent_bytes(scenario, parameter.layer, part.kind)
    return total


def memory_bytes(scenario: Scenario, plan: LayerPlan) -> float:
    """Return a rank's bytes for parameters, gradients, optimizer state and exchanges."""
    total, n_ranks = 0.0, scenario.n_ranks
    for part in plan.parts:
        parameters = [scenario.table.parameters[p] for p in part.parameters]
        weights = sum(p.n_bytes for p in parameters)
        total += 2 * weights  # parameters and gradients
        is_sharded = part.kind in ("sharded", "partial")
        state = scenario.n_slots * weights
        total += state / n_ranks if is_sharded else state
        if part.kind == "allreduce":
            total += weights  # the packed bucket
        elif part.kind == "sharded":
            total += 2 * weights  # segments to send, and received segments or all parameters
        else:
            (n_in, n_out), rows = scenario.dense_rows(parameters[0].layer)
            kept = n_in / n_ranks if part.kind == "partial" else n_in
            total += BYTES_PER_VALUE * rows * (kept + n_out)
    return total
