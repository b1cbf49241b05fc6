"""Advice for slow links: exchange, bits and interval, and the study that it rests on.

Nothing is chosen automatically: what sends fewer bytes changes the result of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tfscale.config import ConfigError
from tfscale.plan.choose import choose
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import few_bits_s, grid
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine
from tfscale.plan.parts import plan_bytes

# Shares of the bytes of float32: codes of a block, and its scale; of sparse chunks.
_SHARES = {"int8": 258 / 1024, "int4": 34 / 256, "sparse": 116 / 16384}
_RESERVE = 1.25  # an average should take less than the steps that it may take, as overlap="auto"
_BOUND = 0.3  # points by which the upper bound of what is lost may exceed its mean

PICTURES, TEXT = "convolutional classifier", "transformer"


@dataclass(frozen=True)
class Evidence:
    """Points of accuracy that one configuration lost against exact training in one study.

    Attributes:
        what: "int8" and "int4" of gradients, or averages of local SGD: "interval 8"; "second half"
            is an interval of 8 after half of the epochs in step.
        kind: The kind of model.
        groups: Groups that trained apart; 1 for gradients.
        lost: Points of accuracy, a mean over seeds.
        bound: Their one-sided upper bound of 95 %.
        study: File in `recipes/results`.
        row: Name of the configuration there.
    """

    what: str
    kind: str
    groups: int
    lost: float
    bound: float
    study: str
    row: str


EVIDENCE = (
    Evidence("int8", PICTURES, 1, 0.04, 0.32, "compression_fashion.md", "int8"),
    Evidence("int4", PICTURES, 1, 0.08, 0.75, "compression_fashion.md", "int4"),
    Evidence("int8", TEXT, 1, 0.01, 0.03, "compression_characters.md", "int8"),
    Evidence("int4", TEXT, 1, 0.05, 0.07, "compression_characters.md", "int4"),
    Evidence(
        *("interval 8", PICTURES, 2, 1.21, 1.90),
        *("local_sgd_groups.md", "2 groups, averages overlap"),
    ),
    Evidence(
        *("interval 8", PICTURES, 4, 2.35, 3.75),
        *("local_sgd_groups.md", "4 groups, averages overlap"),
    ),
    Evidence("second half", PICTURES, 2, 0.17, 0.29, "local_sgd_rules.md", "post-local"),
    Evidence("second half", TEXT, 2, 0.18, 0.29, "local_sgd_rules_characters.md", "post-local"),
    Evidence(
        *("interval 30, sparse", PICTURES, 2, 3.53, 3.98),
        *("local_sgd_rules.md", "sparse, interval 30"),
    ),
    Evidence(
        *("interval 30, sparse", TEXT, 2, 11.76, 13.30),
        *("local_sgd_rules_characters.md", "sparse, interval 30"),
    ),
)


@dataclass(frozen=True)
class Option:
    """A way to train over a slow link.

    Attributes:
        name: For people.
        code: What to write in Python.
        step_s: Predicted seconds of a step, as a mean over an interval.
        sent_bytes: Bytes that a rank sends, as a mean over the steps.
        evidence: What it lost for this kind of model; None without a study.
        is_exact: Whether it gives the result of one process.
    """

    name: str
    code: str
    step_s: float
    sent_bytes: float
    evidence: Evidence | None = None
    is_exact: bool = False

    def is_allowed(self, may_lose: float) -> bool:
        """Return whether a study shows that it loses no more points than that."""
        if self.is_exact or self.evidence is None:
            return self.is_exact
        lost, bound = self.evidence.lost, self.evidence.bound
        return lost <= may_lose and bound <= may_lose + _BOUND


def read_rate(text: str) -> float:
    """Return bytes per second of "10mbit", "1gbit" or "500kbit"."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    return _read(text, "--links", units, "10mbit") / 8


def read_time(text: str) -> float:
    """Return seconds of "100ms", "1s" or "50us"."""
    return _read(text, "--rtt", {"us": 1e-6, "ms": 1e-3, "s": 1.0}, "100ms")


def _read(text: str, name: str, units: dict[str, float], example: str) -> float:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([a-z]+)", text.lower())
    if match is None or match[2] not in units or not float(match[1]) > 0:
        raise ConfigError(
            f"{name} must be a number above 0 with one of {', '.join(units)}. Received: {name} "
            f"{text}. Example: {name} {example}"
        )
    return float(match[1]) * units[match[2]]


def kind_of(table: LayerTable) -> str:
    """Return the kind of model, as studies have it; "" for others."""
    names = " ".join(layer.name.lower() for layer in table.layers)
    if "attention" in names or "transformer" in names:
        return TEXT
    # Networks for restoration have no dense layers, and lose no points of accuracy.
    is_classifier = any(layer.dense for layer in table.layers)
    return PICTURES if "conv" in names and is_classifier else ""


def with_links(machine: Machine, bytes_per_s: float, rtt_s: float | None) -> Machine:
    """Return a machine with other links between its hosts."""
    latency_s = machine.latency_s if rtt_s is None else rtt_s / 2
    return replace(machine, bytes_per_s=bytes_per_s, latency_s=latency_s)


