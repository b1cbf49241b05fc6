"""Minutes until an accuracy: the epochs of a study times the steps that were measured on a link.

    python recipes/time_to_accuracy.py recipes/results/adaptive_batch.json \
        recipes/results/time_to_accuracy_steps.json --pairs "small batch=horovod,tfscale-auto" \
        --cases 64=resnet8_64 --targets 0.90,0.91 --output build/time_to_accuracy

Exchanges that compute the same follow one trajectory, so a study trains once per algorithm and
seed. `--pairs` names a configuration of the study and the systems of `python -m benchmarks step`
whose steps it takes; `--cases` names the measured model of each batch. A batch between two measured
ones takes what lies on the line between them; one outside of them is an error.

An accuracy counts as reached at the end of the first epoch that has it, so times have the
resolution of an epoch. Validation and start are in none of them. `OUTPUT`.md, .json and .png are
written.
"""

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from absl import app, flags
from matplotlib.figure import Figure

from command_line import flags_parser

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("pairs", [], "Configuration=system,system; may be repeated.")
flags.DEFINE_list("cases", [], "Measured models by batch, as in 64=resnet8_64,512=resnet8_512.")
flags.DEFINE_list("places", ["1gbit"], "Places of the ranks, as the benchmarks call them.")
flags.DEFINE_list("targets", ["0.90", "0.92"], "Values of the study's metric to reach.")
flags.DEFINE_integer("samples", 60000, "Of an epoch, where the study's command has no --images.")
flags.DEFINE_string("title", "Minutes to equal accuracy", "Heading.")
flags.DEFINE_string("note", "", "A sentence to put under the table: what else to know.")
flags.DEFINE_string("output", "", "Path of the files to write, without suffix.")


