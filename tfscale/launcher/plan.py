"""The command `tfscale plan`: predict step times, also for machines that do not exist yet."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tfscale.config import ConfigError, read_input_shape, read_numbers
from tfscale.files import has_matplotlib
from tfscale.launcher.reports import without_start_messages
from tfscale.plan.choose import choose
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import AUTO, LOCAL_SGD, Point, check_groups, explain, forecast, report
from tfscale.plan.layers import LayerTable
from tfscale.plan.machines import PRESETS, find_machine
from tfscale.plan.published import PUBLISHED, published
from tfscale.plan.slow_links import advise, read_rate, read_time, with_links

_MARKS = "osv^D*Px"
_RANKS = "1,2,4,8,16,32,64,128,256"
# Between ranks of a host, where the machine does not say: shared memory of common servers.
_HOST_BYTES_PER_S, _HOST_LATENCY_S = 4e9, 5e-6


def _draw(points: Sequence[Point], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6))
    left, right = figure.subplots(1, 2)
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(point.exchange, []).append(point)
    for mark, (name, curve) in zip(_MARKS, curves.items(), strict=False):
        ranks = [point.n_ranks for point in curve]
        is_auto = name == AUTO
        style = {"marker": mark, "label": name, "markersize": 5}
        style |= {"linewidth": 2.4 if is_auto else 1.2, "zorder": 3 if is_auto else 2}
        left.plot(ranks, [point.speedup for point in curve], **style)
        right.plot(ranks, [1e3 * point.predicted.exposed_s for point in curve], **style)
    ranks = sorted({point.n_ranks for point in points})
    left.plot(ranks, ranks, color="0.7", linestyle="--", label="ideal", zorder=1)
    left.set(ylabel="speedup over one rank", yscale="log")
    right.set(ylabel="exposed communication, ms per step")
    # The scale turns linear at a thousandth of the longest exposed time, in ms.
    linear = max(1e3 * max(p.predicted.exposed_s for p in points) / 1e3, 1e-3)
    right.set_yscale("symlog", linthresh=linear)
    for axes in (left, right):
        axes.set(xlabel="ranks", xscale="log")
        axes.set_xticks(ranks, [str(n) for n in ranks], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add the parser of `tfscale plan`."""
    plan = commands.add_parser("plan", help="predict step times and choose exchanges")
    which = plan.add_mutually_exclusive_group(required=True)
    models = f"{', '.join(PUBLISHED)}, or module:function that returns a Keras model"
    which.add_argument("--model", metavar="NAME", help=models)
    which.add_argument("--model-file", metavar="FILE", help="a saved Keras model")
    shape = "of one sample, where the model leaves dimensions open"
    plan.add_argument("--input-shape", metavar="R,C,...", help=shape)
    plan.add_argument("--ranks", metavar="N,...", help=f"{_RANKS}; 4 with --links")
    plan.add_argument("--global-batch", type=int, default=256, help="samples of all ranks per step")
    machines = f"{', '.join(PRESETS)}, or a file of tfscale tune links"
    plan.add_argument("--machine", default="ethernet-1g", metavar="NAME", help=machines)
    per_host = "ranks that share a host's link and reach each other without it"
    plan.add_argument("--ranks-per-host", type=int, metavar="N", help=per_host)
    plan.add_argument("--slots", type=int, default=1, help="optimizer state per parameter: Adam 2")
    plan.add_argument("--groups", type=int, default=0, help="also predict local SGD of so many")
    plan.add_argument("--interval", type=int, default=8, help="steps between its averagings")
    plan.add_argument("--explain", type=int, metavar="N", help="show the plan for N ranks only")
    links = "advise exchange, bits and interval for links of this rate, such as 10mbit"
    plan.add_argument("--links", metavar="RATE", help=links)
    plan.add_argument("--rtt", metavar="TIME", help="round trip of these links, such as 100ms")
    points = "with --links: points of accuracy that may be lost, by a study of such models (0)"
    plan.add_argument("--may-lose", type=float, default=0.0, metavar="POINTS", help=points)
    plan.add_argument("--output", metavar="DIR", help="folder for plan.md and plan.png")
    plan.set_defaults(handler=_plan)


