"""Simulate the gain of delaying updates of replicated dense layers to the next forward pass.

    python -m tools.simulate_delayed_update

Simulates VGG networks with `Chunked(first_chunk_layers=k, replicated_dense=f)` on the machines of
the planner, as it is and with the delayed update of [T] algorithm 2, and compares step times.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

from benchmarks.thesis_strategies import MACHINES
from tfscale.plan.costs import Scenario
from tfscale.plan.machines import PRESETS
from tfscale.plan.parts import chunked
from tfscale.plan.published import published
from tfscale.plan.simulate import simulate

MODELS = ("vgg-a", "vgg16", "vgg-128")
RANKS, BATCHES = (4, 16, 64, 128), (64, 256, 512)
FIRST, REPLICATED = (1, 3, 5, 9), (1, 2, 3)


def step_times(scenario: Scenario, first: int, replicated: int) -> tuple[float, float]:
    """Return seconds per step, updated at once and delayed."""
    plan = chunked(scenario.table, first, 2, replicated)
    delayed = replace(plan, lazy=(*plan.lazy, "replicated"))
    return simulate(scenario, plan).step_s, simulate(scenario, delayed).step_s


def describe(pairs: list[tuple[float, float]]) -> str:
    """Return how much faster steps with the delayed update are."""
    gains = [100 * (now / delayed - 1) for now, delayed in pairs]
    n_faster = sum(gain > 0.1 for gain in gains)
    return (
        f"delayed is faster in {n_faster} of {len(gains)} cases; gain {min(gains):.1f} % to "
        f"{max(gains):.1f} %, median {statistics.median(gains):.1f} %"
    )


def main() -> None:
    """Print the comparison over all cases, and over the best k and f of each."""
    every, best = [], []
    for model, machine in itertools.product(MODELS, {**PRESETS, **MACHINES}.values()):
        for n_ranks, batch in itertools.product(RANKS, BATCHES):
            if batch < n_ranks:
                continue
            scenario = Scenario(published(model), machine, n_ranks, batch)
            times = [step_times(scenario, k, f) for k in FIRST for f in REPLICATED]
            every += times
            best.append((min(now for now, _ in times), min(delayed for _, delayed in times)))
    print(f"every k and f: {describe(every)}")
    print(f"best k and f:  {describe(best)}")


if __name__ == "__main__":
    main()
