"""Final theta against final accuracy in all studies that recorded theta ([T] figure 5.2).

    python recipes/theta_and_accuracy.py

[T] 5.1.4: "the higher the theta curve, the lower the validation accuracy". For each study and seed
this takes the rank correlation (Spearman's) of theta and the study's metric, both of the last
epoch, over the configurations. Runs that did not learn (accuracy below 20 %) are left out, and
studies with fewer than three configurations. Rule of decision: a study confirms the claim if all
its seeds have a correlation below 0, contradicts it if all are above, and else leaves it open.

Files: `recipes/results/theta_and_accuracy.md`, `.png` and `.json`.
"""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
LEAST_ACCURACY, LEAST_ROWS = 0.2, 3
Points = dict[int, list[tuple[str, float, float]]]  # by seed: configuration, theta, metric


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def points(study: dict[str, Any]) -> Points:
    """Return what a study's runs ended with, by seed; empty where theta was not recorded."""
    found: Points = {}
    for run in study["runs"]:
        last = run["epochs"][-1]
        theta, metric = last.get("theta"), last[study["metric"]]
        if theta is None or (study["metric"] == "val_accuracy" and metric < LEAST_ACCURACY):
            continue
        words = (word.partition("=") for word in run["command"].split())
        seed = next(int(value) for name, _, value in words if name == "--seed")
        found.setdefault(seed, []).append((run["configuration"], theta, metric))
    return {seed: rows for seed, rows in sorted(found.items()) if len(rows) >= LEAST_ROWS}


def correlations(found: Points) -> dict[int, float]:
    """Return the rank correlation of theta and metric by seed."""
    return {
        seed: statistics.correlation(ranks([t for _, t, _ in rows]), ranks([m for *_, m in rows]))
        for seed, rows in found.items()
    }


def verdict(values: list[float]) -> str:
    """Return what the correlations of a study's seeds say of the claim."""
    if max(values) < 0:
        return "confirms"
    return "contradicts" if min(values) > 0 else "open"


def table(studies: dict[str, Points]) -> str:
    """Return the page in Markdown."""
    lines = [
        "# Final theta and accuracy", "", *(__doc__ or "").split("\n\n")[2].splitlines(), "",
        "![Final theta and accuracy](theta_and_accuracy.png)", "",
        "| study | configurations | rank correlation, by seed | the claim of [T] figure 5.2 |",
        "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, found in studies.items():
        of_seeds = correlations(found)
        rows = max(map(len, found.values()))
        shown = ", ".join(f"{value:.1f}" for value in of_seeds.values())
        lines.append(f"| [{name}]({name}.md) | {rows} | {shown} | {_word(of_seeds)} |")
    words = [_word(correlations(found)) for found in studies.values() if len(found) > 1]
    counts = ", ".join(f"{words.count(w)} {w}" for w in ("confirms", "contradicts", "open"))
    lines += ["", f"Studies with more than one seed: {counts}.", ""]
    return "\n".join([*lines, "Made by `python recipes/theta_and_accuracy.py`.", ""])


def _word(of_seeds: dict[int, float]) -> str:
    """Return the verdict of a study; one seed proves nothing."""
    found = verdict(list(of_seeds.values()))
    if len(of_seeds) > 1:
        return found
    return f"{'agrees' if found == 'confirms' else 'disagrees'}, one seed"


def draw(studies: dict[str, Points], path: Path) -> None:
    """Draw the metric over theta, a panel per study and a colour per seed."""
    columns = 3
    rows = math.ceil(len(studies) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels[len(studies) :]:
        axes.set_visible(False)
    for axes, (name, found) in zip(panels, studies.items(), strict=False):
        of_seeds = correlations(found)
        for number, (seed, ended) in enumerate(found.items()):
            label = f"seed {seed}: {of_seeds[seed]:.1f}"
            ordered = sorted((theta, metric) for _, theta, metric in ended)
            axes.plot(*zip(*ordered, strict=True), "o-", lw=0.8, color=f"C{number}", label=label)
        axes.set_title(name, fontsize=10)
        axes.set(xlabel="theta at the end", ylabel="metric at the end")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, title="rank correlation", title_fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write the three files."""
    studies = {}
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        found = points(content) if "runs" in content and "metric" in content else {}
        if found:
            studies[path.stem] = found
    where = RESULTS / "theta_and_accuracy"
    where.with_suffix(".md").write_text(table(studies), encoding="utf-8")
    content = {name: correlations(found) for name, found in studies.items()}
    where.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(studies, where.with_suffix(".png"))
    print(where.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
