"""Markdown reports: predictions for numbers of ranks, and the explanation of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfscale.config import ConfigError
from tfscale.plan import parts
from tfscale.plan.buckets import Kind, auto_bucket_bytes
from tfscale.plan.choose import LEAST_GAIN, PLAIN, Choice, choose, plain_plan, written_exchanges
from tfscale.plan.costs import Scenario, allreduce_s
from tfscale.plan.simulate import Prediction, simulate, simulate_local_sgd

AUTO, LOCAL_SGD = "auto", "local SGD"
_INT8_SHARE = (256 + 2) / (4 * 256)  # of the bytes of float32: blocks of 256 values and a scale
# Time of encoding and decoding, per byte of float32: docs/compression.md, half of what was measured
# of one idle core.
_CODES_S_PER_BYTE = 0.4e-9


def grid(
    head: Sequence[str], body: Sequence[Sequence[Any]], text: Sequence[str] = ("name",)
) -> list[str]:
    """Return the lines of a table; the columns named in `text` are aligned left."""
    cells = [list(head), *([str(cell).replace("|", "/") for cell in row] for row in body)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    is_text = [column in text for column in head]
    rule = [
        ":" + "-" * max(w - 1, 2) if t else "-" * max(w - 1, 2) + ":"
        for w, t in zip(widths, is_text, strict=True)
    ]
    lines = []
    for row in cells:
        aligned = zip(row, widths, is_text, strict=True)
        lines.append(" | ".join(c.ljust(w) if t else c.rjust(w) for c, w, t in aligned))
    return [f"| {line} |" for line in (lines[0], " | ".join(rule), *lines[1:])]


# Predictions for numbers of ranks


@dataclass(frozen=True)
class Point:
    """The prediction of one exchange for one number of ranks."""

    exchange: str
    n_ranks: int
    predicted: Prediction
    speedup: float  # relative to one rank with as many samples per step
    memory: float  # bytes that a rank holds besides activations
    code: str = ""  # what to write in Python; for "auto", the planner's choice


def forecast(
    scenario: Scenario, ranks: Sequence[int], n_groups: int = 0, interval: int = 8
) -> list[Point]:
    """Predict a model's step for each number of ranks and each exchange, with its best options.

    Exchanges of dense layers are left out for models without any; local SGD for 0 groups, and where
    groups do not divide the ranks or samples. 1 group, or an interval of 0, is a ConfigError.
    """
    check_groups(n_groups, interval)
    alone = replace(scenario, n_ranks=1)
    base_s = simulate(alone, plain_plan(alone)).step_s
    points = []
    for n_ranks in ranks:
        at = replace(scenario, n_ranks=n_ranks)
        best: list[tuple[str, Scenario, parts.LayerPlan, Prediction, str]] = []
        for name, plans in written_exchanges(at).items():
            tried = [
                (name, at, plan, simulate(at, plan), written) for written, plan in plans.items()
            ]
            best.append(min(tried, key=lambda one: one[3].step_s))
        choice = choose(at)
        best.append((AUTO, at, choice.plan, choice.predicted, choice.name))
        is_divided = n_groups > 0 and n_ranks % n_groups == 0
        if is_divided and scenario.global_batch % n_groups == 0:
            n_own, batch = n_ranks // n_groups, scenario.global_batch // n_groups
            group = replace(at, n_ranks=n_own, global_batch=batch)
            n_bytes = auto_bucket_bytes(parts.specs_of(scenario.table))
            plan = parts.bucketed(scenario.table, n_bytes, "sharded")
            predicted = simulate_local_sgd(group, plan, n_groups, interval)
            best.append((LOCAL_SGD, group, plan, predicted, ""))
        for name, of, plan, predicted, written in best:
            speedup, memory = base_s / predicted.step_s, parts.memory_bytes(of, plan)
            points.append(Point(name, n_ranks, predicted, speedup, memory, written))
    return points


def check_groups(n_groups: int, interval: int) -> None:
    """Raise a ConfigError unless there are 0, 2 or more groups, and 1 or more steps."""
    if n_groups < 0 or n_groups == 1 or interval < 1:
        raise ConfigError(
            f"groups must be 2 or more, and interval 1 or more. Received: groups={n_groups}, "
            f"interval={interval}. 0 groups leave it out."
        )


def winners(points: Sequence[Point]) -> dict[int, Point]:
    """Return the fastest fixed exchange per number of ranks, without local SGD."""
    points_by_ranks: dict[int, list[Point]] = {}
    for point in points:
        if point.exchange not in (AUTO, LOCAL_SGD):
            points_by_ranks.setdefault(point.n_ranks, []).append(point)
    return {
        n: min(candidates, key=lambda point: point.predicted.step_s)
        for n, candidates in points_by_ranks.items()
    }


def report(scenario: Scenario, points: Sequence[Point]) -> str:
    """Return the page of `tfscale plan`."""
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
        row = [point.n_ranks, point.exchange, f"{1e3 * point.predicted.step_s:.2f}"]
        row += [f"{point.speedup:.2f}", f"{1e3 * point.predicted.exposed_s:.2f}"]
        row += ["-" if hidden is None else f"{hidden:.0f}", f"{point.memory / 1e6:.0f}"]
        body.append(row)
    lines += grid(head, body, ("exchange",))
    if any(point.n_ranks > scenario.global_batch for point in points):
        lines += ["", "With more ranks than samples per step, some repeat the work of others."]
    return "\n".join([*lines, ""])


def _winners_grid(scenario: Scenario, points: Sequence[Point]) -> list[str]:
    head = ["ranks", "best of the table", "best ms", "exchange=", "its ms", "int8 ms", "planner ms"]
    head += ["bound ms", "plan"]
    autos = {point.n_ranks: point for point in points if point.exchange == AUTO}
    body = []
    for n_ranks, best in winners(points).items():
        auto, at = autos[n_ranks], replace(scenario, n_ranks=n_ranks)
        best_s, plain_s = best.predicted.step_s, simulate(at, plain_plan(at)).step_s
        is_better = best_s <= (1 - LEAST_GAIN) * plain_s
        advice, advice_s = (best.code, best_s) if is_better else (PLAIN, plain_s)
        times = (advice_s, int8_s(at), auto.predicted.step_s, parts.lower_bound_s(at))
        row = [n_ranks, best.exchange, f"{1e3 * best_s:.2f}", advice]
        body.append([*row, *(f"{1e3 * seconds:.2f}" for seconds in times), auto.code])
    return grid(head, body, ("best of the table", "exchange=", "plan"))


def int8_s(scenario: Scenario, plan: parts.LayerPlan | None = None) -> float:
    """Return the seconds of a step with `Compression.int8`, by a plan or by plain allreduce.

    Changes of sharded parameters are sent as int8, too. Rounding changes the result of training, so
    the planner never chooses int8 by itself.
    """
    return few_bits_s(scenario, _INT8_SHARE, plan or plain_plan(scenario))


def few_bits_s(scenario: Scenario, share: float, plan: parts.LayerPlan) -> float:
    """Return the seconds of a step that sends a share of the bytes of float32."""
    machine = scenario.machine
    sums_s = 1 / machine.reduce_bytes_per_s + _CODES_S_PER_BYTE
    few = replace(
        machine,
        bytes_per_s=machine.bytes_per_s / share,
        host_bytes_per_s=machine.host_bytes_per_s or machine.bytes_per_s,
        reduce_bytes_per_s=1 / sums_s,
    )
    # Codes are not cut.
    return simulate(replace(scenario, machine=few), replace(plan, gather_bytes=0)).step_s


# One plan


def explain(scenario: Scenario, choice: Choice) -> str:
    """Return a page that explains a choice; docs/planner.md describes it."""
    table = scenario.table
    sharded = parts.bucketed(table, auto_bucket_bytes(parts.specs_of(table)), "sharded")
    lines = [
        f"# {table.name}: {scenario.n_ranks} ranks of {scenario.machine.name}, "
        f"{scenario.global_batch} samples per step",
        "",
        f"Chosen: {choice.name} ({choice.reason}; {choice.n_tried} plans simulated).",
        "",
        _line("chosen plan", scenario, choice.plan, choice.predicted),
        _line("plain allreduce", scenario, choice.plain, choice.plain_predicted),
        f"- plain allreduce with Compression.int8, which rounds gradients: "
        f"{1e3 * int8_s(scenario):.2f} ms per step; sharded: "
        f"{1e3 * int8_s(scenario, sharded):.2f} ms",
        f"- no plan is faster than {1e3 * parts.lower_bound_s(scenario):.2f} ms",
        "",
    ]
    costs = [f"{kind} MB / ms" for kind in parts.KINDS]
    head = ["parameter", "KB", "exchange", "part", *costs, "why"]
    part_of = {p: n for n, part in enumerate(choice.plan.parts) for p in part.parameters}
    reasons = [_why(scenario, choice, part) for part in choice.plan.parts]
    body = []
    for number, parameter in enumerate(table.parameters):
        n = part_of[number]
        cells: list[str] = [parameter.name, f"{parameter.n_bytes / 1e3:.1f}"]
        cells += [choice.plan.parts[n].kind, str(n + 1)]
        fraction = parameter.n_values / max(1, table.layers[parameter.layer].n_values)
        for kind in parts.KINDS:
            if kind not in parts.kinds_for(table.layers[parameter.layer]):
                cells.append("-")
                continue
            sent = fraction * parts.sent_bytes(scenario, parameter.layer, kind) / 1e6
            cells.append(f"{sent:.2f} / {1e3 * _wire_s(scenario, parameter.layer, kind):.2f}")
        body.append([*cells, reasons[n]])
    return "\n".join([*lines, *grid(head, body, ("parameter", "exchange", "why")), ""])


def _wire_s(scenario: Scenario, layer_index: int, kind: Kind) -> float:
    """Return the time of sending a layer's parameters alone, including sums."""
    messages = parts.message_bytes(scenario, layer_index, kind)
    if kind == "allreduce":
        return allreduce_s(messages[0], scenario.n_ranks, scenario.machine, "direct")
    summed_s = scenario.sum_s(messages[0]) if kind == "sharded" else 0.0
    return sum(map(scenario.transfer_s, messages)) + summed_s


