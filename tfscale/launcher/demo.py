"""The command `tfscale demo`: the same training on one process and on several ranks, as a chart.

The command starts one job, whose ranks run `python -m tfscale.launcher.demo`. First rank 0 trains
alone, for half of the time. Then all ranks train the same model for as many steps, on the same
batches. A rank has the same number of CPUs in both, so the chart shows what more CPUs give, as on
more machines, and the losses show that the result is the same.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tfscale.comm.process import discover
from tfscale.config import ConfigError, environment, require, variable_name
from tfscale.files import read_json, write_atomically
from tfscale.launcher.restarting import TERMINAL_VARIABLE
from tfscale.native.cores import count_cores

_BATCH, _SAMPLES, _INPUTS, _CLASSES, _UNITS = 1024, 65536, 64, 10, 512
_LEAST_S, _MOST_S = 4.0, 600.0
# Less is the noise of a short measurement.
_FASTER = 1.05
# Of losses near 1 in float32, which each step amplifies.
_ROUNDING = 0.01
_NEXT_STEPS = """
Next steps:
  tfscale run --distribute -np 2 python train.py   # your Keras script, unchanged
  tfscale convert train.py                         # the lines to change, to read only a rank's data
  tfscale plan --model resnet50 --ranks 2,4,8,16   # times predicted for more machines
