"""The command `tfscale tune links`: measure links, and a model on them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.comm import runtime
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange.auto import per_layer
from tfscale.measure.forecast import read_numbers
from tfscale.measure.layers import (
    LayerMeasurement,
    LayerProbe,
    calibrated,
    measure_gradients,
    measured_machine,
    separate,
)
from tfscale.measure.links import spread_of
from tfscale.measure.model_layers import find_model, inputs_of, read_layers
from tfscale.plan.costs import Scenario
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import Machine


def wanted_model(options: argparse.Namespace) -> keras.Model:
    """Return the model that a command line names.

    Args:
        options: Of the command line: the model and its input shape.

    Raises:
        ConfigError: There is none, or the shape of its inputs is not known.
    """
    model = find_model(options.model, options.model_file)
    inputs_of(model, _shape(options))
    return model


def _shape(options: argparse.Namespace) -> tuple[int, ...] | None:
    return read_numbers(options.input_shape, "--input-shape") if options.input_shape else None


def measure_model(
    machine: Machine, options: argparse.Namespace, model: keras.Model | None = None
) -> Machine:
    """Return a machine that knows how long the layers of a model take. Collective.

    Args:
        machine: Its links are kept.
        options: Of the command line: the model, its input shape and the batch per rank.
        model: Of `wanted_model`; None looks for it.
    """
    shape = _shape(options)
    model = wanted_model(options) if model is None else model
    table, size = read_layers(model, shape), runtime.size()
    random = np.random.default_rng(runtime.rank())

    def batch_of(spec: tf.TensorSpec) -> np.ndarray:
        values = random.random((options.batch, *spec.shape[1:]))
        return values.astype(spec.dtype.as_numpy_dtype)

    x = keras.tree.map_structure(batch_of, inputs_of(model, shape))
    y = keras.tree.map_structure(lambda t: np.zeros(t.shape, np.float32), model(x))
    alone, _ = _probe(model, table, (x, y), overlap=False)
    together, spread_s = _probe(model, table, (x, y), overlap=True)
    found, compute_share, message_share = separate(alone, together)
    own = measured_machine(table, replace(found, after_s=0.0), size, options.batch, machine)
    gradients = measure_gradients(table, size, size * options.batch)
    times = {table.name: replace(own.layer_times[table.name], gradient_s=gradients)}
    own = replace(
        own,
        layer_times={**own.layer_times, **times},
        compute_share=compute_share,
        message_share=message_share,
    )
    own = calibrated(Scenario(table, own, size, size * options.batch), together).machine
    return replace(own, spread={**machine.spread, f"step of {table.name}": spread_s})


def _probe(
    model: keras.Model, table: LayerTable, data: Any, overlap: bool
) -> tuple[LayerMeasurement, float]:
    """Train with one exchange per layer; return the middle one of three probes, and the spread.

    Raises:
        ConfigError: There is nothing to compare.
    """
    exchange = per_layer(table, overlap)
    sgd = tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-6, 0.9), exchange=exchange)
    model.compile(sgd, loss="mse")
    tfscale.prepare(model)
    owners = [name.rpartition("/")[0] for layer in table.layers for name, _ in layer.weights]
    found = []
    for _ in range(3):
        probe = LayerProbe(list(dict.fromkeys(owners)))
        while not probe.is_over:
            model.train_on_batch(*data)
            last = probe.step()
        if last is None:
            raise ConfigError(f"{model.name} must have two layers to exchange. Received: fewer.")
        found.append(last)
    middle = sorted(found, key=lambda one: one.step_s)[len(found) // 2]
    return middle, spread_of([one.step_s for one in found])


_SHOWN = (
    ("latency_s", "us per message", 1e6),
    ("bytes_per_s", "MB/s per host", 1e-6),
    ("reduce_bytes_per_s", "MB/s of local sums", 1e-6),
    ("flops_per_s", "GFLOP/s per rank", 1e-9),
    ("memory_bytes_per_s", "MB/s of memory per rank", 1e-6),
)


def add_links(tuners: argparse._SubParsersAction) -> None:
    """Add the parser of `tfscale tune links`."""
    links = tuners.add_parser("links", help="measure messages, sums and computing for the planner")
    links.add_argument("-np", "-n", type=int, default=2, dest="size", metavar="N")
    links.add_argument("-H", "--hosts", default=None, metavar="HOST:N,...", help="hosts and places")
    _add_options(links)
    links.set_defaults(handler=_start)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="machine.json", metavar="FILE")
    parser.add_argument("--model", metavar="MODULE:FUNCTION", help="also time a model's layers")
    parser.add_argument("--model-file", metavar="FILE", help="the same for a saved model")
    parser.add_argument("--input-shape", default="", metavar="R,C,...", help="of one sample")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank")
    parser.add_argument(
        "--max-spread",
        type=float,
        default=0.3,
        help="relative half width of the middle half of the rounds above which nothing is written",
    )


def _start(options: argparse.Namespace) -> int:
    """Start the ranks."""
    from tfscale.launcher.cli import main as run_cli  # the command line imports this module

    if options.size < 2:
        raise ConfigError(f"A link has two ends. Received: -np {options.size}. Use -np 2 or more.")
    _check(options)
    words = ["run", "-np", str(options.size)]
    if options.hosts is not None:
        words += ["-H", options.hosts]
    words += ["--", sys.executable, "-m", "tfscale.measure.links_command"]
    for name in ("output", "model", "model_file", "input_shape", "batch", "max_spread"):
        value = getattr(options, name)
        if value not in (None, ""):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return run_cli(words)


def _check(options: argparse.Namespace) -> None:
    """Check what would otherwise be found wrong when all is measured; make the output's folder."""
    if options.batch < 1:
        raise ConfigError(f"--batch must be 1 or more. Received: --batch {options.batch}. Use 32.")
    if options.input_shape:
        read_numbers(options.input_shape, "--input-shape")
    path = Path(options.output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--output must name a file that can be written. Received: {path} ({error}). "
            "Choose another folder."
        ) from error
    if path.is_dir():
        raise ConfigError(
            f"--output must name a file. Received: {path}, a folder. Example: --output "
            f"{path / 'machine.json'}"
        )


