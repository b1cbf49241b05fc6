"""The command `tfscale tune batch-size`: advice, table and picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from tfscale.measure.batch_size import Stage
from tfscale.measure.forecast import read_numbers
from tfscale.measure.pictures import has_matplotlib

CLOSENESS = 0.7  # of the smallest size's norm, half of its square: "similar" in [T] 5.1.4
DESCENT_SHARE = 0.5  # "most of the iterations"


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
        start_batch_size: For `AdaptiveBatchSize(start_batch_size=)`, or a fixed batch.
        max_batch_size: For `AdaptiveBatchSize(max_batch_size=)`.
        reasons: One for each.
    """

    start_batch_size: int
    max_batch_size: int
    reasons: tuple[str, str]


def advise(stages: Sequence[Stage]) -> Advice:
    """Recommend batch sizes.

    The start is the largest measured size whose mean ||g_B|| is at least 70 % of the smallest
    size's at every stage: measure from a batch that is known to train well. The descent condition
    ||g_B - g|| < ||g_B|| only gets easier for larger batches, so it cannot set a maximum, but a
    start that fails it in most batches is raised to the smallest size that does not. The maximum
    is the largest measured size up to the noise scale of the last stage: beyond it a batch mostly
    repeats what it knows.

    Args:
        stages: As measured, with the same sizes; at least one.

    Returns:
        Measured sizes, the maximum not below the start.

    Source: [T] 5.1.4; McCandlish et al. (2018) for the maximum.
    """
    sizes = [size.batch_size for size in stages[0].sizes]

    def is_close(index: int) -> bool:
        return all(s.sizes[index].mean_norm >= CLOSENESS * s.sizes[0].mean_norm for s in stages)

    def descends(index: int) -> bool:
        return all(s.sizes[index].descent_share >= DESCENT_SHARE for s in stages)

    last_close = 0
    while last_close + 1 < len(sizes) and is_close(last_close + 1):
        last_close += 1
    start = next((i for i in range(last_close, len(sizes)) if descends(i)), len(sizes) - 1)
    norms = ", ".join(f"{s.sizes[start].mean_norm / s.sizes[0].mean_norm:.0%}" for s in stages)
    why = f"the gradient's norm is {norms} of that of a batch of {sizes[0]} (stage by stage)"
    if start > last_close:
        why = (
            f"the norm alone would allow {sizes[last_close]}, but below {sizes[start]} most "
            "gradients are no direction of descent"
        )
    if not descends(start):
        why += "; even so, most gradients are no direction of descent: measure larger sizes"
    noise = stages[-1].noise_scale
    below = [i for i, size in enumerate(sizes) if size <= noise]
    maximum = max([start, *below])
    text = f"the gradient noise scale after {stages[-1].epoch} epochs is {noise:.4g} samples"
    if maximum == len(sizes) - 1 and noise > sizes[-1]:
        text += ", above all sizes measured"
    elif maximum == start:
        text += ", so that little is gained above the start"
    return Advice(sizes[start], sizes[maximum], (why, text))


def as_text(stages: Sequence[Stage], advice: Advice) -> str:
    """Return tables of all stages and the recommendation, in Markdown."""
    lines = []
    for stage in stages:
        lines += [
            f"After {stage.epoch} epochs: ||g|| = {stage.full_norm:.4g}, noise scale "
            f"{stage.noise_scale:.4g} samples.",
            "",
            "| batch | batches | mean norm | mean distance from g | descent |",
            "| ---: | ---: | ---: | ---: | ---: |",
        ]
        lines += [
            f"| {s.batch_size} | {s.batches} | {s.mean_norm:.4g} | {s.mean_distance:.4g} "
            f"| {s.descent_share:.0%} |"
            for s in stage.sizes
        ]
        lines.append("")
    lines.append(f"Start with {advice.start_batch_size}: {advice.reasons[0]}.")
    lines.append(f"Grow up to {advice.max_batch_size}: {advice.reasons[1]}.")
    return "\n".join(lines) + "\n"


def write(stages: Sequence[Stage], advice: Advice, folder: str | Path) -> None:
    """Write `batch_size.json` into a folder, and `batch_size.png` where matplotlib is there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "stages": [dataclasses.asdict(stage) for stage in stages],
        "advice": dataclasses.asdict(advice),
    }
    path = Path(folder) / "batch_size.json"
    text = json.dumps(keras.tree.map_structure(_finite, content), indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    if has_matplotlib():
        _draw(stages, advice, Path(folder) / "batch_size.png")


def _finite(value: Any) -> Any:
    """Return None in place of what JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _draw(stages: Sequence[Stage], advice: Advice, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    norms, shares = figure.subplots(1, 2)
    for stage in stages:
        sizes = [s.batch_size for s in stage.sizes]
        label = f"after {stage.epoch} epochs (noise scale {stage.noise_scale:.3g})"
        norms.plot(sizes, [s.mean_norm for s in stage.sizes], "o-", ms=4, label=label)
        shares.plot(sizes, [s.descent_share for s in stage.sizes], "o-", ms=4)
    norms.set_ylabel("Mean norm of the gradient")
    norms.set_ylim(bottom=0.0)
    norms.legend(fontsize=8)
    shares.set_ylabel("Share of batches that descend")
    shares.set_ylim(-0.03, 1.03)
    for axes in (norms, shares):
        axes.set_xscale("log")
        sizes = [s.batch_size for s in stages[0].sizes]
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("Batch size")
        axes.grid(alpha=0.3)
        for size in {advice.start_batch_size, advice.max_batch_size}:
            axes.axvline(size, color="0.6", ls=":")
    figure.savefig(path, dpi=120)


SIZES = "16,32,64,128,256,512,1024"


def add_batch_size(tuners: argparse._SubParsersAction) -> None:
    """Add the parser; its handler imports TensorFlow."""
    parser = tuners.add_parser(
        "batch-size",
        help="look for the batch size to start with and to end with",
        usage="tfscale tune batch-size [options] recipe.py ...",
        description="Runs a training script in one process, and measures at some epochs how the "
        "gradient depends on the batch size. The script must train with model.fit on "
        "tfscale.data.GlobalBatches or on arrays. It is stopped after the last measurement.",
    )
    parser.add_argument("--sizes", default=SIZES, metavar="B,...", help=f"default: {SIZES}")
    parser.add_argument("--samples", type=int, default=4096, metavar="N", help="per size and stage")
    parser.add_argument("--stages", default="0,1,3", metavar="E,...", help="epochs trained before")
    parser.add_argument("--output", default="batch_size", metavar="DIR", help="for JSON and PNG")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(handler=_tune)


def _tune(options: argparse.Namespace) -> int:
    from tfscale.measure.script import probe_script

    stages = probe_script(
        [options.script, *options.arguments],
        batch_sizes=read_numbers(options.sizes, "--sizes"),
        at_epochs=read_numbers(options.stages, "--stages", least=0),
        samples=options.samples,
    )
    advice = advise(stages)
    write(stages, advice, options.output)
    sys.stdout.write(as_text(stages, advice))
    sys.stdout.write(f"Results are in {options.output}.\n")
    return 0