"""


class Curve(NamedTuple):
    """The losses of a training by time.

    Attributes:
        mark: The character of its points in a chart.
        label: What trained.
        seconds: Ends of the steps since that of the first one, which traces; ascending.
        losses: Mean losses of the steps' batches.
    """

    mark: str
    label: str
    seconds: Sequence[float]
    losses: Sequence[float]


# The command.


def add_demo(commands: argparse._SubParsersAction) -> None:
    """Add the parser of `tfscale demo`."""
    what = "train for half a minute on one process and on two ranks, and compare"
    demo = commands.add_parser("demo", help=what, description=f"{what.capitalize()}.")
    demo.add_argument("-np", "-n", type=int, default=2, dest="size", metavar="N", help="ranks (2)")
    seconds = f"of training, {_LEAST_S:g} to {_MOST_S:g} (30); starting comes on top"
    demo.add_argument("--seconds", type=float, default=30.0, metavar="S", help=seconds)
    demo.add_argument("--svg", metavar="FILE", help="also draw the chart into a file")
    demo.set_defaults(handler=_demo)


def _demo(options: argparse.Namespace) -> int:
    require(options.size >= 2, "-np", "2 or more", options.size)
    allowed = f"in [{_LEAST_S:g}, {_MOST_S:g}]"
    require(_LEAST_S <= options.seconds <= _MOST_S, "--seconds", allowed, options.seconds)
    if options.svg and not os.access(Path(options.svg).absolute().parent, os.W_OK):
        raise ConfigError(
            f"--svg must name a file in a folder that can be written. Received: {options.svg}. "
            "Choose another folder."
        )
    n_cores, load = count_shared_cores(), os.getloadavg()[0]
    sys.stdout.write(describe_start(options.size, n_cores, load))
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "curves.json"
        settings = json.dumps({"seconds": options.seconds / 2, "output": str(result)})
        # The other ranks wait while rank 0 trains alone.
        patience = f"{variable_name('stall_warning_s')}={options.seconds + 60:g}"
        job = ["run", "-np", str(options.size), "--env", patience]
        code = int(options.run_command([*job, "--", sys.executable, "-m", __name__, settings]))
        record = read_json(result)
    if code or not record:
        if code != 128 + signal.SIGINT:
            text = "tfscale: the demo could not train. `tfscale doctor` says what to do.\n"
            sys.stderr.write(text)
        return code or 1
    alone, together = curves = [Curve(**curve) for curve in record["curves"]]
    sys.stdout.write(
        f"\n{draw(curves)}\n{describe_end(alone, together, options.size, n_cores, load)}"
    )
    if options.svg:
        write_atomically(options.svg, draw_svg(curves))
        sys.stdout.write(f"The chart is in {options.svg}.\n")
    sys.stdout.write(_NEXT_STEPS)
    return 0


def describe_start(size: int, n_cores: int, load: float) -> str:
    """Return the lines before the training; `load` is the mean number of processes that compute."""
    text = (
        "The same model trains on one process, then on "
        f"{size} ranks, which share each batch. The data are made by the program.\n"
    )
    if n_cores < size:
        text += (
            f"This machine has {n_cores} core{'s' if n_cores > 1 else ''} for {size} ranks: they "
            "will not be faster. On two machines: tfscale run -H host1,host2 ...\n"
        )
    elif load > n_cores / 2:
        text += f"The machine is busy (load {load:.1f}, {n_cores} cores): times are uncertain.\n"
    return text


def describe_end(alone: Curve, together: Curve, size: int, n_cores: int, load: float) -> str:
    """Return the lines after the chart: what the ranks gained, and whether the losses are equal."""
    times = alone.seconds[-1], together.seconds[-1]
    factor = times[0] / times[1]
    gain = f"{factor:.2f} times as fast"
    if factor < _FASTER:
        gain = f"{1 / factor:.2f} times as slow" if factor < 1 / _FASTER else "about as fast"
    difference = max(abs(a - b) for a, b in zip(alone.losses, together.losses, strict=True))
    meaning = ": the same training, up to rounding" if difference < _ROUNDING else ""
    text = (
        f"The same {len(alone.seconds)} steps took {times[0]:.1f} s on {alone.label}, and "
        f"{times[1]:.1f} s on {together.label}: {gain}.\n"
        f"Their losses differ by at most {difference:.1g}{meaning}.\n"
    )
    if factor >= _FASTER and n_cores < size:
        return (
            f"{text}Do not count on that: the ranks share cores, and more processes only get more "
            "of the time of a busy machine.\n"
        )
    if factor >= _FASTER:
        return (
            f"{text}One process alone could use all CPUs of this machine: ranks pay where they "
            "bring CPUs of their own.\n"
        )
    reason = "they wait for each other's messages longer than they save"
    if n_cores < size:
        reason = "they share cores"
    elif load > n_cores / 2:
        reason = f"other programs use the cores (load {load:.1f})"
    return f"{text}The ranks were not faster: {reason}.\n"


# The chart.


def smooth(losses: Sequence[float], n_sides: int) -> list[float]:
    """Return means over a step and up to `n_sides` steps before and after it."""
    windows = (losses[max(0, i - n_sides) : i + n_sides + 1] for i in range(len(losses)))
    return [sum(window) / len(window) for window in windows]


def _smoothed(curves: Sequence[Curve]) -> list[Curve]:
    return [
        curve._replace(losses=smooth(curve.losses, len(curve.losses) // 40)) for curve in curves
    ]


def draw(curves: Sequence[Curve], width: int = 64, height: int = 14) -> str:
    """Return losses by time as text; later curves cover earlier ones.

    Args:
        curves: Trainings, each with a step or more.
        width: Columns of the area, 2 or more.
        height: Its lines, 2 or more.
    """
    shown = _smoothed(curves)
    values = [loss for curve in shown for loss in curve.losses]
    top, bottom, end = max(values), min(values), max(curve.seconds[-1] for curve in shown)
    area = [[" "] * width for _ in range(height)]
    for curve in shown:
        for column in range(width):
            second = end * column / (width - 1)
            if second <= curve.seconds[-1]:
                part = (top - _value_at(curve, second)) / ((top - bottom) or 1.0)
                area[round(part * (height - 1))][column] = curve.mark
    labels = [f"{top:.2f}", *[""] * (height - 2), f"{bottom:.2f}"]
    lines = [f"{label:>6} |{''.join(row)}" for label, row in zip(labels, area, strict=True)]
    last = f"{end:.1f} s"
    names = ", ".join(f"{curve.mark}: {curve.label}" for curve in shown)
    lines = ["  loss", *lines, f"{'':6} +{'-' * width}", f"{'':8}0{last:>{width - 1}}"]
    return "\n".join(line.rstrip() for line in (*lines, f"{'':8}{names}", ""))


def _value_at(curve: Curve, second: float) -> float:
    """Return the loss at a time, on the line between the steps around it."""
    for (start, first), (end, last) in itertools.pairwise(
        zip(curve.seconds, curve.losses, strict=True)
    ):
        if second <= end:
            return first + (last - first) * (second - start) / ((end - start) or 1.0)
    return curve.losses[-1]


_COLORS = ("#c27a1c", "#4878c8")


def draw_svg(curves: Sequence[Curve]) -> str:
    """Return losses by time as a picture of 640 x 360 pixels, on a background of its own."""
    shown = _smoothed(curves)
    values = [loss for curve in shown for loss in curve.losses]
    top, bottom, end = max(values), min(values), max(curve.seconds[-1] for curve in shown)
    left, right, high, low = 60, 620, 40, 310

    def text(x: float, y: float, label: str, fill: str = "#333", anchor: str = "start") -> str:
        where = f'x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"'
        return f"<text {where}>{escape(label)}</text>"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="360" font-size="13" '
        'font-family="sans-serif">',
        '<rect width="640" height="360" fill="#fff"/>',
        f'<path d="M{left} {high} V{low} H{right}" fill="none" stroke="#999"/>',
        text(left - 6, high + 5, f"{top:.2f}", anchor="end"),
        text(left - 6, low, f"{bottom:.2f}", anchor="end"),
        text(left - 6, (high + low) / 2, "loss", anchor="end"),
        text(left, low + 18, "0"),
        text(right, low + 18, f"{end:.1f} s", anchor="end"),
    ]
    for column, (curve, color) in enumerate(zip(shown, itertools.cycle(_COLORS), strict=False)):
        points = " ".join(
            f"{left + (right - left) * second / (end or 1.0):.1f},"
            f"{high + (low - high) * (top - loss) / ((top - bottom) or 1.0):.1f}"
            for second, loss in zip(curve.seconds, curve.losses, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(text(left + 280 * column, 22, curve.label, color))
    return "\n".join([*parts, "</svg>", ""])


# Cores of the ranks.


def cores_by_unit(cpus: Iterable[int], siblings: Callable[[int], str]) -> list[list[int]]:
    """Return CPUs in lists, one for each core of the processor.

    Args:
        cpus: Numbers of the CPUs that a process may use.
        siblings: Maps a CPU to a text that is the same for all threads of its core.
    """
    units: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        units.setdefault(siblings(cpu), []).append(cpu)
    return list(units.values())


def _siblings(cpu: int) -> str:
    try:
        path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        return Path(path).read_text()
    except OSError:
        return str(cpu)


def count_shared_cores() -> int:
    """Return the number of cores for ranks: two threads of a core are one, and quotas count."""
    return min(count_cores(), len(cores_by_unit(os.sched_getaffinity(0), _siblings)))


def share_of(cpus: Sequence[int], rank: int, size: int, n_cores: int) -> list[int]:
    """Return the CPUs of a rank: as many for each, apart where there are enough.

    Args:
        cpus: Those of the machine; threads of a core stand beside each other.
        rank: In [0, size).
        size: Number of ranks.
        n_cores: CPUs that may be busy at a time, fewer than `cpus` under a quota.
    """
    start = rank * len(cpus) // size
    return list(cpus[start : start + max(1, n_cores // size)])


# A rank.


def _train(settings: dict[str, Any]) -> None:
    """Train on rank 0, then on all ranks; rank 0 writes the two curves."""
    launch = discover(environment())
    assert launch is not None  # it was started by `tfscale run`
    n_cpus, units = count_cores(), cores_by_unit(os.sched_getaffinity(0), _siblings)
    cpus = share_of([*itertools.chain(*units)], launch.rank, launch.size, n_cpus)
    os.sched_setaffinity(0, cpus)  # before TensorFlow starts threads

    import tensorflow as tf

    import tfscale

    tfscale.init(independent=True)  # rank 0 trains alone first
    shows = tfscale.rank() == 0
    size, data = tfscale.size(), _make_data()
    label = f"one process on {_cpus(len(cpus))}"
    alone: tuple[list[float], list[float]] = ([], [])
    if shows:
        alone = _fit(data, label, shows, lambda n, s: n > 1 and s >= settings["seconds"], False)
    n_steps = tfscale.broadcast_object(len(alone[0]))
    curves = [Curve("1", label, *alone)]
    of_each = _cpus(n_cpus) + " together" if n_cpus < size else _cpus(len(cpus)) + " each"
    label = f"{size} ranks on {of_each}"
    seconds, losses = _fit(data, label, shows, lambda n, _: n >= n_steps, True)
    losses = tfscale.allreduce(tf.constant(losses, tf.float64)).numpy().tolist()  # of whole batches
    curves.append(Curve(str(size) if size < 10 else "n", label, seconds, losses))
    if shows:
        text = json.dumps({"curves": [curve._asdict() for curve in curves]})
        write_atomically(settings["output"], text)


def _cpus(n: int) -> str:
    return f"{n} CPU{'s' if n > 1 else ''}"


def _make_data() -> tuple[Any, Any]:
    """Return points, float32 (samples, inputs), and their classes, those of a random network."""
    import numpy as np

    generator = np.random.default_rng(1)
    x = generator.normal(size=(_SAMPLES, _INPUTS)).astype("float32")
    hidden = np.maximum(x @ generator.normal(size=(_INPUTS, 32)).astype("float32"), 0)
    scores = hidden @ generator.normal(size=(32, _CLASSES)).astype("float32")
    return x, scores.argmax(axis=1).astype("int32")


def _fit(
    data: tuple[Any, Any], label: str, shows: bool, ends: Callable[[int, float], bool], shared: bool
) -> tuple[list[float], list[float]]:
    """Train a new model; return times and losses of its steps as for `Curve`, of this rank's part.

    `ends` decides after each step by the number of steps and seconds; `shared`: all ranks train.
    """
    import keras

    import tfscale
    from tfscale.internals.keras import stop_training

    size, (x, y) = tfscale.size(), data
    batch_size = max(1, _BATCH // size) * size  # each rank has equally many samples of a batch
    n_samples = len(x) // batch_size * batch_size
    x, y = x[:n_samples], y[:n_samples]
    seconds: list[float] = []
    losses: list[float] = []
    is_terminal = environment().get(TERMINAL_VARIABLE) == "1"

    class Steps(keras.callbacks.Callback):
        began_at = shown_at = mean = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now = time.monotonic()
            self.began_at = self.began_at if seconds else now
            seconds.append(now - self.began_at)
            mean = float(logs["loss"])  # over the steps of the epoch
            losses.append((batch + 1) * mean - batch * (self.mean if batch else 0.0))
            self.mean = mean
            if is_last := ends(len(seconds), seconds[-1]):
                stop_training(self.model)
            if shows and (is_last or (is_terminal and now - self.shown_at > 0.2)):
                self.shown_at = now
                line = f"{label}: step {len(seconds)}, {seconds[-1]:.1f} s"
                before, after = "\r" if is_terminal else "", "\n" if is_last else ""
                sys.stdout.write(f"{before}{line}{after}")
                sys.stdout.flush()

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(_UNITS, "tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((_INPUTS,)), *layers, keras.layers.Dense(_CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer: Any = keras.optimizers.SGD(0.05, momentum=0.9)
    fit: dict[str, Any] = {"epochs": 10**6, "verbose": 0, "shuffle": False}
    if shared:
        model.compile(tfscale.DistributedOptimizer(optimizer), loss)
        batches = tfscale.data.GlobalBatches(x, y, batch_size=batch_size, shuffle=False)
        model.fit(batches, callbacks=[Steps(), tfscale.callbacks.Synchronize()], **fit)
    else:
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=batch_size, callbacks=[Steps()], **fit)
    return seconds, losses


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]))