def options_of(scenario: Scenario) -> list[Option]:
    """Return the ways to train a model on some ranks, each with the evidence for its kind."""
    kind, n = kind_of(scenario.table), scenario.n_ranks
    choice = choose(scenario)
    n_bytes = plan_bytes(scenario, choice.plan)
    exact = choice.predicted
    options = [Option("exact", 'exchange="auto"', exact.step_s, n_bytes, is_exact=True)]
    for bits in ("int8", "int4"):
        step_s = few_bits_s(scenario, _SHARES[bits], choice.plan)
        code = f"compression=tfscale.Compression.{bits}"
        sent = n_bytes * _SHARES[bits]
        options.append(Option(f"{bits} gradients", code, step_s, sent, _find(bits, kind, 1)))
    if n == 1:
        return options
    local = list(_local(scenario, exact.compute_s, kind))
    # As in its study its averages do not overlap.
    code = f"exchange=tfscale.LocalSGD({n}, 8, start=EPOCHS // 2)"
    apart_s = exact.compute_s + local[0].sent_bytes / scenario.machine.bytes_per_s
    step_s, sent = (exact.step_s + apart_s) / 2, (n_bytes + local[0].sent_bytes) / 2
    half = _find("second half", kind, n)
    return [*options, Option("local SGD in the second half", code, step_s, sent, half), *local]


def _local(scenario: Scenario, compute_s: float, kind: str) -> Iterator[Option]:
    """Yield local SGD of a group for each rank, whose averages overlap with training."""
    n, machine = scenario.n_ranks, scenario.machine
    n_bytes = 4.0 * scenario.table.n_values
    for bits, interval in (("", 8), ("int8", 8), ("sparse", 30), ("sparse", 120)):
        # An allreduce sends a segment twice; of sparse changes a rank sends its own to all others.
        sent = (n - 1) * n_bytes * (_SHARES["sparse"] if bits == "sparse" else 2 / n)
        sent *= _SHARES[bits] if bits == "int8" else 1.0
        average_s = sent / machine.bytes_per_s + 2 * (n - 1) * machine.latency_s
        exposed_s = max(0.0, _RESERVE * average_s - (interval - 1) * compute_s)
        code = f'exchange=tfscale.LocalSGD({n}, {interval}, overlap="auto")'
        code += f", compression=tfscale.Compression.{bits}" if bits else ""
        what = f"interval {interval}, {bits}" if bits else f"interval {interval}"
        name = f"local SGD, {what}"
        step_s = compute_s + exposed_s / interval
        yield Option(name, code, step_s, sent / interval, _find(what, kind, n))


def _find(what: str, kind: str, groups: int) -> Evidence | None:
    keys = (what, kind, groups)
    return next((e for e in EVIDENCE if (e.what, e.kind, e.groups) == keys), None)


def advise(scenario: Scenario, may_lose: float) -> str:
    """Return a page that advises an exchange, bits and interval for a scenario's links."""
    options, kind = options_of(scenario), kind_of(scenario.table)
    compute_s = choose(scenario).predicted.compute_s
    best = min((o for o in options if o.is_allowed(may_lose)), key=lambda o: o.step_s)
    machine = scenario.machine
    links = f"{machine.bytes_per_s * 8e-6:g} Mbit/s, round trip {2e3 * machine.latency_s:g} ms"
    lines = [
        f"# {scenario.table.name} on {scenario.n_ranks} ranks, {scenario.global_batch} samples per "
        "step",
        "",
        f"Links: {links}. Computing alone takes {1e3 * compute_s:.0f} ms on {machine.name}.",
        f"May lose: {may_lose:g} points. Kind of model: {kind or 'none that was studied'}.",
        "",
    ]
    body = []
    for option in options:
        evidence = option.evidence
        lost = "0" if option.is_exact else "no study"
        if evidence is not None:
            lost = f"{evidence.lost:.2f} (at most {evidence.bound:.2f})"
        row = [option.name, f"{1e3 * option.step_s:.0f}", f"{compute_s / option.step_s:.2f}"]
        row += [f"{option.sent_bytes / 1e6:.2f}", lost, evidence.study if evidence else "-"]
        body.append([*row, "advised" if option is best else ""])
    head = ["training", "step ms", "of computing", "MB per step", "points lost", "study", ""]
    lines += [*grid(head, body, ("training", "points lost", "study", "")), ""]
    lines += [_conclusion(options, best, may_lose, kind), ""]
    return "\n".join(lines)


def _conclusion(options: list[Option], best: Option, may_lose: float, kind: str) -> str:
    faster = [o for o in options if o.step_s < 0.97 * best.step_s]
    if best.evidence is not None:
        text = (
            f"Advice: {best.code}. The claim rests on recipes/results/{best.evidence.study}, "
            f"'{best.evidence.row}': a small {best.evidence.kind}, trained for a few epochs. "
            "Compare it on your model."
        )
    else:
        text = f"Advice: {best.code}, which is exact."
        if not kind:
            text += " No study covers this kind of model, so nothing else is advised."
    if faster:
        fastest = min(faster, key=lambda o: o.step_s)
        why = "no study has measured what it loses"
        if fastest.evidence is not None:
            why = f"it lost more than {may_lose:g} points, or that is not certain"
        text += f" Faster would be {fastest.code}: {why}."
    return text