@dataclass(frozen=True)
class Epoch:
    """One epoch of a run: its updates, their batch, and the study's metric at its end."""

    steps: int
    batch: int
    value: float


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, by batch, and the number of steps whose median each is."""

    seconds: Mapping[int, float]
    n_steps: Mapping[int, int]


@dataclass(frozen=True)
class Row:
    """One configuration with the steps of one system at one place.

    Attributes:
        configuration: Of the study.
        system: Of the benchmarks.
        place: Of the benchmarks.
        step_ms: Median milliseconds of a step, by batch.
        n_steps: The fewest steps that such a median was taken over.
        minutes: Per target one value per seed, None where a seed does not reach it.
    """

    configuration: str
    system: str
    place: str
    step_ms: dict[int, float]
    n_steps: int
    minutes: dict[str, list[float | None]]


def trajectories(results: Mapping[str, Any], configuration: str, samples: int) -> list[list[Epoch]]:
    """Return the epochs of each run of a configuration.

    Args:
        results: As `study.py` writes them.
        configuration: Its name.
        samples: Of an epoch, where the command of a run has no `--images`.

    Raises:
        SystemExit: The results have no such configuration.
    """
    found = []
    for run in results["runs"]:
        if run["configuration"] == configuration:
            images = re.search(r"--images=(\d+)", run["command"])
            n = int(images[1]) if images and int(images[1]) else samples
            found.append([_epoch(line, n, results["metric"]) for line in run["epochs"]])
    if not found:
        names = ", ".join(dict.fromkeys(run["configuration"] for run in results["runs"]))
        sys.exit(
            "--pairs must name a configuration of the study. "
            f"Received: {configuration}. Choose from: {names}."
        )
    return found


def _epoch(line: Mapping[str, float], samples: int, metric: str) -> Epoch:
    batch = int(line["batch_size"])
    return Epoch(samples // batch, batch, line[metric])


def measured(
    runs: Sequence[Mapping[str, Any]], system: str, place: str, cases: Mapping[int, str]
) -> Measured:
    """Return the medians over all measured steps of a system at a place.

    Args:
        runs: Of the benchmarks' JSON.
        system: Such as "horovod".
        place: Such as "1gbit".
        cases: The measured model of each batch.

    Raises:
        SystemExit: One of them was not measured.
    """
    samples: dict[int, list[float]] = {batch: [] for batch in cases}
    n_steps = dict.fromkeys(cases, 0)
    for batch, case in cases.items():
        for run in runs:
            if (run["suite"], run["group"], run["system"]) == ("step", f"{case} {place}", system):
                values = run.get("samples", {}).get(case, ())
                samples[batch] += values
                n_steps[batch] += len(values) * _block(run["arguments"])
    missing = [cases[batch] for batch, values in samples.items() if not values]
    if missing:
        sys.exit(
            "Each case of --cases must have been measured with each system of --pairs. Received: "
            f"no steps of {', '.join(missing)} with {system} at {place}. Measure them: "
            f"python -m benchmarks step --places {place}."
        )
    return Measured(
        {batch: statistics.median(values) for batch, values in samples.items()},
        n_steps,
    )


def _block(arguments: Sequence[str]) -> int:
    """Return the steps whose mean is one sample: whole intervals of local SGD."""
    return int(arguments[arguments.index("--block") + 1]) if "--block" in arguments else 1


def step_seconds(batch: int, of: Measured) -> float:
    """Return the seconds of a step with this batch: measured, or on the line between two that are.

    Raises:
        SystemExit: The batch is outside of those measured.
    """
    if batch in of.seconds:
        return of.seconds[batch]
    low = max((size for size in of.seconds if size < batch), default=None)
    high = min((size for size in of.seconds if size > batch), default=None)
    if low is None or high is None:
        sys.exit(
            "Steps must have been measured with the smallest and the largest batch of the study. "
            f"Received: {batch}, measured: {sorted(of.seconds)}. Add it to --cases."
        )
    share = (batch - low) / (high - low)
    return (1 - share) * of.seconds[low] + share * of.seconds[high]


def minutes_after(epochs: Sequence[Epoch], of: Measured) -> list[float]:
    """Return the minutes of training at the end of each epoch."""
    total, found = 0.0, []
    for epoch in epochs:
        total += epoch.steps * step_seconds(epoch.batch, of) / 60
        found.append(total)
    return found


def minutes_to(target: float, epochs: Sequence[Epoch], of: Measured) -> float | None:
    """Return the minutes until the end of the first epoch that reaches a value; None if none."""
    ends = zip(epochs, minutes_after(epochs, of), strict=True)
    return next((minutes for epoch, minutes in ends if epoch.value >= target), None)


def shown(minutes: Sequence[float | None]) -> str:
    """Return mean and standard error over seeds, or how many of the seeds reach the target."""
    known = [value for value in minutes if value is not None]
    if len(known) < len(minutes):
        return f"reached by {len(known)} of {len(minutes)}"
    if len(known) == 1:
        return f"{known[0]:.3g}"
    return f"{statistics.mean(known):.3g} ± {statistics.stdev(known) / len(known) ** 0.5:.2g}"


def table(rows: Sequence[Row], targets: Sequence[str], metric: str) -> list[str]:
    """Return the lines of a table in Markdown: one row per place, configuration and system."""
    head = ["ranks at", "trained as", "steps of", "ms per step (batch)", "steps measured"]
    head += [f"minutes to {metric} {target}" for target in targets]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        steps = ", ".join(f"{ms:.3g} ({batch})" for batch, ms in sorted(row.step_ms.items()))
        cells = [row.place, row.configuration, row.system, steps, str(row.n_steps)]
        lines.append([*cells, *(shown(row.minutes[target]) for target in targets)])
    return [f"| {' | '.join(line)} |" for line in lines]


def _rows(results: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> list[Row]:
    cases = {int(batch): case for batch, _, case in (c.partition("=") for c in FLAGS.cases)}
    rows = []
    for place in FLAGS.places:
        for pair in FLAGS.pairs:
            configuration, _, systems = pair.rpartition("=")
            runs = trajectories(results, configuration, FLAGS.samples)
            used = {epoch.batch for run in runs for epoch in run}
            own = {b: c for b, c in cases.items() if b in used or not used <= {*cases}}
            for system in systems.split(","):
                steps = measured(benchmarks["runs"], system, place, own)
                minutes = {
                    target: [minutes_to(float(target), run, steps) for run in runs]
                    for target in FLAGS.targets
                }
                step_ms = {batch: 1e3 * value for batch, value in steps.seconds.items()}
                fewest = min(steps.n_steps.values())
                rows.append(Row(configuration, system, place, step_ms, fewest, minutes))
    return rows


def _draw(
    rows: Sequence[Row], results: Mapping[str, Any], title: str, made: Sequence[str], path: Path
) -> None:
    """Draw the metric over minutes: a panel per place, the mean over seeds and their band."""
    places = list(dict.fromkeys(row.place for row in rows))
    columns = min(len(places), 2)
    n_lines = -(-len(places) // columns)
    figure = Figure(figsize=(6.0 * columns, 4.6 * n_lines + 0.8), layout="constrained")
    every: list[Any] = [*figure.subplots(n_lines, columns, squeeze=False, sharey=True).ravel()]
    names = list(dict.fromkeys(row.configuration for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    targets, top, n_seeds = [float(target) for target in FLAGS.targets], 0.0, 0
    for axes, place in zip(every, places, strict=False):  # the last one of an odd number is empty
        for row in (row for row in rows if row.place == place):
            runs = trajectories(results, row.configuration, FLAGS.samples)
            steps = Measured({b: ms / 1e3 for b, ms in row.step_ms.items()}, {})
            n_epochs = min(map(len, runs))  # of all seeds
            ends = [minutes_after(run, steps)[:n_epochs] for run in runs]
            values = [[epoch.value for epoch in run[:n_epochs]] for run in runs]
            at = [statistics.mean(of) for of in zip(*ends, strict=True)]
            low, mean, high = (
                [pick(of) for of in zip(*values, strict=True)]
                for pick in (min, statistics.mean, max)
            )
            colour, dashes = (
                f"C{names.index(row.configuration)}",
                "-:"[systems.index(row.system) % 2],
            )
            label = f"{row.configuration}: {row.system}"
            axes.plot(at, mean, dashes, color=colour, lw=1.5, label=label)
            axes.fill_between(at, low, high, color=colour, alpha=0.1)
            n_seeds, top = len(runs), max(top, *high)
        for target in targets:
            axes.axhline(target, color="0.5", lw=0.8)
        axes.set(title=place, xlabel="Minutes of training", xlim=(0, None))
        axes.set_ylim(min(targets) - 0.05, max(top, *targets) + 0.005)
        axes.grid(alpha=0.3)
    every[0].set_ylabel(results["metric"])
    lines = every[0].get_legend_handles_labels()
    figure.legend(*lines, fontsize=8, ncols=2, loc="outside lower center", frameon=False)
    notes = "\n".join(line.strip("* ").replace("`", "") for line in made)
    figure.suptitle(
        f"{title}\n({n_seeds} seeds; bands from the lowest to the highest)\n{notes}", fontsize=10
    )
    figure.savefig(path, dpi=110)


def _made(results: Mapping[str, Any], benchmarks: Mapping[str, Any], rows: Sequence[Row]) -> list:
    """Return what made the numbers: the study, the measured sessions."""
    groups = {f"{case.partition('=')[2]} {row.place}" for case in FLAGS.cases for row in rows}
    systems = {row.system for row in rows}
    runs = [r for r in benchmarks["runs"] if r["group"] in groups and r["system"] in systems]
    sessions = [benchmarks["sessions"][name] for name in {run["session"] for run in runs}]
    machines = {f"{s['machine']['n_cores']} cores ({s['machine']['cpu']})" for s in sessions}
    names = {row.configuration for row in rows}
    commits = {run["commit"] for run in results["runs"] if run["configuration"] in names}
    n_ranks = {run["n_ranks"] for run in runs}
    return [
        f"* Accuracies: `python recipes/study.py {results['study']}`, commit "
        f"{', '.join(sorted(commits))}",
        f"* Steps: commit {', '.join(sorted({run['commit'][:7] for run in runs}))}, "
        f"{', '.join(map(str, sorted(n_ranks)))} ranks, {'; '.join(sorted(machines))}",
    ]


def main(arguments: list[str]) -> None:
    """Join both, and write the table."""
    if len(arguments) != 3 or not (FLAGS.pairs and FLAGS.cases and FLAGS.output):
        sys.exit(
            "A study's results, the benchmarks' results, --pairs, --cases and --output must be "
            f"given. Received: {arguments[1:]}. See --help."
        )
    results, benchmarks = (
        json.loads(Path(path).read_text(encoding="utf-8")) for path in arguments[1:]
    )
    rows, where = _rows(results, benchmarks), Path(FLAGS.output)
    text = [f"# {FLAGS.title}", "", f"![{FLAGS.title}]({where.name}.png)", ""]
    text += [*table(rows, FLAGS.targets, results["metric"]), ""]
    text += [
        "Means over seeds and their standard errors. Rows that are “trained as” the same share"
    ]
    text += ["their trajectories, so that their times differ as their steps do.", ""]
    text += [FLAGS.note, ""] if FLAGS.note else []
    made = _made(results, benchmarks, rows)
    text += ["Made by `recipes/time_to_accuracy.py` from:", "", *made]
    where.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    content = {"study": results["study"], "metric": results["metric"], "note": FLAGS.note}
    content |= {"arguments": sys.argv[1:], "rows": [asdict(row) for row in rows]}
    where.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _draw(rows, results, FLAGS.title, made, where.with_suffix(".png"))
    print("\n".join(text))


if __name__ == "__main__":
    app.run(main, flags_parser=flags_parser())
