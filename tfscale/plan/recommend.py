"""What to write as `exchange=`: the best of the plans that the strategies' options can express."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tfscale.plan.choose import LEAST_GAIN, plain_plan
from tfscale.plan.parts import ExchangePlan, Kind, bucketed, chunked, dense_layers
from tfscale.plan.search import best_first_chunk
from tfscale.plan.simulate import Prediction, simulate
from tfscale.plan.times import Scenario

_MEBIBYTES = (1, 4, 16, 64)
_MOST_REPLICATED = 3


@dataclass(frozen=True)
class Recommendation:
    """A strategy with its options.

    Attributes:
        words: Python that makes it, such as "tfscale.Sharded(bucket_mb=4)".
        plan: What it does.
        predicted: Its step.
    """

    words: str
    plan: ExchangePlan
    predicted: Prediction


def recommend(scenario: Scenario) -> Recommendation:
    """Return the fastest strategy that can be asked for by its options.

    Args:
        scenario: Model, machine, ranks, batch.

    Returns:
        `Allreduce()` where nothing else is predicted 3 % faster.
    """
    plain = plain_plan(scenario)
    usual = Recommendation("tfscale.Allreduce()", plain, simulate(scenario, plain))
    if scenario.n_ranks == 1:
        return usual
    tried = [
        Recommendation(words, plan, simulate(scenario, plan)) for words, plan in _options(scenario)
    ]
    best = min(tried, key=lambda one: one.predicted.step_s)
    is_better = best.predicted.step_s <= (1 - LEAST_GAIN) * usual.predicted.step_s
    return best if is_better else usual


def _options(scenario: Scenario) -> Iterator[tuple[str, ExchangePlan]]:
    table, dense = scenario.table, dense_layers(scenario.table)
    for size in _MEBIBYTES:
        yield f"tfscale.Allreduce(bucket_mb={size})", bucketed(table, size * 2**20)
    n_layers = sum(1 for layer in table.layers if layer.weights)
    for n_replicated in range(min(len(dense), _MOST_REPLICATED, n_layers - 1) + 1):
        first = best_first_chunk(scenario, 2, n_replicated, n_tried=12)
        more = f", replicated_dense={n_replicated}" if n_replicated else ""
        words = f"tfscale.Chunked(first_chunk_layers={first}{more})"
        yield words, chunked(table, first, 2, n_replicated)
    for mode in ("weights", "partial") if dense else ("weights",):
        special: dict[int, Kind] = dict.fromkeys(dense, "partial") if mode == "partial" else {}
        for size in _MEBIBYTES:
            words = f'tfscale.Sharded(bucket_mb={size}, dense="{mode}")'
            yield words, bucketed(table, size * 2**20, "sharded", special)
