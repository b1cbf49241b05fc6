"""The picture of a study: curves over epochs, last epochs, and what a study compares."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import study_report
from study_runs import Outcome, Study

_LINES = ("-", "--", ":", "-.")  # another one after every ten configurations, as colours repeat
_SHOWN = {
    "batch_size": "Samples of a batch",
    "theta": "theta at the end of the epoch",
    "averaging_weight": "gamma of rank 0",
}
# Records of theta, over updates instead of epochs.
_OF_UPDATES = {
    "theta": "theta",
    "distance": "||w_0 - w||",
    "gradient_norm": "||g||, mean gradient of a batch",
}
_TITLE_CHARACTERS = 100  # in a line
_OF_MAKING = ("commit", "machine")
_LIMITS = ("limit of the mean", "limit of the upper bound")
Draw = Callable[[Axes], None]


def draw(study: Study, outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the picture to a PNG file; see `figure`."""
    figure(study, outcomes).savefig(path, dpi=110)


def figure(study: Study, outcomes: Sequence[Outcome]) -> Figure:
    """Return the picture of a study.

    Speedups and times are left out if the machine was loaded.

    Args:
        study: The study.
        outcomes: Of its finished runs, at least one.
    """
    names = [s.name for s in study_report.summaries(study, outcomes)]
    own = {name: [o for o in outcomes if o.run.configuration == name] for name in names}
    panels = _panels(study, own, outcomes)
    rows = -(-len(panels) // 2)
    result = Figure(figsize=(11.0, 4.2 * rows), layout="constrained")
    every = result.subplots(rows, 2, squeeze=False).ravel()
    for axes, panel in zip(every, panels, strict=False):
        panel(axes)
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    counts = sorted({len(runs) for runs in own.values()})
    seeds = " to ".join(map(str, {counts[0]: 0, counts[-1]: 0}))
    band = "" if counts[-1] == 1 else "; bands from the lowest to the highest"
    title = f"{study.title} ({seeds} seed{'s' * (counts[-1] > 1)}{band})"
    result.suptitle(textwrap.fill(title, _TITLE_CHARACTERS))
    made = [part for outcome in outcomes for part in outcome.made]
    commits, machines = (sorted({part[k] for part in made if k in part}) for k in _OF_MAKING)
    result.supxlabel(f"commit {', '.join(commits)}; {'; '.join(machines)}", fontsize=8, color="0.4")
    return result


def _panels(
    study: Study, own: Mapping[str, Sequence[Outcome]], outcomes: Sequence[Outcome]
) -> list[Draw]:
    panels: list[Draw] = [partial(_curves, name=study.metric, own=own)]
    if study.series:
        drawn = {name for points in study.series.values() for name in points.values()}
        known = {
            title: value
            for title, value in study.columns.items()
            if any(value(o.epochs) is not None for name in drawn for o in own.get(name, ()))
        }
        last = [lambda epochs: epochs[-1][study.metric], *known.values()]
        titles = [f"{study.metric}, last epoch", *known]
        panels += [
            partial(_against, study=study, own=own, title=title, value=value)
            for title, value in zip(titles, last, strict=True)
        ]
    else:
        panels.append(partial(_last, metric=study.metric, own=own))
    rows = study_report.losses(study, outcomes)
    if rows:
        panels.append(partial(_losses, study=study, rows=rows))
    by_update = [name for name in _OF_UPDATES if any(name in o.theta for o in outcomes)]
    panels += [partial(_by_update, name=name, own=own) for name in by_update]
    for name in _SHOWN:
        changes = any(len({line.get(name) for line in o.epochs}) > 1 for o in outcomes)
        if changes:
            panel = _staircase if name == "batch_size" else partial(_curves, name=name)
            panels.append(partial(panel, own=own))
    if not study_report.why_loaded(outcomes):
        panels += [partial(p, study=study, outcomes=outcomes) for p in (_speedups, _times)]
    return panels


def _curves(axes: Axes, *, name: str, own: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw a number of each epoch: the mean over seeds, and their band."""
    late: list[float] = []
    for number, (configuration, runs) in enumerate(own.items()):
        count = min(len(outcome.epochs) for outcome in runs)
        values = np.array([[e.get(name, np.nan) for e in o.epochs[:count]] for o in runs], float)
        if np.isnan(values).all():
            continue
        colour, dashes = f"C{number % 10}", _LINES[number // 10 % len(_LINES)]
        at, mean = np.arange(1, count + 1), values.mean(axis=0)
        marker = "o" if count == 1 else ""  # a line of one point is none
        axes.plot(at, mean, marker, color=colour, ls=dashes, lw=1.3, label=configuration)
        if len(runs) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(at, low, high, color=colour, alpha=0.15)
        late += [*values[:, count // 2 :].ravel()]
    if name not in _SHOWN:  # the first epochs would hide the differences in question
        axes.set_ylim(*_range(late))
    axes.set(xlabel="Epoch", ylabel=_SHOWN.get(name, name))
    axes.grid(alpha=0.3)
    _legend(axes)


def _staircase(axes: Axes, *, own: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw the batch of each epoch, a line per seed: a mean would be no batch of any run."""
    for number, (configuration, runs) in enumerate(own.items()):
        colour, dashes = f"C{number % 10}", _LINES[number // 10 % len(_LINES)]
        for outcome in runs:
            batches = [line.get("batch_size", np.nan) for line in outcome.epochs]
            at = np.arange(1, len(batches) + 1)
            label = configuration if outcome is runs[0] else None
            axes.plot(
                at, batches, dashes, color=colour, drawstyle="steps-mid", alpha=0.7, label=label
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="Epoch", ylabel=f"{_SHOWN['batch_size']}, each seed")
    axes.grid(alpha=0.3)
    _legend(axes)


def _by_update(axes: Axes, *, name: str, own: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw a column of the records of theta over updates: the mean over seeds, and their band."""
    for number, (configuration, runs) in enumerate(own.items()):
        known = [outcome.theta for outcome in runs if name in outcome.theta]
        if not known:
            continue
        count = min(len(columns["update"]) for columns in known)
        values = np.array([columns[name][:count] for columns in known], float)
        colour, at = f"C{number % 10}", known[0]["update"][:count]
        axes.plot(at, values.mean(axis=0), color=colour, lw=1.3, label=configuration)
        if len(known) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(at, low, high, color=colour, alpha=0.15)
    axes.set_xscale("log")
    axes.set(xlabel="Update", ylabel=_OF_UPDATES[name])
    axes.grid(alpha=0.3)
    _legend(axes)


def _last(axes: Axes, *, metric: str, own: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw each seed's last epoch, and the means with their standard errors."""
    for at, runs in enumerate(own.values()):
        values = np.array([outcome.epochs[-1][metric] for outcome in runs])
        axes.plot(values, np.full(len(values), at), "o", ms=5, alpha=0.4, color=f"C{at % 10}")
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
        axes.errorbar(values.mean(), at, xerr=error, fmt="|", ms=16, capsize=4, color="0.2")
    axes.set_yticks(range(len(own)), list(own), fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    _show(axes, [outcome.epochs[-1][metric] for runs in own.values() for outcome in runs])
    axes.set_xlabel(f"{metric}, last epoch: each seed, mean and standard error")


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range to draw: one run that broke down must not hide what the others differ in."""
    low, q1, q3, high = map(float, np.nanpercentile(values, [0, 25, 75, 100]))
    reach = 5 * (q3 - q1)
    if reach > 0:
        low, high = max(low, q1 - reach), min(high, q3 + reach)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _show(axes: Axes, values: Sequence[float]) -> None:
    """Limit the axis of x to the range of most values, and name those outside."""
    low, high = _range(values)
    if low < high:
        axes.set_xlim(low, high)
    outside = [f"{value:.3g}" for value in values if low < high and not low <= value <= high]
    if outside:
        text = f"outside: {', '.join(outside)}"
        axes.text(
            1.0,
            1.01,
            text,
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            fontsize=8,
            color="0.3",
        )


def _losses(axes: Axes, *, study: Study, rows: Sequence[study_report.Loss]) -> None:
    """Draw what each seed loses, the means, and the ends of their confidence intervals."""
    for at, row in enumerate(rows, 1):  # the first colour is that of the base
        axes.plot(row.points, np.full(len(row.points), at), "o", ms=5, alpha=0.4, color=f"C{at}")
        right = [[0.0], [row.bound - row.mean]]
        axes.errorbar(row.mean, at, xerr=right, fmt="|", ms=16, capsize=4, color="0.2")
    for limit, colour, text in zip(study.may_lose or (), ("0.6", "C3"), _LIMITS, strict=True):
        axes.axvline(limit, color=colour, lw=1, ls="--", label=f"{text}: {limit:g}")
    axes.set_yticks(range(1, len(rows) + 1), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    _show(axes, [*(p for row in rows for p in row.points), *(study.may_lose or ())])
    _legend(axes)
    base = next(iter(study.configurations))
    axes.set_xlabel(f"Points of {study.metric} lost against {base}: seeds, mean, 95 % upper bound")


def _against(
    axes: Axes,
    *,
    study: Study,
    own: Mapping[str, Sequence[Outcome]],
    title: str,
    value: Callable[[list[dict[str, float]]], float | None],
) -> None:
    """Draw a number of each run against the study's variable, a line per series."""
    ticks: set[float] = set()
    for series, points in study.series.items():
        found = []
        for x, name in points.items():
            values = [value(outcome.epochs) for outcome in own.get(name, ())]
            known = [v for v in values if v is not None]
            if known:
                found.append((x, float(np.mean(known)), min(known), max(known)))
        if found:
            x, mean, low, high = map(np.array, zip(*found, strict=True))
            axes.errorbar(x, mean, [mean - low, high - mean], fmt="o-", capsize=3, label=series)
            ticks |= set(x.tolist())
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{x:g}" for x in sorted(ticks)])
    axes.set(xlabel=study.x_label, ylabel=title)
    axes.grid(alpha=0.3)
    _legend(axes)


def _speedups(axes: Axes, *, study: Study, outcomes: Sequence[Outcome]) -> None:
    rows = study_report.summaries(study, outcomes)
    pairs = [("epoch", [study_report.speedup(rows[0].epoch_s, row.epoch_s) for row in rows])]
    if study.threshold:
        base = rows[0].seconds_to_threshold
        total = [study_report.speedup(base, row.seconds_to_threshold) for row in rows]
        pairs.append((f"total, to {study.threshold[0]} {study.threshold[1]:g}", total))
    height = 0.8 / len(pairs)
    for number, (label, values) in enumerate(pairs):
        at = np.arange(len(rows)) + (number - (len(pairs) - 1) / 2) * height
        bars = axes.barh(at, [value or 0.0 for value in values], height * 0.92, label=label)
        shown = ["not reached" if value is None else f"{value:.2f}" for value in values]
        axes.bar_label(bars, shown, fontsize=8, padding=2)
    _names(axes, [row.name for row in rows])
    axes.set_xlabel(f"Speedup over {rows[0].name}")


def _times(axes: Axes, *, study: Study, outcomes: Sequence[Outcome]) -> None:
    rows = study_report.summaries(study, outcomes)
    waiting = np.array([row.epoch_s * (row.exposed_share or 0.0) for row in rows])
    computing = np.array([row.epoch_s for row in rows]) - waiting
    at = range(len(rows))
    axes.barh(at, computing, 0.6, label="compute and input")
    axes.barh(at, waiting, 0.6, left=computing, label="waiting for communication", color="C3")
    _names(axes, [row.name for row in rows])
    axes.set_xlabel("Seconds of training per epoch")


def _names(axes: Axes, names: Sequence[str]) -> None:
    """Write the configurations beside their bars, the first on top, and a legend above."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Draw the legend above the axes, where it hides no curve."""
    count = len(axes.get_legend_handles_labels()[1])
    columns = 1 if count <= 2 else 2 if count <= 6 else 3
    axes.legend(fontsize=7, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
