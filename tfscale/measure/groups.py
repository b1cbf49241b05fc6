"""Distances between the models of groups of local SGD: pictures, and the number they advise."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.files import write_findings
from tfscale.measure.provenance import describe
from tfscale.plan.forecast import grid

_PROPORTION = 0.85  # of twice the distance that half as many groups have
_MOST_LOSS = 1.25  # times the loss of one group after as many samples
_MOST_LAYERS = 40  # drawn: those with the largest distances


@dataclass(frozen=True)
class GroupProbe:
    """A short training with some groups of local SGD."""

    groups: int  # G, equal to the number of ranks
    interval: int  # steps between two averages
    learning_rate: float
    distances: tuple[float, ...]  # D at each average, in order; none of one group
    losses: tuple[float, ...]  # of each step, averaged over ranks

    @property
    def loss(self) -> float:
        """The mean loss over the last quarter of the steps."""
        return self.loss_after(len(self.losses) * self.groups)

    @property
    def distance(self) -> float:
        """The median distance over the second half: early distances still grow. 0 of one group."""
        return statistics.median(self.distances[len(self.distances) // 2 :] or (0.0,))

    def loss_after(self, batches: int) -> float:
        """Return the mean loss over the last quarter of the steps that use up some batches.

        Args:
            batches: Of one group, those of all groups together, `groups` of them in each step.
        """
        n_steps = max(1, batches // self.groups)
        return statistics.fmean(self.losses[n_steps * 3 // 4 : n_steps])

    @property
    def has_diverged(self) -> bool:
        """Whether loss or distances are not finite."""
        return not all(map(math.isfinite, (self.loss, *self.distances)))


@dataclass(frozen=True)
class GroupAdvice:
    """A recommendation, and its reason in one sentence."""

    groups: int  # the largest number that passes both tests
    reason: str


def advise(probes: Sequence[GroupProbe]) -> GroupAdvice:
    """Choose the number of groups from probes, each with twice as many groups as the one before.

    Doubling G is accepted while D(2 G) >= 0.85 * 2 * D(G). While groups explore different
    directions, their distance grows in proportion to their number; once it does not, more groups
    only add noise that averaging cannot remove. With the curves of [L] this gives the choices
    published there: 4 for CIFAR-10, 8 for DIV2K. One group has no distance.

    The distance cannot see what fewer steps cost: G groups take 1/G of the steps for an epoch. So
    the loss must also be at most 1.25 times that of the first probe, which should have one group,
    after as many samples.

    Source: [L] IV-B, eq. 9, for the distance.
    """
    fit = list(itertools.takewhile(lambda probe: not probe.has_diverged, probes))
    for smaller, larger in itertools.pairwise(fit):
        share = larger.distance / (2 * smaller.distance) if smaller.distance > 0 else 1.0
        if share < _PROPORTION:
            return GroupAdvice(
                smaller.groups,
                f"D({larger.groups}) is {share:.2f} of twice D({smaller.groups}); "
                f"{_PROPORTION} is asked for",
            )
        ratio = loss_ratio(larger, fit[0])
        if ratio > _MOST_LOSS:
            return GroupAdvice(
                smaller.groups,
                f"after as many samples the loss with {larger.groups} groups is {ratio:.2f} times "
                f"that with {fit[0].groups}; {_MOST_LOSS} is the most accepted",
            )
    if len(fit) < len(probes):
        failed = probes[len(fit)]
        return GroupAdvice(
            fit[-1].groups if fit else 1,
            f"with {failed.groups} groups training diverges at a learning rate of "
            f"{failed.learning_rate:.4g}; a smaller one (--learning-rate, --rate-rule) may train",
        )
    return GroupAdvice(
        probes[-1].groups,
        "D grows in proportion and the loss falls nearly as fast up to the most groups probed",
    )


def loss_ratio(probe: GroupProbe, base: GroupProbe) -> float:
    """Return the loss of a probe over that of another, after the samples that the latter used."""
    batches = min(len(p.losses) * p.groups for p in (probe, base))
    return probe.loss_after(batches) / base.loss_after(batches)


def write_report(
    probes: Sequence[GroupProbe], folder: str | Path, made: Mapping[str, str] | None = None
) -> str:
    """Return a table and the recommendation, in Markdown; write `groups.json`, `groups.png`.

    The picture needs matplotlib. `made` says what made the measurements.
    """
    advice = advise(probes)
    more = [
        {"distance": p.distance, "loss": p.loss, "loss_ratio": loss_ratio(p, probes[0])}
        for p in probes
    ]
    rows = [dataclasses.asdict(p) | own for p, own in zip(probes, more, strict=True)]
    content = {
        "made": dict(made or describe()),
        "probes": rows,
        "advice": dataclasses.asdict(advice),
    }
    write_findings(folder, "groups", content, lambda path: _draw(probes, advice, path))
    body = []
    for half, probe in zip([None, *probes], probes, strict=False):
        share = f"{probe.distance / (2 * half.distance):.2f}" if half and half.distance else ""
        numbers = [f"{x:.4g}" for x in (probe.learning_rate, probe.distance)]
        ratio = f"{loss_ratio(probe, probes[0]):.2f}"
        body.append([probe.groups, probe.interval, *numbers, share, f"{probe.loss:.4g}", ratio])
    head = ["groups", "interval", "learning rate", "D", "D / (2 D of half)", "loss"]
    head.append(f"loss / that of {probes[0].groups}, after as many samples")
    groups = f"{advice.groups} group{'s' if advice.groups > 1 else ''}"
    return "\n".join([*grid(head, body), "", f"Use {groups}: {advice.reason}.", ""])


def _draw(probes: Sequence[GroupProbe], advice: GroupAdvice, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 3.8), layout="constrained")
    course, result, learning = figure.subplots(1, 3)
    apart = [probe for probe in probes if probe.distances]
    for probe in probes:
        name = f"{probe.groups} group{'s' if probe.groups > 1 else ''}"
        colour = f"C{probe.groups.bit_length() - 1}"
        if probe.distances:
            steps = [(i + 1) * probe.interval for i in range(len(probe.distances))]
            course.plot(steps, probe.distances, color=colour, label=name)
        n = probe.interval  # a single step's loss is too noisy to be compared
        means = [statistics.fmean(probe.losses[i : i + n]) for i in range(0, len(probe.losses), n)]
        batches = [(i + 0.5) * n * probe.groups for i in range(len(means))]
        learning.plot(batches, means, color=colour, label=name)
    most = len(probes[0].losses) * probes[0].groups
    learning.set(xlabel="Batches of one group, all groups together", ylabel="Loss", xlim=(0, most))
    learning.legend(fontsize=8)
    course.set(xlabel="Step", ylabel="Distance D just before an average")
    course.legend(fontsize=8)
    groups = [p.groups for p in apart]
    result.plot(groups, [p.distance for p in apart], "o-", label="measured")
    line = [apart[0].distance * g / apart[0].groups for g in groups]
    result.plot(groups, line, "--", color="0.6", label="in proportion")
    result.axvline(advice.groups, color="0.6", ls=":", label="chosen")
    result.set_xscale("log", base=2)
    ticks = [p.groups for p in probes]
    result.set_xticks(ticks, [str(g) for g in ticks])
    result.set(xlabel="Groups", ylabel="Distance D")
    result.legend(fontsize=8)
    for axes in (course, result, learning):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def draw_distances(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw distances over steps: of the whole model, and of each layer in colours.

    `rows` are the lines of `ModelDistance`; those of an earlier version have no layers. Distances
    of a training that diverged are None, and are left out.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    if not rows:
        return
    steps = [row["step"] for row in rows]
    measured = [row for row in rows if row.get("layers")]
    names = list(measured[-1]["layers"]) if measured else []
    table = np.array(  # None becomes NaN
        [[row["layers"].get(name, 0.0) for row in measured] for name in names], dtype=float
    )
    sizes = np.nan_to_num(table).max(axis=1, initial=0.0) if names else []
    largest = np.sort(np.argsort(sizes)[::-1][:_MOST_LAYERS]) if names else []
    height = 2.6 + 0.16 * len(largest)
    figure = Figure(figsize=(7.2, height), layout="constrained")
    ratios = [2.6, max(0.16 * len(largest), 0.1)]
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
    upper.plot(steps, np.array([row["distance"] for row in rows], float), marker=".", lw=1.0)
    upper.set(ylabel="D", title="Mean distance of the groups' models from their average")
    upper.set_ylim(bottom=0.0)
    upper.grid(alpha=0.3)
    if not names:
        figure.delaxes(lower)
        upper.set_xlabel("Step")
    else:
        shown = table[largest]
        positive = shown[shown > 0]
        most = positive.max(initial=0.0) or 1.0
        norm = LogNorm(positive.min(initial=most), most * 1.01)
        edges = [row["step"] for row in measured]
        mesh = lower.pcolormesh(edges, range(len(shown)), shown, norm=norm, shading="nearest")
        lower.set_yticks(range(len(shown)), [names[i] for i in largest], fontsize=6)
        lower.invert_yaxis()
        lower.set_xlabel("Step")
        figure.colorbar(mesh, ax=lower, label="D of the layer")
    figure.savefig(path, dpi=120)
