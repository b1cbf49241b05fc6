r"""Whole runs to an accuracy in wall clock: the small VGG under Horovod and "auto".

    python -m benchmarks step --places 1gbit --rounds 2 --models vgg_small_128 vgg_small_256 \
        vgg_small_512 --systems horovod tfscale-auto --exchanges auto --output build/whole.json
    sudo .venv/bin/python recipes/whole_runs.py build/whole.json

Each run trains by `recipes/vgg.py` on four hosts of an emulated cluster (docs/cluster.md) until
`--target`, with the flags of the study `vgg_to_92`, one after another. The seconds of training
stand beside the product of its steps and of the step that `python -m benchmarks step` measured,
which has no input, no dropout and no metrics. Results go to `recipes/results/whole_runs.md`,
`.json` and `.png`; runs that are there, in `runs/whole/`, are not run again.
"""

import json
import runpy
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import app, flags
from matplotlib.figure import Figure

import study_metadata
from command_line import flags_parser
from tfscale.files import read_json_lines
from tfscale.measure import provenance

FLAGS = flags.FLAGS
flags.DEFINE_float("target", 0.9, "Validation accuracy to reach.")
flags.DEFINE_string("rate", "1gbit", "Of the links.")
flags.DEFINE_list("seeds", ["1"], "One run of each row for each.")
flags.DEFINE_string("runs", "runs/whole", "Folder of the runs.")
flags.DEFINE_string("output", "", "Path of the files to write, without suffix; empty: results/.")

_HERE = Path(__file__).parent
_STUDY = runpy.run_path(str(_HERE / "studies" / "vgg_to_92.py"))
_IMAGES, _RANKS, _MOST_EPOCHS = 60000, 4, 11  # of it; the rate has not decayed by then
_GROWING = {"exchange": "auto", "adaptive_batch": 512, "warmup_epochs": 0}
# Name: the system whose steps are measured, flags beside those of the study.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Horovod": ("horovod", {"exchange": "horovod"}),
    "auto": ("tfscale-auto", {"exchange": "auto"}),
    "auto, batch doubled every 2 epochs": ("tfscale-auto", {**_GROWING, "adaptive_interval": 2}),
    "auto, batch grown by theta": ("tfscale-auto", _GROWING),
}


def command(row: str, seed: str, folder: Path) -> list[str]:
    """The command of one run."""
    where = [f"--run_dir={folder.parent}", f"--run_name={folder.name}"]
    recipe = [sys.executable, str(_HERE / "vgg.py"), *_flags(row, seed), *where]
    place = ["-np", str(_RANKS), "--rate", FLAGS.rate]
    return [sys.executable, "-m", "tools.cluster", "run", *place, "--", *recipe]


def _flags(row: str, seed: str) -> list[str]:
    given = {**_STUDY["FLAGS"], "batch_size": 128, **ROWS[row][1], "epochs": _MOST_EPOCHS}
    given |= {"seed": seed, "stop_at": FLAGS.target}
    given.pop("interval")  # of local SGD
    return [f"--{name}={value}" for name, value in given.items()]


def key_of(row: str, seed: str) -> str:
    """The links and flags of a run, by which it is known wherever it was made."""
    return " ".join([FLAGS.rate, *_flags(row, seed)])


