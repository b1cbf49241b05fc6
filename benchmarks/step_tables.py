"""Tables of the step suite: one per model and place, with the limits that physics sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import interval, megabytes, milliseconds, ratio_of, ratio_text, table
from benchmarks.numbers import paired_ratio, physical_limit
from benchmarks.rows import IN_TURN, Row, Turn, step_limit

_AUTO = "tfscale-auto"
TORCH_COMPUTE = "ddp-compute"
NAMES = {
    "compute": "compute only",
    "in-step": "compute in step",
    "horovod": "Horovod",
    "mwms": "MWMS",
    "mpi": "MPI's allreduce",
    TORCH_COMPUTE: "PyTorch, compute only",
    "ddp": "PyTorch DDP",
    "ddp-fp16": "PyTorch DDP, fp16",
    "ddp-powersgd": "PyTorch DDP, PowerSGD of rank 4",
    "ddp-fsdp": "PyTorch FSDP2",
}


def name_of(system: str) -> str:
    """Return a system's name for readers."""
    name = NAMES.get(system, system.replace("tfscale-", "tfscale "))
    return name.removesuffix("-fit") + ", in fit" * name.endswith("-fit")


def eligible(row: Row) -> list[str]:
    """Return our systems that have as many rounds together with Horovod as any other of ours.

    One lucky round must not win against three. Local SGD is not among them: it computes something
    else than one process does. Nor are steps in `fit`, which also read their input.
    """
    exact = [s for s in row.rounds if s.startswith("tfscale-") and "local" not in s]
    ours = [s for s in exact if not s.endswith("-fit")]
    theirs = row.rounds.get("horovod", {})
    n_rounds = {s: len(row.rounds[s].keys() & theirs.keys()) for s in ours}
    if not any(n_rounds.values()):  # no Horovod to be compared with, so that all rounds count
        n_rounds = {s: len(row.rounds[s]) for s in ours}
    return [s for s in ours if n_rounds[s] == max(n_rounds.values())]


def summary(rows: Sequence[Row]) -> str:
    """Return one line per model and place: the limit, "auto" and how it compares, the best fixed.

    "auto" is there whatever it measures; the best fixed exchange is known only afterwards, so that
    no interval is given.
    """
    lines = []
    for row in rows:
        ours = eligible(row)
        fixed = min((s for s in ours if s != _AUTO), key=row.median_s, default=None)
        if not ours:
            continue
        limit = step_limit(row, "least_bytes")
        line = [row.case, f"{row.place}, {row.n_ranks} ranks"]
        line += ["—" if limit is None else f"{1e3 * limit:.0f}"]
        line += _auto_columns(row, limit) if _AUTO in ours else ["—"] * 5
        line += ["—"] * 3 if fixed is None else _fixed_columns(row, fixed)
        lines.append(line)
    head = ["model", "where", "limit ms", "auto ms", "of limit", "Horovod / auto", "MWMS / auto"]
    head += ["predicted / measured (auto)", "best fixed", "ms", "Horovod / best fixed"]
    return table(head, lines)


def _auto_columns(row: Row, limit: float | None) -> list[str]:
    """Return median, part of the limit, ratios, and the planner's prediction over the median."""
    seconds = row.median_s(_AUTO)
    predicted = row.facts.get("predicted_s")
    return [
        f"{1e3 * seconds:.0f}",
        "—" if limit is None else f"{limit / seconds:.0%}",
        *(ratio_text(row, other, _AUTO) for other in ("horovod", "mwms")),
        "—" if predicted is None else f"{predicted / seconds:.2f}",
    ]


def _fixed_columns(row: Row, system: str) -> list[str]:
    """Return name, median, and the ratio with its number of rounds."""
    ratio, text = ratio_of(row, "horovod", system), "—"
    if ratio is not None:
        text = f"{ratio.median:.2f}, {ratio.n} round{'s' * (ratio.n > 1)}"
    name = system.removeprefix("tfscale-")
    return [name, f"{1e3 * row.median_s(system):.0f}", text]


def group_table(row: Row) -> str:
    """Return a heading with the limits of a group, and a line per system."""
    where = row.place if row.where.rate_bits_s else "shared memory"
    count = f"{row.facts.get('n_parameters', 0) / 1e6:.1f} million parameters"
    limits = {
        "summing up all gradients": step_limit(row, "allreduce_bytes"),
        "the least bytes": step_limit(row, "least_bytes"),
    }
    told = [f"{1e3 * s:.0f} ms with {name}" for name, s in limits.items() if s is not None]
    limit_line = f" Physical limits: {', '.join(told)}." if told and row.where.rate_bits_s else ""
    head = ["system", "ms per step", "of compute-only rate", "Horovod / it", "MWMS / it"]
    head += ["exposed ms", "step / limit", "MB sent per host"]
    lines = []
    for system in row.rounds:
        line = [name_of(system), milliseconds(row.samples(system))]
        alone = compute_of(system)
        share = ratio_of(row, alone, system)
        ratios = [
            "" if system in (alone, other) else ratio_text(row, other, system)
            for other in ("horovod", "mwms")
        ]
        line += ["—" if share is None else f"{share.median:.2f}", *ratios]
        lines.append([*line, *_exposed_columns(row, system), megabytes(row, [system])])
    title = f"### {row.case}, {where}, {row.n_ranks} ranks\n\n{count}.{limit_line}\n\n"
    return title + table(head, lines)


def compute_of(system: str) -> str:
    """Return the system that only computes, in the same framework."""
    return TORCH_COMPUTE if system.startswith("ddp") else "compute"


def _exposed_columns(row: Row, system: str) -> list[str]:
    """Return the time that a step takes longer than computing alone, and its ratio to the limit.

    Frameworks compute at different speeds, so each is compared with itself; the limit is that of
    summing up all gradients in float32.
    """
    alone = compute_of(system)
    if alone == system or alone not in row.rounds or "allreduce_bytes" not in row.facts:
        return ["—", "—"]
    step_s, alone_s = row.median_s(system), row.median_s(alone)
    limit = physical_limit(alone_s, row.facts["allreduce_bytes"], row.where.rate_bits_s)
    return [f"{1e3 * (step_s - alone_s):.0f}", f"{step_s / limit:.2f}"]


def overhead_table(rows: Sequence[Row], suite: str) -> str:
    """Return what the second system of a suite in turn costs; negative means that it was faster."""
    names, lines = IN_TURN[suite], []
    for row in rows:
        first, second = (row.rounds[name] for name in names)
        if suite == "fit":  # all blocks of the first system run before those of the second one
            ratio = paired_ratio(second, first)
        else:
            ratio = paired_ratio(_by_block(second), _by_block(first))
        text = "—" if ratio is None else f"{_percent(ratio.median)} %{interval(ratio, _percent)}"
        lines.append([row.group, *(milliseconds(row.samples(name)) for name in names), text])
    return table(["model", *(f"{name} ms" for name in names), "overhead"], lines)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _by_block(rounds: Mapping[Turn, Sequence[float]]) -> dict[tuple[Turn, int], list[float]]:
    """Return one round per block: blocks of both took turns, so that they are pairs."""
    return {
        (turn, number): [seconds]
        for turn, blocks in rounds.items()
        for number, seconds in enumerate(blocks)
    }