def judge(machine: Machine, max_spread: float) -> list[str]:
    """Return the names of what is too noisy to be trusted.

    Args:
        machine: As measured.
        max_spread: The largest relative spread that is trusted.
    """
    return [name for name, spread in machine.spread.items() if spread > max_spread]


def describe(machine: Machine) -> str:
    """Return what was measured, a line per number."""
    lines = []
    for name, unit, factor in _SHOWN:
        spread = 100 * machine.spread.get(name, 0.0)
        lines.append(f"{getattr(machine, name) * factor:12.1f}  {unit} (+- {spread:.0f} %)")
    for name, times in machine.layer_times.items():
        total = sum(times.forward_s.values()) + sum(times.backward_s.values())
        spread = 100 * machine.spread.get(f"step of {name}", 0.0)
        words = f"ms per step of {name}, {times.batch} samples (+- {spread:.0f} %)"
        lines.append(f"{1e3 * total:12.1f}  {words}")
    return "\n".join([*lines, ""])


def _require_even(every: Sequence[int]) -> None:
    if len(set(every)) > 1:
        raise ExchangeError(
            "Links are measured where hosts have equally many ranks. Received: "
            f"{every}, of the host of each rank. Choose -np and -H so that they have."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on this rank; rank 0 writes the file. Collective: every rank of a job runs this.

    Args:
        argv: Options; None takes this process's.

    Returns:
        0, or 1 where the numbers are too noisy and nothing was written.

    Raises:
        ExchangeError: The backend records no times.
        ConfigError: There is no such model.
    """
    parser = argparse.ArgumentParser()
    _add_options(parser)
    options = parser.parse_args(argv)
    import tfscale
    from tfscale.comm import objects, runtime
    from tfscale.comm.events import has_events
    from tfscale.measure import links

    tfscale.init()
    size, local = runtime.size(), runtime.local_size()
    if not has_events() or size < 2:
        raise ExchangeError(
            "Links are measured by the engine between two ranks or more. Received: backend="
            f"{runtime.backend().name} with {size}. Start it with tfscale tune links -np 2."
        )
    _require_even(objects.allgather_object(local, name="ranks of a host"))
    has_model = options.model or options.model_file
    model = wanted_model(options) if has_model else None  # wrong ones cost no minutes
    between = links.measure_links(tfscale.global_process_set)
    inside = links.measure_inside() if 1 < local < size else []
    machine = links.machine_from(between, inside, links.measure_compute())
    if model is not None:
        machine = measure_model(machine, options, model)
    noisy = judge(machine, options.max_spread)
    if runtime.rank() == 0:
        sys.stdout.write(describe(machine))
        if noisy:
            sys.stderr.write(
                f"tfscale: not written: {', '.join(noisy)} spread by more than "
                f"{100 * options.max_spread:.0f} %. Measure on an idle machine, or raise "
                "--max-spread.\n"
            )
        else:
            machine.save(options.output)
            sys.stdout.write(f"Written to {options.output}.\n")
    tfscale.shutdown()
    return 1 if noisy else 0


if __name__ == "__main__":
    sys.exit(main())
