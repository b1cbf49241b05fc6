"""Predictions over numbers of ranks: every exchange, and which one wins where. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tfscale.config import ConfigError
from tfscale.plan.buckets import auto_bucket_bytes
from tfscale.plan.choose import best_first_chunk, choose, plain_plan, recommend
from tfscale.plan.costs import Scenario
from tfscale.plan.parts import (
    ExchangePlan,
    bucketed,
    cheap_partial_layers,
    chunked,
    dense_layers,
    lower_bound_s,
    memory_bytes,
    specs_of,
)
from tfscale.plan.simulate import Prediction, simulate, simulate_local_sgd
from tfscale.plan.tables import grid

AUTO, LOCAL_SGD = "auto", "local SGD"


@dataclass(frozen=True)
class Point:
    """One exchange on one number of ranks.

    Attributes:
        exchange: Its name.
        n_ranks: Number of ranks.
        predicted: The step.
        speedup: Over one rank with the same samples per step.
        memory: Bytes a rank holds besides activations.
        made_of: The planner's choice in words; empty for fixed exchanges.
    """

    exchange: str
    n_ranks: int
    predicted: Prediction
    speedup: float
    memory: float
    made_of: str = ""


def _chunks(scenario: Scenario, n_replicated: int = 0) -> ExchangePlan:
    """Return two chunks with the best boundary."""
    first = best_first_chunk(scenario, 2, n_replicated, n_tried=16)
    return chunked(scenario.table, first, 2, n_replicated)


def _chunks_with_dense(scenario: Scenario) -> ExchangePlan:
    n_dense = len(dense_layers(scenario.table))
    plans = [_chunks(scenario, n) for n in range(min(n_dense, 3) + 1)]
    return min(plans, key=lambda plan: simulate(scenario, plan).step_s)


def _sharded(scenario: Scenario) -> ExchangePlan:
    return bucketed(scenario.table, auto_bucket_bytes(specs_of(scenario.table)), "sharded")


def _sharded_with_dense(scenario: Scenario) -> ExchangePlan:
    """Return buckets of shards, and eq. 4.8's choice for dense layers."""
    n_bytes = auto_bucket_bytes(specs_of(scenario.table))
    return bucketed(scenario.table, n_bytes, "sharded", cheap_partial_layers(scenario))


# The exchanges that a user can ask for by name, with their own parameters at their best.
FIXED: dict[str, Callable[[Scenario], ExchangePlan]] = {
    "allreduce": plain_plan,
    "one allreduce per layer": lambda scenario: bucketed(scenario.table, None),
    "chunked": _chunks,
    "chunked, replicated dense": _chunks_with_dense,
    "sharded": _sharded,
    "sharded, partial dense": _sharded_with_dense,
}


def forecast(
    scenario: Scenario, ranks: Sequence[int], n_groups: int = 0, interval: int = 8
) -> list[Point]:
    """Predict a model's steps.

    Args:
        scenario: Model, machine, and batch; its number of ranks is not used.
        ranks: Numbers of ranks.
        n_groups: Groups of local SGD, 2 or more; 0 leaves it out, as do numbers of ranks that they
            do not divide.
        interval: Steps between its averagings, 1 or more.

    Returns:
        One point per number of ranks and exchange. Dense layers matter for those exchanges only
        that are named after them; models without any have no such points.

    Raises:
        ConfigError: There are no such groups, or averagings.
    """
    check_groups(n_groups, interval)
    alone = replace(scenario, n_ranks=1)
    base_s = simulate(alone, plain_plan(alone)).step_s
    points = []
    for n_ranks in ranks:
        at = replace(scenario, n_ranks=n_ranks)
        for name, build in FIXED.items():
            if "dense" in name and not dense_layers(scenario.table):
                continue
            plan = build(at)
            points.append(_point(name, at, plan, simulate(at, plan), base_s))
        choice = choose(at)
        point = _point(AUTO, at, choice.plan, choice.predicted, base_s)
        points.append(replace(point, made_of=choice.name))
        is_divided = n_groups > 0 and n_ranks % n_groups == 0
        if is_divided and scenario.global_batch % n_groups == 0:
            points.append(_local_sgd(at, n_groups, interval, base_s))
    return points


