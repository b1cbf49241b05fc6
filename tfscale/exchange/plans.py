"""What the planner chose, as strategies: a plan says what is sent how, instead of options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm.backends.base import Group
from tfscale.comm.runtime import ProcessSet
from tfscale.exchange import dense
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.bucketed import name_of, values_of
from tfscale.exchange.chunked import Chunked
from tfscale.exchange.sharded import Sharded
from tfscale.plan.buckets import Bucket, GradientSpec, group_buckets
from tfscale.plan.layers import LayerTable
from tfscale.plan.parts import ExchangePlan, Kind
from tfscale.plan.segments import SegmentedBucket, build_segments

_UNDECIDED = "Nothing is decided yet: exchanges are measured.\n"

CUT: tuple[Kind, ...] = ("sharded", "partial")  # each rank updates a part


@dataclass(frozen=True)
class Outcome:
    """What became of a plan, equal on all ranks.

    Attributes:
        plan: The plan in a few words.
        predicted_s: What one of its steps was to take.
        measured_s: What they took.
        plain_predicted_s: What a step of plain allreduce was to take.
        plain_measured_s: What it took.
        explanation: The table of parameters, and what was decided.
    """

    plan: str
    predicted_s: float
    measured_s: float
    plain_predicted_s: float
    plain_measured_s: float
    explanation: str


@dataclass(frozen=True)
class Planned(Chunked):
    """Buckets of gradients and replicated dense layers that a plan names.

    Attributes:
        name: The plan in a few words.
        groups: Paths of the variables of each bucket; those in none travel alone.
        replicated: Paths of dense layers that gather activations and errors.
        outcome: How the plan did; None while that is not known.
    """

    first_chunk_layers: int = 1  # not used
    name: str = ""
    groups: tuple[tuple[str, ...], ...] = ()
    replicated: tuple[str, ...] = ()
    outcome: Outcome | None = field(default=None, compare=False, repr=False)

    def _chunks(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        return group_buckets(specs, _places(specs, self.groups))

    def wire(
        self, model: keras.Model, options: GradientOptions, process_set: ProcessSet
    ) -> list[str]:
        """Let the plan's dense layers exchange activations and errors.

        Args:
            model: The model; the layers' `call` is replaced.
            options: How gradients are reduced.
            process_set: Who takes part.

        Returns:
            Names of the layers that do.
        """
        chosen = []
        shared = dense.shared_weights(model)
        for layer in model._flatten_layers():
            if layer.path in self.replicated and not dense.why_not(layer, shared):
                layer.call = dense.ReplicatedCall(layer, options, process_set)
                chosen.append(layer.name)
        return chosen

    def explain(self) -> str:
        """Return a table of parameters with what each alternative would cost, in Markdown."""
        return self.outcome.explanation if self.outcome else _UNDECIDED


@dataclass(frozen=True)
class PlannedShards(Sharded):
    """A plan some of whose parameters are sharded, and others are updated on every rank.

    Attributes:
        name: The plan in a few words.
        parts: Kind and paths of the variables of each part, in the order in which gradients exist.
        layers: Kind by path, of dense layers that exchange activations and errors.
        outcome: How the plan did; None while that is not known.
    """

    name: str = ""
    parts: tuple[tuple[Kind, tuple[str, ...]], ...] = ()
    layers: tuple[tuple[str, Kind], ...] = ()
    outcome: Outcome | None = field(default=None, compare=False, repr=False)

    def cuts(self, variable: Any) -> bool:
        """Return whether each rank updates a part of a variable only."""
        kinds = dict(self._kinds())
        return kinds.get(name_of(variable)) in CUT

    def dense_of(self, path: str) -> Any:
        """Return how the gradient of a Dense layer is made."""
        return dict(self.layers).get(path, "weights")

    def segments(
        self,
        specs: Sequence[GradientSpec],
        size: int,
        whole: frozenset[int],
        by_rows: Sequence[tuple[int, ...]],
    ) -> tuple[SegmentedBucket, ...]:
        """Return the plan's buckets of what is cut; see `Sharded.segments`."""
        groups = _places(specs, [paths for kind, paths in self.parts if kind == "sharded"])
        return build_segments(specs, size, 0, whole, by_rows, groups)

    def route(self, exchange: Callable[..., list[Any]], arrived: list[tf.Tensor]) -> Any:
        """Return what exchanges all gradients, given what exchanges those of cut variables.

        Collectives start in the order in which they are traced, so both kinds are traced in the
        order of the plan.

        Args:
            exchange: Of the variables that are cut.
            arrived: Receives a tensor of what arrives first.
        """
        summed = Planned(groups=tuple(paths for kind, paths in self.parts if kind == "allreduce"))
        numbers = {path: n for n, (_, paths) in enumerate(self.parts) for path in paths}

        def mixed(
            gradients: Sequence[Any],
            variables: Sequence[Any],
            group: Group,
            options: GradientOptions,
        ) -> list[Any]:
            results: list[Any] = list(gradients)
            last = len(self.parts)
            order = sorted(
                reversed(range(len(results))),
                key=lambda i: numbers.get(name_of(variables[i]), last),
            )
            for is_cut, run in itertools.groupby(order, lambda i: self.cuts(variables[i])):
                own = sorted(run)
                send = exchange if is_cut else summed.exchange
                part = [gradients[i] for i in own], [variables[i] for i in own]
                reduced = send(*part, group, options)
                if not arrived:
                    arrived.append(values_of(reduced[-1]))
                for i, gradient in zip(own, reduced, strict=True):
                    results[i] = gradient
            return results

        return mixed

    def explain(self) -> str:
        """Return a table of parameters with what each alternative would cost, in Markdown."""
        return self.outcome.explanation if self.outcome else _UNDECIDED

    def _kinds(self) -> list[tuple[str, Kind]]:
        return [(path, kind) for kind, paths in self.parts for path in paths]


def _places(specs: Sequence[GradientSpec], groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return positions for paths; what is not there is left out."""
    places: dict[str, int] = {}
    for place, spec in enumerate(specs):
        places.setdefault(spec.name, place)  # a second variable of one name travels alone
    found = [[places[name] for name in group if name in places] for group in groups]
    return [group for group in found if group]


def strategy_of(table: LayerTable, plan: ExchangePlan, name: str) -> Planned | PlannedShards:
    """Return the strategy that does what a plan says.

    Args:
        table: The model.
        plan: Of its parameters.
        name: The plan in a few words.
    """
    parts = [
        (part.kind, tuple(table.parameters[p].name for p in part.parameters)) for part in plan.parts
    ]
    layers = [
        (table.layers[table.parameters[part.parameters[0]].layer].name, part.kind)
        for part in plan.parts
        if part.kind in ("partial", "replicated")
    ]
    if any(kind in CUT for kind, _ in parts):
        return PlannedShards(name=name, parts=tuple(parts), layers=tuple(layers))
    return Planned(
        replicated_dense=len(layers),
        name=name,
        groups=tuple(paths for kind, paths in parts if kind == "allreduce"),
        replicated=tuple(path for path, _ in layers),
    )


def per_layer(table: LayerTable, overlap: bool) -> Planned:
    """Return an exchange of each layer alone.

    Args:
        table: The model.
        overlap: False sends nothing before all gradients exist.
    """
    groups = (tuple(name for name, _ in layer.weights) for layer in table.layers)
    return Planned(
        name="one allreduce per layer", groups=tuple(filter(None, groups)), overlap=overlap
    )
