"""`exchange="auto"`: measurement, planning, and the strategy that executes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.base import DenseLayer, Exchange
from tfscale.exchange.plan import ExchangePlan, Table, compile_plan, cut_parameters, places_of
from tfscale.exchange.sharded import dense_kind
from tfscale.plan import parts as simulated
from tfscale.plan.buckets import Bucket, GradientSpec, Kind, group_buckets
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine, find_machine

CUT: tuple[Kind, ...] = ("sharded", "partial")  # kinds with which each rank updates a part


@dataclass(frozen=True)
class Auto(Exchange):
    """Plans the exchange from the times of the first steps of a `fit`.

    For twenty steps each layer is exchanged alone, to measure when its gradients are ready, how
    long its exchange takes, and how much computation and messages slow each other down. The planner
    then chooses for each parameter: allreduced buckets, sharded buckets or, for dense layers,
    gathered activations and output gradients. Plain allreduce and the best plans are timed for some
    steps each, and the fastest is kept. All ranks make the same decisions, and every step is
    synchronous SGD, also during the measurements.

    Otherwise, until the decision, gradients are exchanged as by `Allreduce()`. The
    decision needs calls of `tfscale.after_step`; `fit` makes them if it is given a tfscale
    callback. Dense layers exchange activations only if the batch size is known: that of the
    `GlobalBatches` given to `fit`, or of `tfscale.prepare(model, batch_size=...)`.

    Attributes:
        machine: None measures the job. A `Machine`, the name of a preset or a file of `tfscale tune
            links` gives the links, and the times of the layers if it has those of the model.
        replan: Decide again after the measurements: return to plain allreduce if every plan that
            was tried is slower.

    Examples:
        >>> tfscale.init()
        >>> exchange = tfscale.Auto(replan=False)
        >>> optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.5), exchange=exchange)
        >>> weight = keras.Variable([1.0, 2.0])
        >>> optimizer.apply([tf.constant([1.0, 1.0])], [weight])
        >>> weight.numpy().tolist()
        [0.5, 1.5]
    """

    machine: Machine | str | None = None
    replan: bool = True

    may_shard_later = True
    is_measured = True

    def __post_init__(self) -> None:
        self.read_machine()

    def read_machine(self) -> Machine | None:
        """Return the machine that was named, if any.

        Raises:
            ConfigError: There is no machine of that name.
        """
        if self.machine is None or isinstance(self.machine, Machine):
            return self.machine
        try:
            return find_machine(self.machine)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Return the plan of `Allreduce`, used until the measurements end."""
        return Allreduce().plan(table, group)

    def explain(self) -> str:
        """Return a note that nothing is planned yet; the chosen strategy returns a table."""
        return "Nothing is planned yet: `fit` measures its first steps, then chooses.\n"


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured times of a plan's steps; equal on all ranks."""

    plan: str  # in a few words
    predicted_s: float
    measured_s: float
    plain_predicted_s: float  # of plain allreduce
    plain_measured_s: float
    explanation: str  # table of parameters, and the decision


@dataclass(frozen=True)
class Mixed(Exchange):
    """The planner's choice: an exchange for each parameter."""

    name: str = ""  # the plan in a few words
    # Kind and variables' paths of each part, in the order in which gradients are ready. A variable
    # in no part is summed alone.
    parts: tuple[tuple[Kind, tuple[str, ...]], ...] = ()
    # Path and kind of each dense layer that exchanges activations and output gradients.
    layers: tuple[tuple[str, Kind], ...] = ()
    overlap: bool = True  # False sends nothing before all gradients are ready
    # None until the plan is measured.
    outcome: Outcome | None = field(default=None, compare=False, repr=False)

    waits_for_gathers = False

    @property
    def is_sharding(self) -> bool:  # type: ignore[override]
        """Whether some parameter is sharded: divided among ranks."""
        return any(kind in CUT for kind, _ in self.parts)

    @property
    def needs_prepared(self) -> str:  # type: ignore[override]
        """The plan, if its dense layers exchange activations: these need a prepared model."""
        return f"plan {self.name!r}" if self.layers else ""

    def plan(self, table: Table, group: Group) -> ExchangePlan:
        """Compile the parts; see `Exchange.plan`."""
        kinds = {path: kind for kind, paths in self.parts for path in paths}
        cut = [i for i in table.shared if kinds.get(table.parameters[i].spec.name) in CUT]
        paths = self._paths("sharded")
        segments = cut_parameters(table, cut, group.size, paths=paths) if cut else ()
        return compile_plan(table, self._buckets, segments, self.overlap)

    def whole(self) -> Exchange:
        """Return the same parts, with sums in place of shards."""
        parts = tuple(("allreduce" if k in CUT else k, paths) for k, paths in self.parts)
        layers = tuple(layer for layer in self.layers if layer[1] not in CUT)
        return Mixed(self.name, parts, layers, self.overlap)  # type: ignore[arg-type]

    def dense_kinds(
        self, layers: Sequence[DenseLayer], size: int, global_batch: int | None
    ) -> list[tuple[Kind, str]]:
        """Return the plan's kinds; see `Exchange.dense_kinds`."""
        asked = dict(self.layers)
        return [dense_kind(asked.get(x.path, "weights"), x, size, None) for x in layers]

    def explain(self) -> str:
        """Return a Markdown table of parameters with the cost of each alternative."""
        undecided = "Nothing is decided yet: exchanges are measured.\n"
        return self.outcome.explanation if self.outcome else undecided

    def _buckets(self, specs: list[GradientSpec]) -> tuple[Bucket, ...]:
        return group_buckets(specs, places_of(specs, self._paths("allreduce")))

    def _paths(self, wanted: Kind) -> list[tuple[str, ...]]:
        return [paths for kind, paths in self.parts if kind == wanted]


def strategy_of(table: LayerTable, plan: simulated.LayerPlan, name: str) -> Mixed:
    """Return the strategy that executes a simulated plan for a model's parameters."""
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
    """Return the strategy that allreduces each layer of a model alone."""
    groups = [tuple(name for name, _ in layer.weights) for layer in table.layers]
    parts = tuple(("allreduce", group) for group in groups if group)
    return Mixed("one allreduce per layer", parts, overlap=overlap)  # type: ignore[arg-type]
