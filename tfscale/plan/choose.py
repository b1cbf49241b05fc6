"""Search for the exchange plan with the shortest predicted step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tfscale.files import sha256
from tfscale.plan import parts
from tfscale.plan.buckets import BYTES_PER_VALUE, Kind, auto_bucket_bytes
from tfscale.plan.costs import Scenario
from tfscale.plan.parts import LayerPart, LayerPlan
from tfscale.plan.simulate import Prediction, simulate

_CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # numbers of buckets that are tried
_FEW_CUTS = (1, 3, 8)  # tried while the exchange of dense layers is chosen
_TRIED_CHUNKS = 10
PLAIN = "tfscale.Allreduce()"
_MEBIBYTES = (1, 4, 16, 64)  # bucket sizes of `written_exchanges`
_MOST_REPLICATED = 3


@dataclass
class _Search:
    """Cache of simulated plans."""

    scenario: Scenario
    predictions: dict[LayerPlan, Prediction] = field(default_factory=dict)

    def step_s(self, plan: LayerPlan) -> float:
        if plan not in self.predictions:
            self.predictions[plan] = simulate(self.scenario, plan)
        return self.predictions[plan].step_s

    def best(self, plans: Iterable[LayerPlan]) -> LayerPlan:
        """Return the fastest plan, the first of equally fast ones."""
        return min(plans, key=self.step_s)

    def better(self, plan: LayerPlan, other: LayerPlan) -> LayerPlan:
        """Return `other` if it is faster than `plan` by more than rounding errors, else `plan`."""
        return other if self.step_s(other) < self.step_s(plan) * (1 - 1e-6) else plan


def _cut_in_ways(
    scenario: Scenario, kind: Kind, special: dict[int, Kind], cuts: Sequence[int]
) -> Iterator[LayerPlan]:
    """Yield plans with different buckets, and for `_CUTS` plans with chunks.

    Dense layers in `special` are in no bucket.
    """
    table = scenario.table
    places = [i for i, layer in enumerate(table.layers) if layer.weights and i not in special]
    total = sum(table.layers[i].n_values * BYTES_PER_VALUE for i in places)
    for n_buckets in cuts:
        yield parts.bucketed(table, max(1, -(-total // n_buckets)), kind, special)
    yield parts.bucketed(table, None, kind, special)
    is_first = sorted(special) == parts.dense_layers(table)[: len(special)]
    if kind == "allreduce" and is_first and set(special.values()) <= {"replicated"}:
        for chunks in (2, 3) if cuts is _CUTS else ():
            for first in _boundaries(len(places), _TRIED_CHUNKS):
                yield parts.chunked(table, first, chunks, len(special))


def _boundaries(n_layers: int, n_tried: int) -> range:
    return range(1, max(2, n_layers), max(1, n_layers // n_tried))


def best_first_chunk(
    scenario: Scenario, chunks: int = 2, replicated: int = 0, n_tried: int = 1000
) -> int:
    """Return the number of last layers in the first chunk for which the step is shortest.

    It leaves a layer for the other chunks. The first `replicated` dense layers are in no chunk.
    About `n_tried` numbers are tried.
    """
    table = scenario.table
    n_layers = sum(1 for layer in table.layers if layer.weights) - replicated

    def step_s(first: int) -> float:
        return simulate(scenario, parts.chunked(table, first, chunks, replicated)).step_s

    return min(_boundaries(n_layers, n_tried), key=step_s)


# A plan must be predicted to be this much faster than plain allreduce: a smaller gain is within the
# error of the prediction, and plain allreduce has the fewest surprises.
LEAST_GAIN = 0.03
_TRIED_DENSE = 8  # largest dense layers whose exchange is chosen one by one
_TRIED_PARTS = 24  # parts that are switched one by one


@dataclass(frozen=True)
class Choice:
    """The planner's decision."""

    plan: LayerPlan
    predicted: Prediction
    plain: LayerPlan  # the plan of `tfscale.Allreduce()`
    plain_predicted: Prediction
    name: str  # kinds and numbers of the plan's parts, in words
    reason: str
    n_tried: int  # plans that were simulated

    @property
    def is_plain(self) -> bool:
        """Whether plain allreduce was chosen."""
        return self.plan == self.plain

    def fingerprint(self) -> str:
        """Return a digest that is equal for equal choices."""
        return sha256(repr((self.plan, self.name, self.reason)).encode())[:16]


def plain_plan(scenario: Scenario) -> LayerPlan:
    """Return the plan of `PLAIN`."""
    table = scenario.table
    return parts.bucketed(table, auto_bucket_bytes(parts.specs_of(table)))


def choose(scenario: Scenario, allowed: Sequence[Kind] = parts.KINDS) -> Choice:
    """Choose each parameter's exchange; plain allreduce unless a plan is 3 % faster.

    The search starts with the exchange of dense layers that sends the fewest bytes. It then varies
    the number of buckets, the boundary of the first chunk, the exchange of each large dense layer
    and that of each bucket, one after another, and keeps the changes that shorten the simulated
    step. Equal arguments give equal plans on all ranks. `allowed` contains "allreduce", "sharded"
    or both.
    """
    whole: list[Kind] = [kind for kind in allowed if kind in ("allreduce", "sharded")]
    search = _Search(scenario)
    plain = plain_plan(scenario)
    best = search.better(plain, _search_dense(search, whole, allowed))
    if len(whole) == 2:
        best = _switch_parts(search, best)
    plain_s, best_s = search.step_s(plain), search.step_s(best)
    gain = 1 - best_s / plain_s
    reason = f"{plain_s / best_s:.2f} times faster than plain allreduce"
    if gain < LEAST_GAIN:
        best = plain
        reason = f"the best other plan would be {100 * gain:.1f} % faster: less than it must be"
    predictions, description = search.predictions, _describe(best, is_plain=best == plain)
    return Choice(
        best,
        predictions[best],
        plain,
        predictions[plain],
        description,
        reason,
        len(predictions),
    )