def check_groups(n_groups: int, interval: int) -> None:
    """Check what local SGD is asked for.

    Args:
        n_groups: 0 for none.
        interval: Steps between averagings.

    Raises:
        ConfigError: It is nothing to predict.
    """
    if n_groups < 0 or n_groups == 1 or interval < 1:
        raise ConfigError(
            "Local SGD has 2 groups or more and an interval of 1 or more. Received: "
            f"groups={n_groups}, interval={interval}. 0 groups leave it out."
        )


def _point(
    name: str, scenario: Scenario, plan: ExchangePlan, predicted: Prediction, base_s: float
) -> Point:
    speedup = base_s / predicted.step_s
    return Point(name, scenario.n_ranks, predicted, speedup, memory_bytes(scenario, plan))


def _local_sgd(scenario: Scenario, n_groups: int, interval: int, base_s: float) -> Point:
    """Predict a step of all groups: as many samples as a synchronous one."""
    group = replace(
        scenario,
        n_ranks=scenario.n_ranks // n_groups,
        global_batch=scenario.global_batch // n_groups,
    )
    plan = _sharded(group)
    predicted = simulate_local_sgd(group, plan, n_groups, interval)
    point = _point(LOCAL_SGD, group, plan, predicted, base_s)
    return replace(point, n_ranks=scenario.n_ranks)


def winners(points: Sequence[Point]) -> dict[int, Point]:
    """Return the fastest fixed exchange per number of ranks; local SGD is another algorithm."""
    best: dict[int, Point] = {}
    for point in points:
        if point.exchange in (AUTO, LOCAL_SGD):
            continue
        known = best.get(point.n_ranks)
        if known is None or point.predicted.step_s < known.predicted.step_s:
            best[point.n_ranks] = point
    return best


def report(scenario: Scenario, points: Sequence[Point]) -> str:
    """Return a page of Markdown."""
    machine = scenario.machine
    lines = [
        f"# {scenario.table.name} on {machine.name}, {scenario.global_batch} samples per step",
        "",
        f"{scenario.table.n_values / 1e6:.2f} million parameters. {machine.note}",
        "",
        "## Which exchange wins",
        "",
        *_winners_grid(scenario, points),
        "",
        "## All predictions",
        "",
        "Memory is that of parameters, gradients, optimizer state and what is exchanged.",
        "",
    ]
    head = ["ranks", "exchange", "step ms", "speedup", "exposed ms", "hidden %", "memory MB"]
    body = []
    for point in points:
        hidden = point.predicted.overlap_percent
        body.append(
            [
                point.n_ranks,
                point.exchange,
                f"{1e3 * point.predicted.step_s:.2f}",
                f"{point.speedup:.2f}",
                f"{1e3 * point.predicted.exposed_s:.2f}",
                "-" if hidden is None else f"{hidden:.0f}",
                f"{point.memory / 1e6:.0f}",
            ]
        )
    lines += grid(head, body, ("exchange",))
    if any(point.n_ranks > scenario.global_batch for point in points):
        lines += ["", "With more ranks than samples per step, some repeat the work of others."]
    return "\n".join([*lines, ""])


def _winners_grid(scenario: Scenario, points: Sequence[Point]) -> list[str]:
    head = ["ranks", "best of the table", "ms", "exchange=", "ms", "planner ms", "bound ms", "plan"]
    autos = {point.n_ranks: point for point in points if point.exchange == AUTO}
    body = []
    for n_ranks, best in winners(points).items():
        auto, at = autos[n_ranks], replace(scenario, n_ranks=n_ranks)
        said = recommend(at)
        times = (best.predicted, said.predicted, auto.predicted)
        best_ms, said_ms, auto_ms = (f"{1e3 * one.step_s:.2f}" for one in times)
        bound_ms = f"{1e3 * lower_bound_s(at):.2f}"
        row = [n_ranks, best.exchange, best_ms, said.words, said_ms, auto_ms, bound_ms]
        body.append([*row, auto.made_of])
    return grid(head, body, ("best of the table", "exchange=", "plan"))
