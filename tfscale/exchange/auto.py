"""`exchange="auto"`: the planner's request, and the strategies that carry out its plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.base import DenseKind, DenseLayer, Exchange, require
from tfscale.exchange.plan import ExchangePlan, Table, compile_plan, cut_parameters
from tfscale.exchange.sharded import dense_kind
from tfscale.plan import parts as simulated
from tfscale.plan.buckets import Bucket, GradientSpec, group_buckets
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine, find_machine
from tfscale.plan.parts import Kind
from tfscale.plan.segments import build_segments

CUT: tuple[Kind, ...] = ("sharded", "partial")  # each rank updates a part


@dataclass(frozen=True)
class Auto(Exchange):
    """Plans the exchange from the times of the first steps of a `fit`.

    Twenty steps exchange each layer alone and measure when gradients exist, how long an exchange
    takes, and what computing and messages take from each other; `tfscale.plan` then chooses for
    each parameter among allreduced and sharded buckets and dense layers that gather activations
    and errors. Plain allreduce and the best plans are timed for some steps each, and the fastest
    is kept. All ranks agree on every decision, and every step is synchronous SGD whatever is being
    tried.

    Until it has decided, and where the optimizer's `after_step` is not called (`fit` does, given a
    tfscale callback), this is `Allreduce()`.

    Attributes:
        machine: None measures; a `Machine`, the name of a preset or a file of `tfscale tune links`
            gives the links, and the layers' times where it has those of the model.
        global_batch: Samples of all ranks together; None takes that of `GlobalBatches`. Without it
            dense layers send their weight gradients.
        replan: Go back to plain allreduce where all that was tried is measured to be slower.
    """

    machine: Machine | str | None = None
    global_batch: int | None = None
    replan: bool = True

    may_shard_later = True
    watch = "tfscale.measure.auto:AutoWatch"

    def __post_init__(self) -> None:
        """Check the options."""
        fits = self.global_batch is None or self.global_batch > 0
        require(fits, "global_batch", "1 or more, or None", self.global_batch)
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

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the plan of `Allreduce`, until something is measured."""
        return Allreduce().plan(table, group)

    def explain(self) -> str:
        """Return what is known so far; the strategies that follow have a table."""
        return "Nothing is planned yet: `fit` measures its first steps, then chooses.\n"


@dataclass(frozen=True)
class Outcome:
    """What became of a plan, equal on all ranks.

    Attributes:
        plan: The plan in a few words.
        predicted_s: Predicted time of one of its steps.
        measured_s: Measured time.
        plain_predicted_s: Predicted time of a step of plain allreduce.
        plain_measured_s: Measured time of it.
        explanation: The table of parameters, and what was decided.
    """

    plan: str
    predicted_s: float
    measured_s: float
    plain_predicted_s: float
    plain_measured_s: float
    explanation: str


@dataclass(frozen=True)
class Mixed(Exchange):
    """The planner's choice: each parameter is exchanged as a plan names it.

    Attributes:
        name: The plan in a few words.
        parts: Kind and paths of the variables of each part, in the order in which gradients exist.
            Variables in none are summed alone.
        layers: Kind by path, of dense layers that exchange activations and errors.
        overlap: False sends nothing before all gradients exist.
        outcome: How the plan did; None while that is not known.
    """

    name: str = ""
    parts: tuple[tuple[Kind, tuple[str, ...]], ...] = ()
    layers: tuple[tuple[str, Kind], ...] = ()
    overlap: bool = True
    outcome: Outcome | None = field(default=None, compare=False, repr=False)

    waits_for_gathers = False

    @property
    def is_sharding(self) -> bool:  # type: ignore[override]
        """Whether some parameter is cut."""
        return any(kind in CUT for kind, _ in self.parts)

    @property
    def needs_prepared(self) -> str:  # type: ignore[override]
        """Layers must be given their calls before they exchange activations."""
        return f"plan {self.name!r}" if self.layers else ""

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the parts; see `Exchange.plan`."""
        kinds = {path: kind for kind, paths in self.parts for path in paths}
        cut = [i for i in table.shared if kinds.get(table.parameters[i].spec.name) in CUT]

        def lay_out(specs, whole, by_rows):  # type: ignore[no-untyped-def]
            groups = _places(specs, self._paths("sharded"))
            return build_segments(specs, group.size, 0, whole, by_rows, groups)

        segments = cut_parameters(table, cut, lay_out) if cut else ()
        return compile_plan(table, self._buckets, segments, self.overlap)

    def whole(self) -> Exchange:
        """Return the same parts, with a sum in place of what is cut."""
        parts = tuple(("allreduce" if k in CUT else k, paths) for k, paths in self.parts)
        layers = tuple(layer for layer in self.layers if layer[1] not in CUT)
        return Mixed(self.name, parts, layers, self.overlap)  # type: ignore[arg-type]

    def dense_kinds(
        self, layers: Sequence[DenseLayer], size: int, global_batch: int | None
    ) -> list[tuple[DenseKind, str]]:
        """Return the plan's kinds; see `Exchange.dense_kinds`."""
        del global_batch
        asked = dict(self.layers)
        return [dense_kind(asked.get(x.path, "weights"), x, size, None) for x in layers]

    def explain(self) -> str:
        """Return a table of parameters with what each alternative would cost, in Markdown."""
        undecided = "Nothing is decided yet: exchanges are measured.\n"
        return self.outcome.explanation if self.outcome else undecided

    def _buckets(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        return group_buckets(specs, _places(specs, self._paths("allreduce")))

    def _paths(self, wanted: Kind) -> list[tuple[str, ...]]:
        return [paths for kind, paths in self.parts if kind == wanted]


def _places(specs: Sequence[GradientSpec], groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return positions for paths; those of no spec are left out."""
    places: dict[str, int] = {}
    for place, spec in enumerate(specs):
        places.setdefault(spec.name, place)  # a second variable of one name is sent alone
    found = [[places[name] for name in group if name in places] for group in groups]
    return [group for group in found if group]


def strategy_of(table: LayerTable, plan: simulated.ExchangePlan, name: str) -> Mixed:
    """Return the strategy that carries out a simulated plan of a model's parameters."""
    parts = [
        (part.kind, tuple(table.parameters[p].name for p in part.parameters)) for part in plan.parts
    ]
    layers = [
        (table.layers[table.parameters[part.parameters[0]].layer].name, part.kind)
        for part in plan.parts
        if part.kind in ("partial", "replicated")
    ]
    return Mixed(name, tuple(parts), tuple(layers))


def per_layer(table: LayerTable, overlap: bool) -> Mixed:
    """Return an allreduce of each layer of a model alone."""
    groups = [tuple(name for name, _ in layer.weights) for layer in table.layers]
    parts = tuple(("allreduce", group) for group in groups if group)
    return Mixed("one allreduce per layer", parts, overlap=overlap)  # type: ignore[arg-type]
