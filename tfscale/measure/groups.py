"""The command `tfscale tune groups`: advice on the number of groups."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfscale.config import ConfigError
from tfscale.measure.forecast import read_numbers
from tfscale.measure.pictures import has_matplotlib

PROPORTION = 0.85  # of twice the distance that half as many groups have


@dataclass(frozen=True)
class GroupProbe:
    """One probe.

    Attributes:
        groups: G, as many ranks.
        interval: Steps between two averages.
        learning_rate: During the probe.
        distances: D at each average, in order.
        loss: Training loss of the last step, averaged over ranks.
    """

    groups: int
    interval: int
    learning_rate: float
    distances: tuple[float, ...]
    loss: float

    @property
    def distance(self) -> float:
        """The median over the second half: early distances still grow."""
        return statistics.median(self.distances[len(self.distances) // 2 :])

    @property
    def has_diverged(self) -> bool:
        """Whether loss or distances are not finite."""
        return not all(map(math.isfinite, (self.loss, *self.distances)))


@dataclass(frozen=True)
class GroupAdvice:
    """A recommendation.

    Attributes:
        groups: The largest number for which D still grows in proportion.
        reason: In one sentence.
    """

    groups: int
    reason: str


def advise(probes: Sequence[GroupProbe]) -> GroupAdvice:
    """Choose the number of groups.

    Doubling G is accepted while D(2 G) >= 0.85 * 2 * D(G): while groups go separate ways their
    distance grows with their number; where it does not, more groups only add noise that averaging
    cannot remove. With [L]'s own curves this gives the choices published there: 4 for CIFAR-10, 8
    for DIV2K. One group has no distance, so two are accepted unless their training diverges.

    Args:
        probes: Ascending by groups, each twice the one before.

    Source: [L] IV-B, eq. 9.
    """
    fit = list(itertools.takewhile(lambda probe: not probe.has_diverged, probes))
    for smaller, larger in itertools.pairwise(fit):
        share = larger.distance / (2 * smaller.distance) if smaller.distance > 0 else 0.0
        if share < PROPORTION:
            return GroupAdvice(
                smaller.groups,
                f"D({larger.groups}) is {share:.2f} of twice D({smaller.groups}); "
                f"{PROPORTION} is asked for",
            )
    if len(fit) < len(probes):
        failed = probes[len(fit)]
        return GroupAdvice(
            fit[-1].groups if fit else 1,
            f"with {failed.groups} groups training diverges at a learning rate of "
            f"{failed.learning_rate:.4g}; a smaller one (--learning-rate, --rate-rule) may train",
        )
    return GroupAdvice(probes[-1].groups, "D grows in proportion up to the most groups probed")


def as_text(probes: Sequence[GroupProbe], advice: GroupAdvice) -> str:
    """Return a table and the recommendation, in Markdown."""
    lines = [
        "| groups | interval | learning rate | D | D / (2 D of half) | loss |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    before = None
    for probe in probes:
        share = f"{probe.distance / (2 * before):.2f}" if before else ""
        lines.append(
            f"| {probe.groups} | {probe.interval} | {probe.learning_rate:.4g} "
            f"| {probe.distance:.4g} | {share} | {probe.loss:.4g} |"
        )
        before = probe.distance
    groups = f"{advice.groups} group{'s' if advice.groups > 1 else ''}"
    return "\n".join([*lines, "", f"Use {groups}: {advice.reason}.", ""])


def write(probes: Sequence[GroupProbe], advice: GroupAdvice, folder: str | Path) -> None:
    """Write `groups.json` and, where matplotlib is installed, `groups.png` into a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(p) | {"distance": p.distance} for p in probes]
    content = {"probes": list(map(_as_json, rows)), "advice": dataclasses.asdict(advice)}
    path = Path(folder) / "groups.json"
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if has_matplotlib():
        _draw(probes, advice, Path(folder) / "groups.png")


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a probe with null in the place of what is not finite, which JSON does not know."""

    def known(value: Any) -> Any:
        if isinstance(value, tuple):
            return [known(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: known(value) for key, value in row.items()}


def _draw(probes: Sequence[GroupProbe], advice: GroupAdvice, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    course, result = figure.subplots(1, 2)
    for probe in probes:
        steps = [(i + 1) * probe.interval for i in range(len(probe.distances))]
        course.plot(steps, probe.distances, label=f"{probe.groups} groups")
    course.set_xlabel("Step")
    course.set_ylabel("Distance D just before an average")
    course.legend(fontsize=8)
    groups = [p.groups for p in probes]
    result.plot(groups, [p.distance for p in probes], "o-", label="measured")
    first = probes[0]
    line = [first.distance * g / first.groups for g in groups]
    result.plot(groups, line, "--", color="0.6", label="in proportion")
    result.axvline(advice.groups, color="0.6", ls=":", label="chosen")
    result.set_xscale("log", base=2)
    result.set_xticks(groups, [str(g) for g in groups])
    result.set_xlabel("Groups")
    result.set_ylabel("Distance D")
    result.legend(fontsize=8)
    for axes in (course, result):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


RULES = ("linear", "sqrt", "none")


def add_groups(tuners: argparse._SubParsersAction) -> None:
    """Add the parser; its handler starts the probes."""
    parser = tuners.add_parser(
        "groups",
        help="look for the number of groups of local SGD",
        usage="tfscale tune groups [options] recipe.py ...",
        description="Runs a training script for some steps with as many ranks as groups, one "
        "number of groups after another, and measures how far the groups' models part. The script "
        "must train with model.fit and a DistributedOptimizer, whose exchange is replaced. Its "
        "batch size and learning rate are those of one group.",
    )
    parser.add_argument("--groups", default="2,4,8", metavar="G,...", help="default: 2,4,8")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="per probe")
    parser.add_argument(
        "--interval", type=int, default=8, metavar="I", help="steps between averages"
    )
    parser.add_argument(
        "--learning-rate", type=float, metavar="R", help="of one group (default: the script's)"
    )
    parser.add_argument(
        "--rate-rule",
        choices=RULES,
        default="linear",
        help="by what the learning rate is multiplied: G, its root, or nothing",
    )
    parser.add_argument("--output", default="groups", metavar="DIR", help="for JSON and PNG")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(handler=_tune)


def _tune(options: argparse.Namespace) -> int:

    numbers = check_groups(read_numbers(options.groups, "--groups"))
    if options.interval < 1 or options.steps < 2 * options.interval:
        raise ConfigError(
            "A probe must hold two averages or more. Received: "
            f"--steps {options.steps} --interval {options.interval}. Use more steps."
        )
    if not Path(options.script).is_file():
        raise ConfigError(f"There must be a training script. Received: {options.script}.")
    probes = []
    for groups in numbers:
        sys.stderr.write(f"Probing {groups} groups ...\n")
        found = _probe(groups, options)
        found["distances"] = tuple(found["distances"])
        probes.append(GroupProbe(**found))
    advice = advise(probes)
    write(probes, advice, options.output)
    sys.stdout.write(as_text(probes, advice))
    sys.stdout.write(f"Results are in {options.output}.\n")
    return 0


def check_groups(numbers: Sequence[int]) -> list[int]:
    """Return the numbers of groups to probe; 1 is left out, it has no distance.

    Raises:
        ConfigError: They do not double from one to the next.
    """
    chosen = [n for n in numbers if n != 1]
    doubled = [2 * n for n in chosen[:-1]]
    if not chosen or chosen[0] < 2 or chosen[1:] != doubled:
        raise ConfigError(
            "Numbers of groups must double from one to the next, from 2 on. Received: "
            f"--groups {','.join(map(str, numbers))}. Example: --groups 2,4,8."
        )
    return chosen


def _probe(groups: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "probe.json"
        settings = {
            "groups": groups,
            "interval": options.interval,
            "steps": options.steps,
            "rate_rule": options.rate_rule,
            "learning_rate": options.learning_rate,
            "output": str(result),
        }
        command = [
            *(sys.executable, "-m", "tfscale.launcher.cli", "run", "-np", str(groups)),
            *(sys.executable, "-m", "tfscale.measure.groups_probe", json.dumps(settings)),
            *(options.script, *options.arguments),
        ]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode or not result.exists():
            raise ConfigError(
                f"The script must train with model.fit for {options.steps} steps. Received: exit "
                f"code {done.returncode} with {groups} ranks. Its output is above."
            )
        return json.loads(result.read_text())
