"""Why a plan is as it is: a table of parameters with what each alternative would cost."""

from __future__ import annotations

from dataclasses import replace

from tfscale.plan import costs
from tfscale.plan.buckets import BYTES_PER_VALUE
from tfscale.plan.choose import Choice
from tfscale.plan.costs import Scenario
from tfscale.plan.parts import (
    KINDS,
    ExchangePlan,
    Kind,
    Part,
    kinds_for,
    lower_bound_s,
    memory_bytes,
    sent_bytes,
    with_layer,
)
from tfscale.plan.simulate import Prediction, simulate
from tfscale.plan.tables import grid


def wire_s(scenario: Scenario, place: int, kind: Kind) -> float:
    """Return how long a layer's parameters would be on the wire alone."""
    layer, size = scenario.table.layers[place], scenario.n_ranks
    n_bytes = BYTES_PER_VALUE * layer.n_values
    if kind == "allreduce":
        return costs.allreduce_s(n_bytes, size, scenario.machine, "direct")
    if kind == "sharded":
        return sum(costs.sharded_s(n_bytes, size, scenario.machine))
    dense, rows = scenario.dense_rows(place)
    cost = costs.partial_s if kind == "partial" else costs.replicated_s
    return sum(cost(dense, rows, size, scenario.machine))


def explain(scenario: Scenario, choice: Choice) -> str:
    """Return a page of Markdown about a choice.

    Returns:
        What is predicted, and per parameter the megabytes a rank sends and the milliseconds its
        layer would be on the wire alone with each exchange. "why" says how much longer the whole
        step would be if the parameter travelled otherwise, all else equal.
    """
    table = scenario.table
    head = ["parameter", "KB", "exchange", "part", *(f"{kind} MB / ms" for kind in KINDS), "why"]
    part_of = {p: n for n, part in enumerate(choice.plan.parts) for p in part.parameters}
    reasons = {n: _why(scenario, choice, part) for n, part in enumerate(choice.plan.parts)}
    body = []
    for number, parameter in enumerate(table.parameters):
        n = part_of[number]
        own: list[str] = [parameter.name, f"{parameter.n_bytes / 1e3:.1f}"]
        own += [choice.plan.parts[n].kind, str(n + 1)]
        fraction = parameter.n_values / table.layers[parameter.layer].n_values
        for kind in KINDS:
            if kind not in kinds_for(table.layers[parameter.layer]):
                own.append("-")
                continue
            sent = fraction * sent_bytes(scenario, parameter.layer, kind) / 1e6
            own.append(f"{sent:.2f} / {1e3 * wire_s(scenario, parameter.layer, kind):.2f}")
        body.append([*own, reasons[n]])
    lines = [*summary(scenario, choice), "", *grid(head, body, ("parameter", "exchange", "why"))]
    return "\n".join([*lines, ""])


def summary(scenario: Scenario, choice: Choice) -> list[str]:
    """Return a few lines about a choice: step times, and what was found."""
    machine = scenario.machine.name
    return [
        f"# {scenario.table.name}: {scenario.n_ranks} ranks of {machine}, "
        f"{scenario.global_batch} samples per step",
        "",
        f"Chosen: {choice.name} ({choice.reason}; {choice.n_tried} plans simulated).",
        "",
        _line("chosen plan", scenario, choice.plan, choice.predicted),
        _line("plain allreduce", scenario, choice.plain, choice.plain_predicted),
        f"- no plan is faster than {1e3 * lower_bound_s(scenario):.2f} ms",
    ]


def _line(name: str, scenario: Scenario, plan: ExchangePlan, predicted: Prediction) -> str:
    hidden = predicted.overlap_percent
    shown = "nothing is sent" if hidden is None else f"{hidden:.0f} % of communication hidden"
    return (
        f"- {name}: {1e3 * predicted.step_s:.2f} ms per step, "
        f"{1e3 * predicted.exposed_s:.2f} ms exposed, {shown}, "
        f"{memory_bytes(scenario, plan) / 1e6:.0f} MB without activations"
    )


def _why(scenario: Scenario, choice: Choice, part: Part) -> str:
    """Return how much longer the step would be with each alternative for a part."""
    plan, own_s = choice.plan, choice.predicted.step_s
    owners = {scenario.table.parameters[p].layer for p in part.parameters}
    options: dict[Kind, ExchangePlan] = {}
    for kind in ("allreduce", "sharded"):
        other = Part(kind, part.parameters)
        options[kind] = replace(plan, parts=tuple(other if p is part else p for p in plan.parts))
    if len(owners) == 1:
        place = min(owners)
        for kind in kinds_for(scenario.table.layers[place])[2:]:
            options[kind] = with_layer(scenario.table, plan, place, kind)
    words = []
    for kind, option in options.items():
        if kind != part.kind and scenario.n_ranks > 1:
            more = 1e3 * (simulate(scenario, option).step_s - own_s)
            words.append(f"{kind}: {more:+.2f} ms")
    if not words:
        return "one rank"
    return ", ".join(words)
