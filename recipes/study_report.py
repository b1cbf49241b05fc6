"""The numbers of a study: per run, per configuration, as a table in Markdown and as JSON."""

import dataclasses
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_runs import Outcome, Study, command

# Of a recorded step: waiting in back-propagation, in the forward pass (for parameters), and all.
_SECONDS = ("exposed_s", "forward_wait_s", "step_s")
# 95 % quantiles of Student's t with 1, 2, ... degrees of freedom; the last one stands for more.
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)


@dataclasses.dataclass(frozen=True)
class Summary:
    """One configuration over its seeds; None where something was not measured.

    Attributes:
        name: Of the configuration.
        ranks: Processes.
        seeds: Finished runs.
        metric: The study's metric after the last epoch, one per seed.
        epochs: Epochs until the end, mean.
        epochs_to_threshold: Epochs until the threshold, mean; None if a seed never reached it.
        seconds_to_threshold: Seconds of training until then, mean.
        epoch_s: Seconds of training of an epoch: median over epochs, mean over seeds.
        exposed_share: Part of the time of a step in which ranks wait for communication.
        more: The study's own columns, one number per seed; None where a run has no such number.
    """

    name: str
    ranks: int
    seeds: int
    metric: list[float]
    epochs: float
    epochs_to_threshold: float | None
    seconds_to_threshold: float | None
    epoch_s: float
    exposed_share: float | None
    more: list[list[float] | None]


@dataclasses.dataclass(frozen=True)
class Loss:
    """Points of the metric that a configuration loses against the first one, paired by seed.

    Attributes:
        name: Of the configuration.
        points: One per seed that both have finished; negative where it gains.
        mean: Of the points.
        error: Standard error of the mean.
        bound: Upper end of the one-sided confidence interval of 95 %.
        verdict: "passed", "undecided" or "failed", see `study.py`.
    """

    name: str
    points: list[float]
    mean: float
    error: float
    bound: float
    verdict: str


def losses(study: Study, outcomes: Sequence[Outcome]) -> list[Loss]:
    """Return the loss of each configuration that shares two seeds or more with the first one."""
    if study.may_lose is None:
        return []
    found: dict[str, dict[int, float]] = {name: {} for name in study.configurations}
    for outcome in outcomes:
        last = outcome.epochs[-1][study.metric]
        found[outcome.run.configuration][outcome.run.seed] = 100 * last
    base, *others = found.values()
    pairs = [[base[seed] - own[seed] for seed in sorted({*base} & {*own})] for own in others]
    names = list(found)[1:]
    return [
        _loss(name, points, *study.may_lose)
        for name, points in zip(names, pairs, strict=True)
        if len(points) > 1
    ]


def _loss(name: str, points: list[float], most: float, most_bound: float) -> Loss:
    mean, n = statistics.mean(points), len(points)
    error = statistics.stdev(points) / n**0.5
    bound = mean + _T_95[min(n - 1, len(_T_95)) - 1] * error
    undecided = "undecided" if error > most_bound / 2 else "failed"
    verdict = "passed" if mean <= most and bound <= most_bound else undecided
    return Loss(name, points, mean, error, bound, verdict)


def summaries(study: Study, outcomes: Sequence[Outcome]) -> list[Summary]:
    """Return one summary per configuration that has a finished run, in the study's order."""
    result = []
    for name in study.configurations:
        own = [outcome for outcome in outcomes if outcome.run.configuration == name]
        if own:
            result.append(_summary(study, name, own))
    return result


def _summary(study: Study, name: str, own: Sequence[Outcome]) -> Summary:
    reached = [epochs_to(study.threshold, outcome.epochs) for outcome in own]
    numbers = [number for number in reached if number is not None]
    seconds = [
        sum(line["train_seconds"] for line in outcome.epochs[:number])
        for outcome, number in zip(own, reached, strict=True)
    ]
    is_reached = len(numbers) == len(own)
    waits = [wait for outcome in own for wait in _waiting(outcome).values()]
    exposed, forward, total = (sum(wait[key] for wait in waits) for key in _SECONDS)
    return Summary(
        name=name,
        ranks=own[0].run.ranks,
        seeds=len(own),
        metric=[outcome.epochs[-1][study.metric] for outcome in own],
        epochs=statistics.mean(len(outcome.epochs) for outcome in own),
        epochs_to_threshold=statistics.mean(numbers) if is_reached else None,
        seconds_to_threshold=statistics.mean(seconds) if is_reached else None,
        epoch_s=statistics.mean(
            statistics.median(line["train_seconds"] for line in outcome.epochs) for outcome in own
        ),
        exposed_share=(exposed + forward) / total if total else None,
        more=[_known([f(o.epochs) for o in own]) for f in study.columns.values()],
    )