def _find_table(options: argparse.Namespace) -> LayerTable:
    """Return the model that `--model`, `--model-file` and `--input-shape` name."""
    if options.model and ":" not in options.model:
        if options.input_shape:
            raise ConfigError(
                "--input-shape is for models of your own. Received: --model "
                f"{options.model}, whose pictures have a size. Leave --input-shape out."
            )
        return published(options.model)
    with without_start_messages():
        # Imported here: TensorFlow takes seconds.
        from tfscale.measure.model_layers import find_model, read_layers

        model = find_model(options.model, options.model_file)
        return read_layers(model, read_input_shape(options.input_shape))


def _tell(n_ranks: int, progress: str = "") -> None:
    """Say what is computed now: a large model on many ranks takes a minute."""
    sys.stderr.write(f"Planning for {n_ranks} rank{'s' if n_ranks > 1 else ''}{progress} ...\n")


def _plan(options: argparse.Namespace) -> int:
    if options.explain is not None and (options.explain < 1 or options.output):
        raise ConfigError(
            "--explain takes 1 rank or more, and prints only. Received: "
            f"--explain {options.explain}{' and --output' if options.output else ''}."
        )
    check_groups(options.groups, options.interval)
    if options.links is None and (options.rtt is not None or options.may_lose):
        raise ConfigError(
            "--rtt and --may-lose are for --links. Received: "
            f"--rtt {options.rtt}, --may-lose {options.may_lose:g}, without --links. Example: "
            "--links 10mbit --rtt 100ms --may-lose 0.2"
        )
    all_ranks = options.ranks or (_RANKS if options.links is None else "4")
    try:
        machine = find_machine(options.machine)
        if options.ranks_per_host is not None:
            latency_s = machine.host_latency_s
            machine = dataclasses.replace(
                machine,
                ranks_per_host=options.ranks_per_host,
                host_bytes_per_s=machine.host_bytes_per_s or _HOST_BYTES_PER_S,
                host_latency_s=_HOST_LATENCY_S if latency_s is None else latency_s,
            )
        scenario = Scenario(
            _find_table(options), machine, options.explain or 1, options.global_batch, options.slots
        )
        if options.explain:
            _tell(options.explain)
            sys.stdout.write(explain(scenario, choose(scenario)))
            return 0
        ranks = read_numbers(all_ranks, "--ranks")
        if options.links is not None:
            rtt_s = None if options.rtt is None else read_time(options.rtt)
            slow = with_links(machine, read_rate(options.links), rtt_s)
            for n_ranks in ranks:
                at = dataclasses.replace(scenario, machine=slow, n_ranks=n_ranks)
                sys.stdout.write(advise(at, options.may_lose))
            return 0
        points = []
        for number, n_ranks in enumerate(ranks, 1):
            _tell(n_ranks, f" ({number} of {len(ranks)})")
            points += forecast(scenario, [n_ranks], options.groups, options.interval)
    except ValueError as error:  # a PlanError, or of Keras; the command line reports ConfigError
        raise ConfigError(str(error)) from error
    text = report(scenario, points)
    sys.stdout.write(text)
    if options.groups and all(point.exchange != LOCAL_SGD for point in points):
        sys.stderr.write(
            f"tfscale: no local SGD: its {options.groups} groups must divide the number of ranks "
            f"and of samples. Received: --ranks {all_ranks} --global-batch "
            f"{options.global_batch}.\n"
        )
    if options.output:
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.md").write_text(text, "utf-8")
        title = text.partition("\n")[0].removeprefix("# ")
        if has_matplotlib():
            _draw(points, f"{title}: predicted", folder / "plan.png")
        else:
            sys.stderr.write("tfscale: no picture without matplotlib: pip install matplotlib\n")
    return 0
