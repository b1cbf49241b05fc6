"""The planner's exchange: what is sent how follows from a plan instead of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfscale.backends.base import Group
from tfscale.errors import ConfigError
from tfscale.exchange import dense
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.chunked import Chunked
from tfscale.plan.buckets import Bucket, group_buckets
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine, find_machine
from tfscale.plan.parts import ExchangePlan, Kind
from tfscale.plan.specs import GradientSpec
from tfscale.process_sets import ProcessSet

# What `Planned` can do. "sharded" and "partial" need an optimizer that is built on shards.
KINDS: tuple[Kind, ...] = ("allreduce", "replicated")


@dataclass(frozen=True)
class Auto:
    """Plans the exchange from the times of the first steps of a `fit`.

    Ten steps exchange each layer alone and measure when gradients exist and how long an exchange
    takes; `tfscale.plan` then chooses buckets and which dense layers gather activations and errors.
    Plain allreduce and the plan are both timed for some steps. All ranks agree on every decision,
    and every step is synchronous SGD whatever is being tried.

    Outside of `fit`, and until it has begun, this is `Allreduce()`.

    Attributes:
        machine: None measures; a `Machine`, the name of a preset or a file of `tfscale tune links`
            gives the links, and the layers' times where it has those of the model.
        global_batch: Samples of all ranks together; None takes that of `GlobalBatches`. Without it
            dense layers send their weight gradients.
        replan: Go back to plain allreduce where the plan is measured to be slower.
    """

    machine: Machine | str | None = None
    global_batch: int | None = None
    replan: bool = True

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: An option does not fit.
        """
        if self.global_batch is not None and not self.global_batch > 0:
            raise ConfigError(
                "global_batch must be 1 or more, or None. "
                f"Received: global_batch={self.global_batch!r}."
            )
        self.read_machine()

    def read_machine(self) -> Machine | None:
        """Return the machine that was named, if any.

        Raises:
            ConfigError: There is none of that name.
        """
        if self.machine is None or isinstance(self.machine, Machine):
            return self.machine
        try:
            return find_machine(self.machine)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        options: GradientOptions,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return the reduced gradients, in order: those of `Allreduce`."""
        return Allreduce().exchange(gradients, variables, group, options)

    def explain(self) -> str:
        """Return what is known so far."""
        return "Nothing is planned yet: `fit` measures its first steps, then chooses.\n"


@dataclass(frozen=True)
class Planned(Chunked):
    """Chunks of gradients and replicated dense layers that a plan names.

    Attributes:
        name: The plan in a few words.
        groups: Paths of the variables of each bucket; those in none travel alone.
        replicated: Paths of dense layers that gather activations and errors.
        explanation: What `explain` returns.
    """

    first_chunk_layers: int = 1  # not used
    name: str = ""
    groups: tuple[tuple[str, ...], ...] = ()
    replicated: tuple[str, ...] = ()
    explanation: str = field(default="", compare=False, repr=False)

    def _chunks(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        places: dict[str, int] = {}
        for place, spec in enumerate(specs):
            places.setdefault(spec.name, place)  # a second variable of one name travels alone
        groups = [[places[name] for name in group if name in places] for group in self.groups]
        return group_buckets(specs, [group for group in groups if group])

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
        return self.explanation


def planned(table: LayerTable, plan: ExchangePlan, name: str) -> Planned:
    """Return the strategy that does what a plan says.

    Args:
        table: The model.
        plan: A plan of kinds in `KINDS`.
        name: The plan in a few words.
    """
    groups, replicated = [], []
    for part in plan.parts:
        parameters = [table.parameters[p] for p in part.parameters]
        if part.kind == "replicated":
            replicated.append(table.layers[parameters[0].layer].name)
        else:
            groups.append(tuple(p.name for p in parameters))
    return Planned(
        replicated_dense=len(replicated),
        name=name,
        groups=tuple(groups),
        replicated=tuple(replicated),
    )
