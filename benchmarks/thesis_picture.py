"""The picture of thesis_scaling.py: simulated curves, printed numbers as crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import thesis_scaling as study
from benchmarks.thesis_strategies import STRATEGIES
from tfscale.plan.choose import choose

_TITLES = {
    "vgg-a": "VGG-A, [T] figure 3.5",
    "vgg16": "VGG-16, [T] figure 4.7",
    "resnet50": "ResNet-50, [T] figure 4.7",
    "resnet20": "ResNet-20 on KNL, [L] figure 5",
    "edsr": "EDSR on KNL, [L] figure 9",
}
_SHOWN = {
    "vgg-a": ("cori-haswell-2017", study.NODES[:8], {"chunked": 62.97, "data parallel": 19.92}),
    "vgg16": ("cori-haswell", study.NODES, {"pcnn": 78.64, "allreduce": 17.47}),
    "resnet50": ("cori-haswell", study.NODES, {"pcnn": 85.45, "allreduce": 49.13}),
}


def draw(path: Path) -> None:
    """Write a PNG.

    Args:
        path: The file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(13, 8))
    axes = panels.flat
    for model, (machine, nodes, printed) in _SHOWN.items():
        _draw_thesis(next(axes), model, machine, nodes, printed)
    for own in study.LOCAL_SGD:
        panel = next(axes)
        for name, curve in study.local_curves(own).items():
            panel.plot(study.PROCESSES, curve, marker="o", markersize=4, label=name)
        _finish(panel, own[0], study.PROCESSES, "processes")
    next(axes).axis("off")
    figure.suptitle("Simulated speedups (lines) and printed ones (crosses)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_thesis(panel: Any, model: str, machine: str, nodes: Any, printed: dict) -> None:
    for name, value in printed.items():
        found = [
            study.speedup(study.scenario_of(model, machine, n), STRATEGIES[name])[0] for n in nodes
        ]
        (line,) = panel.plot(nodes, found, marker="o", markersize=4, label=name)
        panel.plot(nodes[-1], value, "x", color=line.get_color(), markersize=11, mew=2.5)
    auto = [
        study.speedup(study.scenario_of(model, machine, n), lambda s: choose(s).plan)[0]
        for n in nodes
    ]
    panel.plot(nodes, auto, color="0.2", linewidth=2, label="auto")
    _finish(panel, model, nodes, "nodes")


def _finish(panel: Any, model: str, ticks: Any, unit: str) -> None:
    panel.plot(ticks, ticks, "--", color="0.7", label="ideal")
    panel.set(xscale="log", yscale="log", xlabel=unit, ylabel="speedup", title=_TITLES[model])
    panel.set_xticks(ticks, [str(n) for n in ticks], fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