def _describe(plan: LayerPlan, is_plain: bool) -> str:
    counts = {kind: sum(part.kind == kind for part in plan.parts) for kind in parts.KINDS}
    clauses = [
        f"{n} {kind}{' buckets' if kind in ('allreduce', 'sharded') else ' dense'}"
        for kind, n in counts.items()
        if n
    ]
    return ("plain: " if is_plain else "") + ", ".join(clauses)


def _starts(scenario: Scenario, allowed: Sequence[Kind]) -> list[dict[int, Kind]]:
    """Return initial exchanges of the dense layers: none special, and that of fewest bytes."""
    cheapest: dict[int, Kind] = {}
    for layer_index in parts.dense_layers(scenario.table):
        kinds = [k for k in parts.kinds_for(scenario.table.layers[layer_index]) if k in allowed]
        kind = min(kinds, key=lambda k: parts.sent_bytes(scenario, layer_index, k))
        if kind in ("partial", "replicated"):
            cheapest[layer_index] = kind
    return [{}, cheapest] if cheapest and scenario.n_ranks > 1 else [{}]


def _search_dense(search: _Search, whole: Sequence[Kind], allowed: Sequence[Kind]) -> LayerPlan:
    """Vary the exchange of large dense layers one by one; cut the other layers again each time."""
    table = search.scenario.table

    def best_cut(special: dict[int, Kind], cuts: Sequence[int]) -> LayerPlan:
        return search.best(
            plan for kind in whole for plan in _cut_in_ways(search.scenario, kind, special, cuts)
        )

    special = min(
        _starts(search.scenario, allowed), key=lambda s: search.step_s(best_cut(s, _FEW_CUTS))
    )
    best = best_cut(special, _FEW_CUTS)
    size = {
        layer_index: table.layers[layer_index].n_values for layer_index in parts.dense_layers(table)
    }
    for layer_index in sorted(size, key=lambda p: (-size[p], p))[:_TRIED_DENSE]:
        rest = {other: kind for other, kind in special.items() if other != layer_index}
        options = [
            rest,
            *({**rest, layer_index: k} for k in ("partial", "replicated") if k in allowed),
        ]
        for option in options if search.scenario.n_ranks > 1 else ():
            plan = best_cut(option, _FEW_CUTS)
            if search.better(best, plan) is not best:
                special, best = option, plan
    return search.better(best, best_cut(special, _CUTS))


def _switch_parts(search: _Search, plan: LayerPlan) -> LayerPlan:
    """Try each bucket both summed and sharded, the largest first."""
    other: dict[Kind, Kind] = {"allreduce": "sharded", "sharded": "allreduce"}
    parameters = search.scenario.table.parameters

    def n_values(part: LayerPart) -> int:
        return sum(parameters[p].n_values for p in part.parameters)

    tried = [part for part in sorted(plan.parts, key=n_values, reverse=True) if part.kind in other]
    for part in tried[:_TRIED_PARTS]:
        switched = LayerPart(other[part.kind], part.parameters)
        plan = search.better(plan, parts.with_part(plan, switched))
    return plan


def written_exchanges(scenario: Scenario) -> dict[str, dict[str, LayerPlan]]:
    """Return the exchanges that a user can choose: for each kind, plans by what to write in Python.

    Each kind has the options that are worth trying; the first one is `PLAIN`.
    """
    table = scenario.table
    dense = parts.dense_layers(table)

    def chunks(n_replicated: int) -> dict[str, LayerPlan]:
        first = best_first_chunk(scenario, 2, n_replicated, n_tried=12)
        places = (i for i, layer in enumerate(table.layers) if layer.weights)
        names = [table.layers[i].name for i in places if i not in dense[:n_replicated]]
        more = f", replicated_dense={n_replicated}" if n_replicated else ""
        plan = parts.chunked(table, first, 2, n_replicated)
        return {f'tfscale.Chunked(first_chunk_from="{names[-first]}"{more})': plan}

    def buckets(start: str, end: str, kind: Kind, special: dict[int, Kind]) -> dict[str, LayerPlan]:
        plans = {size: parts.bucketed(table, size * 2**20, kind, special) for size in _MEBIBYTES}
        return {f"tfscale.{start}(bucket_mb={size}{end}": plan for size, plan in plans.items()}

    per_layer = parts.bucketed(table, None)
    plans_by_exchange = {
        "allreduce": {PLAIN: plain_plan(scenario), **buckets("Allreduce", ")", "allreduce", {})},
        "one allreduce per layer": {'tfscale.Chunked(chunks="per_layer")': per_layer},
        "chunked": chunks(0),
        "chunked, replicated dense": {},
        "sharded": buckets("Sharded", ', dense="weights")', "sharded", {}),
    }
    n_layers = sum(1 for layer in table.layers if layer.weights)
    for n_replicated in range(1, min(len(dense), _MOST_REPLICATED, n_layers - 1) + 1):
        plans_by_exchange["chunked, replicated dense"] |= chunks(n_replicated)
    if dense:
        special = parts.cheap_partial_layers(scenario)
        plans_by_exchange["sharded, partial dense"] = buckets("Sharded", ")", "sharded", special)
    return {kind: plans for kind, plans in plans_by_exchange.items() if plans}
