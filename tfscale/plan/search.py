"""Simulating many plans: ways to cut a model, and which of them is fastest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tfscale.plan.parts import ExchangePlan, Kind, bucketed, chunked, dense_layers
from tfscale.plan.simulate import Prediction, simulate
from tfscale.plan.specs import BYTES_PER_VALUE
from tfscale.plan.times import Scenario

CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # into how many buckets a model is cut
FEW_CUTS = (1, 3, 8)  # while dense layers are chosen
_TRIED_CHUNKS = 10


class Search:
    """Simulates plans, each once, and remembers the fastest."""

    def __init__(self, scenario: Scenario) -> None:
        """Begin with none."""
        self.scenario = scenario
        self.known: dict[ExchangePlan, Prediction] = {}

    def step_s(self, plan: ExchangePlan) -> float:
        """Return the step time of a plan."""
        if plan not in self.known:
            self.known[plan] = simulate(self.scenario, plan)
        return self.known[plan].step_s

    def best(self, plans: Iterable[ExchangePlan]) -> ExchangePlan:
        """Return the fastest; of equal ones the first."""
        return min(plans, key=self.step_s)

    def better(self, plan: ExchangePlan, other: ExchangePlan) -> ExchangePlan:
        """Return the other plan if it is faster by more than rounding."""
        return other if self.step_s(other) < self.step_s(plan) * (1 - 1e-6) else plan


def cut_in_ways(
    scenario: Scenario, kind: Kind, special: dict[int, Kind], cuts: Sequence[int]
) -> Iterator[ExchangePlan]:
    """Yield plans that cut a model into few or many buckets, evenly or with a first chunk.

    Args:
        scenario: Model, machine, ranks, batch.
        kind: Of the buckets.
        special: Kinds of dense layers that are in none, by position.
        cuts: Numbers of buckets; chunks are tried with `CUTS` only.
    """
    table = scenario.table
    places = [i for i, layer in enumerate(table.layers) if layer.weights and i not in special]
    total = sum(table.layers[i].n_values * BYTES_PER_VALUE for i in places)
    for n_buckets in cuts:
        yield bucketed(table, max(1, -(-total // n_buckets)), kind, special)
    yield bucketed(table, None, kind, special)
    is_first = sorted(special) == dense_layers(table)[: len(special)]
    if kind == "allreduce" and is_first and set(special.values()) <= {"replicated"}:
        for chunks in (2, 3) if cuts is CUTS else ():
            for first in _boundaries(len(places), _TRIED_CHUNKS):
                yield chunked(table, first, chunks, len(special))


def _boundaries(n_layers: int, n_tried: int) -> range:
    return range(1, max(2, n_layers), max(1, n_layers // n_tried))


def best_first_chunk(
    scenario: Scenario, chunks: int = 2, replicated: int = 0, n_tried: int = 1000
) -> int:
    """Return how many of the last layers shall form the first chunk.

    Args:
        scenario: Model, machine, ranks, batch.
        chunks: Number of chunks.
        replicated: How many of the first dense layers are in no chunk.
        n_tried: At most about so many numbers are tried.

    Returns:
        The number with the shortest simulated step; the smallest such one.
    """
    table = scenario.table
    n_layers = sum(1 for layer in table.layers if layer.weights) - replicated
    search = Search(scenario)
    numbers = [*_boundaries(n_layers + 1, n_tried)]
    return min(numbers, key=lambda n: search.step_s(chunked(table, n, chunks, replicated)))