def seconds_to_target(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """The epochs until the target is reached, and their seconds of training together.

    Raises:
        SystemExit: The run has not reached it.
    """
    epochs = read_json_lines(folder / "metrics.jsonl")
    if not _has_reached(folder):
        sys.exit(f"{folder} must reach --target. Received: {epochs[-1:]}. Train for more epochs.")
    return epochs, sum(epoch["train_seconds"] for epoch in epochs)


def _has_reached(folder: Path) -> bool:
    epochs = read_json_lines(folder / "metrics.jsonl")
    return bool(epochs) and epochs[-1]["val_accuracy"] >= FLAGS.target


def _measured_steps(
    row: str, epochs: list[dict[str, Any]], benchmarks: list[dict[str, Any]]
) -> dict[int, float]:
    """The median seconds of a step with each batch of a run."""
    found = {}
    for batch in sorted({int(epoch["batch_size"]) for epoch in epochs}):
        case, system = f"vgg_small_{batch}", ROWS[row][0]
        samples = [
            seconds
            for run in benchmarks
            if (run["group"], run["system"]) == (f"{case} {FLAGS.rate}", system)
            for seconds in run["samples"][case]
        ]
        if not samples:
            sys.exit(
                f"The results of benchmarks must have the steps of {case} with {system} at "
                f"{FLAGS.rate}. Received: none. See --help for how to measure them."
            )
        found[batch] = statistics.median(samples)
    return found


def _draw(runs: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(ROWS):
        for run in (run for run in runs if run["row"] == row):
            ends, total = [], 0.0
            for epoch in run["epochs"]:
                total += epoch["train_seconds"] / 60
                ends.append(total)
            values = [100 * epoch["val_accuracy"] for epoch in run["epochs"]]
            label = row if run["seed"] == FLAGS.seeds[0] else None
            axes.plot(ends, values, "o-", ms=3, lw=1.3, color=f"C{number}", label=label)
    axes.axhline(100 * FLAGS.target, color="0.5", lw=0.8)
    axes.set(xlabel="Minutes of training", ylabel="Validation accuracy, %", ylim=(80, None))
    axes.set_xlim(0, None)
    axes.set_title(
        f"A small VGG on all of Fashion-MNIST, 4 hosts, {FLAGS.rate}: whole runs", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


def _table(runs: list[dict[str, Any]]) -> list[str]:
    head = ["trained as", "seeds", "epochs", "steps", "minutes of training", "with validation"]
    head += ["product of steps and epochs", "run / product"]
    lines = [head, ["---"] * len(head)]
    for row in ROWS:
        own = [run for run in runs if run["row"] == row]
        mean = {key: statistics.mean(run[key] for run in own) for key in own[0] if key[0] == "n"}
        ratio = mean["n_train_s"] / mean["n_product_s"]
        cells = [row, str(len(own)), ", ".join(str(len(run["epochs"])) for run in own)]
        cells += [f"{mean['n_steps']:.0f}", f"{mean['n_train_s'] / 60:.2f}"]
        cells += [f"{mean['n_seconds'] / 60:.2f}"]
        cells += [f"{mean['n_product_s'] / 60:.2f}", f"{ratio:.2f}"]
        lines.append(cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def main(arguments: list[str]) -> None:
    """Run what is missing, and write the table."""
    if len(arguments) != 2:
        sys.exit(f"The results of benchmarks must be given. Received: {arguments[1:]}. See --help.")
    benchmarks = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    runs: list[dict[str, Any]] = []
    for seed in FLAGS.seeds:
        for row in ROWS:
            name = row.replace(", ", "-").replace(" ", "-")
            folder = Path(FLAGS.runs).resolve() / f"{name}-seed{seed}"
            words, key = command(row, seed, folder), key_of(row, seed)
            if study_metadata.read(folder).get("key") != key or not _has_reached(folder):
                folder.mkdir(parents=True, exist_ok=True)
                study_metadata.write(folder, key, provenance.describe())
                print(f"{row}, seed {seed}", flush=True)
                subprocess.run(words, check=True, cwd=_HERE.parent)
            epochs, train_s = seconds_to_target(folder)
            step_s = _measured_steps(row, epochs, benchmarks["runs"])
            batches = [int(epoch["batch_size"]) for epoch in epochs]
            numbers: dict[str, Any] = {"n_steps": sum(_IMAGES // batch for batch in batches)}
            numbers |= {"n_train_s": train_s, "n_seconds": epochs[-1]["seconds"]}
            numbers["n_product_s"] = sum(_IMAGES // batch * step_s[batch] for batch in batches)
            numbers["measured_step_s"] = step_s
            by = {k: v for k, v in study_metadata.read(folder).items() if k != "key"}
            runs.append({"row": row, "seed": seed, **by, **numbers, "epochs": epochs})
    where = Path(FLAGS.output or _HERE / "results" / "whole_runs")
    title = f"Whole runs to {100 * FLAGS.target:g} %: a small VGG, all of Fashion-MNIST"
    text = [f"# {title}", "", f"![{title}]({where.name}.png)", "", *_table(runs), ""]
    text += [f"Four emulated hosts with links of {FLAGS.rate} that share two cores."]
    text += ["The product is of the run's steps and a step without input, dropout and metrics.", ""]
    text += ["Made by `python recipes/whole_runs.py` (its first lines say how)", ""]
    text += [f"* Commit: {', '.join(sorted({run['commit'] for run in runs}))}"]
    text += [f"* Machine: {', '.join(sorted({run['machine'] for run in runs}))}"]
    text += [f"* Versions: {'; '.join(sorted({run['versions'] for run in runs}))}"]
    where.with_suffix(".md").write_text("\n".join(text) + "\n", encoding="utf-8")
    content = {"target": FLAGS.target, "rate": FLAGS.rate, "runs": runs}
    where.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _draw(runs, where.with_suffix(".png"))
    print("\n".join(text))


if __name__ == "__main__":
    app.run(main, flags_parser=flags_parser())