def _waiting(outcome: Outcome) -> dict[str, dict[str, float]]:
    """Return the seconds of a run's recorded steps, and those in which ranks waited."""
    steps = [step for step in outcome.steps if "exposed_s" in step]
    if not steps:
        return {}
    return {"waiting": {key: sum(step.get(key, 0.0) for step in steps) for key in _SECONDS}}


def _known(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of independent values; None of a single one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def is_dirty(outcome: Outcome) -> bool:
    """True if files differed from the commit while a part of this run was made."""
    return any(part.get("commit", "").endswith("+") for part in outcome.made)


def epochs_to(
    threshold: tuple[str, float] | None, epochs: Sequence[dict[str, float]]
) -> int | None:
    """Return after how many epochs a threshold is reached: from above by a loss, else from below.

    Args:
        threshold: Metric and value.
        epochs: Lines of `metrics.jsonl`.

    Returns:
        None if it is never reached, or there is none.
    """
    if threshold is None:
        return None
    metric, value = threshold
    sign = -1 if "loss" in metric else 1
    hits = (n for n, line in enumerate(epochs, 1) if sign * line[metric] >= sign * value)
    return next(hits, None)


def speedup(base: float | None, own: float | None) -> float | None:
    """Return how many times shorter `own` is; None if one of them is unknown."""
    return base / own if base and own else None


def write(study: Study, outcomes: Sequence[Outcome], where: Path, note: str = "") -> str:
    """Write `where`.md and `where`.json; return the text of the former.

    Args:
        study: The study.
        outcomes: Of its finished runs, at least one.
        where: Path of the files, without their suffixes.
        note: To stand under the table.
    """
    text = _page(study, outcomes, where.name, note)
    where.with_suffix(".md").write_text(text, encoding="utf-8")
    runs = [
        {
            "configuration": outcome.run.configuration,
            "command": " ".join(command(outcome.run)),
            "ranks": outcome.run.ranks,
            **(outcome.made[-1] if outcome.made else {}),
            **({"parts": outcome.made} if len(outcome.made) > 1 else {}),
            **_waiting(outcome),
            "epochs": outcome.epochs,
            **({"theta": outcome.theta} if outcome.theta else {}),
        }
        for outcome in outcomes
    ]
    summary = [dataclasses.asdict(s) for s in summaries(study, outcomes)]
    about = {"study": study.name, "metric": study.metric, "note": note}
    paired = [dataclasses.asdict(loss) for loss in losses(study, outcomes)]
    content = {**about, "summary": summary, **({"losses": paired} if paired else {}), "runs": runs}
    # Lists of numbers stand on one line; a string holds no line feed.
    shown = re.sub(r'\[\n[^\[\]{}"]*\]', _on_one_line, json.dumps(content, indent=1))
    where.with_suffix(".json").write_text(f"{shown}\n", encoding="utf-8")
    return text


def _on_one_line(found: re.Match) -> str:
    return f"[{' '.join(found[0][1:-1].split())}]"


def why_loaded(outcomes: Sequence[Outcome]) -> str:
    """Return why times of these runs are not those of the machine, or an empty string."""
    for outcome in outcomes:
        for part in outcome.made:
            found = re.match(r"(\d+) cores", part.get("machine", ""))
            cores = int(found[1]) if found else 0
            if outcome.run.ranks > cores:
                return f"{outcome.run.ranks} ranks shared {cores} cores"
            if float(part.get("load", "inf")) > cores:
                return f"{part.get('load', 'unknown many')} programs shared {cores} cores"
    return ""


def _page(study: Study, outcomes: Sequence[Outcome], name: str, note: str) -> str:
    rows = summaries(study, outcomes)
    error = " (mean ± standard error)" if any(row.seeds > 1 for row in rows) else ""
    own_titles = [f"{title}{error}" for title in study.columns]
    metric = f"{study.metric}, last epoch{error}"
    head = ["configuration", "ranks", "seeds", metric, "epochs", *own_titles]
    loaded = why_loaded(outcomes)
    if study.threshold:
        metric, value = study.threshold
        head += [f"epochs to {metric} {value:g}"]
    if not loaded:
        head += ["s/epoch", "waiting for communication", "epoch speedup"]
        head += ["s to it", "total speedup"] if study.threshold else []
    lines = [f"# {study.title}", "", study.shows.strip(), "", f"![{study.title}]({name}.png)", ""]
    lines += [_row(head), _row(["---"] * len(head))]
    lines += [_row(_cells(study, row, rows[0], not loaded)) for row in rows]
    times = f"Speedups are over “{rows[0].name}”, by seconds of training without validation."
    lines += ["", f"No times: {loaded}." if loaded else times, ""]
    lines += _warnings(rows, outcomes)
    lines += _compared(study, outcomes)
    lines += [note, ""] if note else []
    lines += _made(study, outcomes)
    return "\n".join(lines) + "\n"


def _cells(study: Study, row: Summary, base: Summary, has_times: bool) -> list[str]:
    cells = [row.name, str(row.ranks), str(row.seeds)]
    cells += [f"{statistics.mean(row.metric):.4g}{_error(row.metric)}", f"{row.epochs:g}"]
    cells += [
        "-" if values is None else f"{_shown(statistics.mean(values))}{_error(values)}"
        for values in row.more
    ]
    share = None if row.exposed_share is None else f"{100 * row.exposed_share:.0f} %"
    cells += [_shown(row.epochs_to_threshold)] if study.threshold else []
    if has_times:
        cells += [f"{row.epoch_s:.3g}", share or "-", _shown(speedup(base.epoch_s, row.epoch_s))]
        total = speedup(base.seconds_to_threshold, row.seconds_to_threshold)
        cells += [_shown(row.seconds_to_threshold), _shown(total)] if study.threshold else []
    return cells


def _error(values: Sequence[float]) -> str:
    error = standard_error(values)
    return "" if error is None else f" ± {error:{'.2g' if error < 100 else '.0f'}}"


def _warnings(rows: Sequence[Summary], outcomes: Sequence[Outcome]) -> list[str]:
    """Return notes that belong beside the numbers."""
    lines = []
    if any(row.seeds == 1 for row in rows):
        lines += ["Rows of one seed have no error: they prove no difference.", ""]
    n_dirty = sum(map(is_dirty, outcomes))
    if n_dirty:
        lines += [
            f"**{n_dirty} of {len(outcomes)} runs were made from a working tree with uncommitted "
            "changes** (commits with +): they cannot be made again exactly.",
            "",
        ]
    return lines


def _compared(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the table of losses, empty where the study compares none."""
    rows = losses(study, outcomes)
    if not rows or study.may_lose is None:
        return []
    most, most_bound = study.may_lose
    base = next(iter(study.configurations))
    lines = [f"Points of {study.metric} lost against “{base}”, paired by seed:", ""]
    head = ["configuration", "seeds", "mean", "standard error", "95 % upper bound", "verdict"]
    lines += [_row(head), _row(["---"] * len(head))]
    for row in rows:
        numbers = [f"{number:.2f}" for number in (row.mean, row.error, row.bound)]
        lines.append(_row([row.name, len(row.points), *numbers, row.verdict]))
    rule = f"“Passed”: a mean of at most {most:g} points and a bound of at most {most_bound:g}; "
    rule += f"“undecided”: not that, and a standard error above {most_bound / 2:g}."
    return [*lines, "", rule, ""]


def _made(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    """Return what made the numbers: commands, seeds, commits, machines."""
    lines = ["Made by:", "", "```", f"python recipes/study.py {study.name}", "```", ""]
    for title, key in (
        ("Commit", "commit"), ("Machine", "machine"), ("Load when runs began", "load"),
        ("Versions", "versions"),
    ):  # fmt: skip
        parts = [part for outcome in outcomes for part in outcome.made]
        values = sorted({part.get(key, "unknown") for part in parts})
        lines.append(f"* {title}: {'; '.join(values)}")
    seeds = sorted({outcome.run.seed for outcome in outcomes})
    lines += [f"* Seeds: {', '.join(map(str, seeds))}", "", "Runs of the first seed:", "", "```"]
    first = [outcome.run for outcome in outcomes if outcome.run.seed == seeds[0]]
    for run in first:
        launch = "python" if run.ranks == 1 else f"tfscale run -np {run.ranks} python"
        lines.append(f"{launch} {' '.join(command(run))}")
    return [*lines, "```"]


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