def _line(name: str, scenario: Scenario, plan: parts.LayerPlan, predicted: Prediction) -> str:
    hidden = predicted.overlap_percent
    shown = "nothing is sent" if hidden is None else f"{hidden:.0f} % of communication hidden"
    return (
        f"- {name}: {1e3 * predicted.step_s:.2f} ms per step, "
        f"{1e3 * predicted.exposed_s:.2f} ms exposed, {shown}, "
        f"{parts.memory_bytes(scenario, plan) / 1e6:.0f} MB without activations"
    )


def _why(scenario: Scenario, choice: Choice, part: parts.LayerPart) -> str:
    """Describe how much longer the step would be with each other exchange of a part."""
    if scenario.n_ranks == 1:
        return "one rank"
    table = scenario.table
    others = [parts.LayerPart(kind, part.parameters) for kind in parts.KINDS[:2]]
    owners = {table.parameters[p].layer for p in part.parameters}
    if len(owners) == 1:
        layer_index = owners.pop()
        positions = table.positions(layer_index)
        others += [
            parts.LayerPart(kind, positions)
            for kind in parts.kinds_for(table.layers[layer_index])[2:]
        ]
    clauses = []
    for other in others:
        if other.kind != part.kind:
            predicted = simulate(scenario, parts.with_part(choice.plan, other))
            more_s = predicted.step_s - choice.predicted.step_s
            clauses.append(f"{other.kind}: {1e3 * more_s:+.2f} ms")
    return ", ".join(clauses)
