"""The commands `tfscale tune batch-size`, `groups`, `compression` and `links`.

TensorFlow is imported when a handler runs, and by the ranks that it starts. The command line, which
starts ranks, adds to the options how it does so: `run_command` and `run_apart`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.comm.places import is_this_host, parse_places, require_hosts
from tfscale.config import ConfigError, read_input_shape, read_numbers, require

_COMPRESSIONS = "none,bf16,int8,int4,low_rank"
_SIZES = "16,32,64,128,256,512,1024"


def add_tune(commands: argparse._SubParsersAction) -> None:
    """Add the parsers of `tfscale tune`."""
    tune = commands.add_parser("tune", help="measure, and recommend settings")
    tuners = tune.add_subparsers(required=True, metavar="WHAT")
    _add_batch_size(tuners)
    _add_groups(tuners)
    _add_compression(tuners)
    _add_links(tuners)


def _add_script(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("--output", default=output, metavar="DIR", help="for JSON and PNG")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def _add_batch_size(tuners: argparse._SubParsersAction) -> None:
    parser = tuners.add_parser(
        "batch-size",
        help="look for the batch size to start with and to end with",
        usage="tfscale tune batch-size [options] recipe.py ...",
        description="Runs a training script in one process, and measures at some epochs how the "
        "gradient depends on the batch size. The script must train with model.fit on "
        "tfscale.data.GlobalBatches or on arrays. It is stopped after the last measurement.",
    )
    parser.add_argument("--sizes", default=_SIZES, metavar="B,...", help=f"default: {_SIZES}")
    parser.add_argument("--samples", type=int, default=4096, metavar="N", help="per size and stage")
    parser.add_argument("--stages", default="0,1,3", metavar="E,...", help="epochs trained before")
    _add_script(parser, "batch_size")
    parser.set_defaults(handler=_tune_batch_size)


def _tune_batch_size(options: argparse.Namespace) -> int:
    from tfscale.measure.batch_size import write_report
    from tfscale.tune.scripts import measure_script

    _make_folder(options.output)
    made = _made("batch-size", options, ("sizes", "samples", "stages"))
    stages = measure_script(
        [options.script, *options.arguments],
        batch_sizes=read_numbers(options.sizes, "--sizes"),
        at_epochs=read_numbers(options.stages, "--stages", least=0),
        samples=options.samples,
    )
    text = write_report(stages, options.output, made)
    sys.stdout.write(f"{text}Results are in {options.output}.\n")
    return 0


def _add_groups(tuners: argparse._SubParsersAction) -> None:
    parser = tuners.add_parser(
        "groups",
        help="look for the number of groups of local SGD",
        usage="tfscale tune groups [options] recipe.py ...",
        description="Runs a training script for some steps with as many ranks as groups, first "
        "one, and measures how far the groups' models part, and how fast the loss falls. The "
        "script must train with model.fit and a DistributedOptimizer, whose exchange is replaced. "
        "Its batch size and learning rate are those of one group.",
    )
    add = parser.add_argument
    add("--groups", default="2,4,8", metavar="G,...", help="default: 2,4,8")
    add("--steps", type=int, default=200, metavar="N", help="per probe")
    add("--interval", type=int, default=8, metavar="I", help="steps between averages")
    add("--learning-rate", type=float, metavar="R", help="of one group (default: the script's)")
    rule_help = "by what the learning rate is multiplied: G, its root, or nothing"
    add("--rate-rule", choices=("linear", "sqrt", "none"), default="linear", help=rule_help)
    _add_script(parser, "groups")
    parser.set_defaults(handler=_tune_groups)


def _tune_groups(options: argparse.Namespace) -> int:
    from tfscale.measure.groups import GroupProbe, write_report

    numbers = [1, *check_groups(read_numbers(options.groups, "--groups"))]
    if options.interval < 1 or options.steps < 2 * options.interval:
        raise ConfigError(
            f"--steps must hold two averages or more. Received: --steps {options.steps} "
            f"--interval {options.interval}. Use more steps."
        )
    rate = options.learning_rate
    require(rate is None or rate > 0, "--learning-rate", "above 0", rate)
    if not Path(options.script).is_file():
        raise ConfigError(f"script must be a file. Received: {options.script}.")
    _make_folder(options.output)
    made = _made("groups", options, ("groups", "steps", "interval", "learning_rate", "rate_rule"))
    probes = []
    for groups in numbers:
        sys.stderr.write(f"Probing {groups} groups ...\n")
        names = ("interval", "steps", "rate_rule", "learning_rate")
        settings = {name: vars(options)[name] for name in names} | {"groups": groups}
        measured = _run_probe(groups, settings, options)
        series = {name: tuple(measured[name]) for name in ("distances", "losses")}
        probes.append(GroupProbe(**measured | series))
    text = write_report(probes, options.output, made)
    sys.stdout.write(f"{text}Results are in {options.output}.\n")
    return 0


def _make_folder(path: str) -> None:
    """Make the folder of `--output`, before anything is measured."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise OSError("it cannot be written")
    except OSError as error:
        raise ConfigError(
            f"--output must name a folder that can be written. Received: {path} ({error}). "
            "Choose another folder."
        ) from error


def _made(name: str, options: argparse.Namespace, settings: Sequence[str]) -> dict[str, str]:
    """Return what makes a recommendation: its command, and commit, machine, load and versions."""
    from tfscale.measure.provenance import describe

    given_settings = {key: vars(options)[key] for key in settings if vars(options)[key] is not None}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given_settings.items()]
    command = ["tfscale", "tune", name, *flags, options.script, *options.arguments]
    # Seeds are the script's; the order of measured samples has seed 0.
    return {"command": shlex.join(command), **_seed_of(options.arguments), **describe()}


def _seed_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return the seed that a script is given, if it is given one as `--seed`."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, is_joined, value = word.partition("=")
        if name == "--seed":
            return {"seed": value if is_joined else following}
    return {}


def check_groups(numbers: Sequence[int]) -> list[int]:
    """Return the numbers of groups, without 1; raises ConfigError if they do not double."""
    chosen = [n for n in numbers if n != 1]
    if not chosen or chosen[0] < 2 or chosen[1:] != [2 * n for n in chosen[:-1]]:
        raise ConfigError(
            "--groups must double from one to the next, from 2 on. Received: --groups "
            f"{','.join(map(str, numbers))}. Example: --groups 2,4,8."
        )
    return chosen


def _run_probe(ranks: int, settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, hosts = Path(folder) / "probe.json", vars(options).get("hosts")
        settings |= {"output": str(result)}
        command = [
            *("run", "-np", str(ranks)),
            *(("-H", hosts, "--") if hosts else ()),
            *(sys.executable, "-m", "tfscale.tune.scripts", json.dumps(settings)),
            *(options.script, *options.arguments),
        ]
        code = options.run_apart(command)
        if code or not result.exists():
            raise ConfigError(
                "script must train with model.fit for all steps of a probe. Received: exit code "
                f"{code} with {ranks} ranks. Its output is above."
            )
        return json.loads(result.read_text())


def _add_compression(tuners: argparse._SubParsersAction) -> None:
    parser = tuners.add_parser(
        "compression",
        help="compare time, bytes and accuracy of compressions",
        usage="tfscale tune compression [options] train.py ...",
        description="Runs a training script with each compression and several seeds. The script "
        "must train with model.fit and a DistributedOptimizer, whose compression is replaced.",
    )
    add = parser.add_argument
    add("-np", "-n", "--np", type=int, default=2, metavar="N", help="ranks (default: 2)")
    add("-H", "--hosts", metavar="HOST:N,...", help="hosts and places")
    add("--compressions", default=_COMPRESSIONS, metavar="C,...", help=f"default: {_COMPRESSIONS}")
    add("--seeds", type=int, default=3, metavar="N", help="trainings with each (default: 3)")
    add("--epochs", type=int, metavar="N", help="of each training (default: the script's)")
    add("--start-step", type=int, default=50, metavar="N", help="of int4 and low_rank")
    _add_script(parser, "compression")
    parser.set_defaults(handler=_tune_compression)


def _tune_compression(options: argparse.Namespace) -> int:
    from tfscale.comm.compression import Compression
    from tfscale.measure.compression import write_report

    names = [name.strip() for name in options.compressions.split(",")]
    choices = [name for name in vars(Compression) if not name.startswith("_")]
    fits = len({*names}) == len(names) and {*names} <= {*choices}
    require(fits, "--compressions", f"different ones of {', '.join(choices)}", options.compressions)
    require(options.seeds >= 1, "--seeds", "1 or more", options.seeds)
    if options.hosts is not None:
        first, _ = parse_places(require_hosts(options.hosts, "-H"))[0]
        if not is_this_host(first):
            raise ConfigError(
                "-H must begin with this host, where rank 0 writes results. Received: -H "
                f"{options.hosts}. Start tfscale tune on {first}, or name this host first."
            )
    _make_folder(options.output)
    not_passed_on = ("np", "hosts", "compressions", "seeds", "epochs", "start_step")
    made = _made("compression", options, not_passed_on)
    probes: list[dict[str, Any]] = []
    try:
        for seed, name in itertools.product(range(1, options.seeds + 1), names):
            if not any(p["compression"] == name and "refused" in p for p in probes):
                sys.stderr.write(f"Training with {name}, seed {seed} ...\n")
                settings = {"start_step": options.start_step, "epochs": options.epochs}
                settings |= {"compression": name, "seed": seed}
                probes.append(_run_probe(options.np, settings, options))
    finally:  # what was trained is kept if a later training fails
        if probes:
            text = write_report(probes, options.output, made)
            sys.stdout.write(f"{text}Results are in {options.output}.\n")
    return 0


def _add_links(tuners: argparse._SubParsersAction) -> None:
    links = tuners.add_parser("links", help="measure messages, sums and computing for the planner")
    links.add_argument("-np", "-n", type=int, default=2, dest="size", metavar="N")
    links.add_argument("-H", "--hosts", default=None, metavar="HOST:N,...", help="hosts and places")
    links.add_argument("--output", default="machine.json", metavar="FILE")
    links.add_argument("--model", metavar="MODULE:FUNCTION", help="also time a model's layers")
    links.add_argument("--model-file", metavar="FILE", help="the same for a saved model")
    links.add_argument("--input-shape", default="", metavar="R,C,...", help="of one sample")
    links.add_argument("--batch", type=int, default=32, help="samples per rank")
    spread = "relative half width of the middle half of the rounds above which nothing is written"
    links.add_argument("--max-spread", type=float, default=0.3, help=spread)
    links.set_defaults(handler=_tune_links)


def _tune_links(options: argparse.Namespace) -> int:
    """Start the ranks, after checks that would otherwise fail when everything is measured."""
    if options.size < 2:
        raise ConfigError(
            f"-np must be 2 or more. Received: -np {options.size}. Links have two ends."
        )
    require(options.batch >= 1, "--batch", "1 or more", options.batch, "Use 32.")
    spread = options.max_spread
    require(spread >= 0, "--max-spread", "0 or more", spread, "Use 0.3.")
    read_input_shape(options.input_shape)
    path = Path(options.output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
    except OSError as error:
        raise ConfigError(
            f"--output must name a file that can be written. Received: {path} ({error}). "
            "Choose another file."
        ) from error
    command = ["run", "-np", str(options.size)]
    if options.hosts is not None:
        command += ["-H", options.hosts]
    names = ("output", "model", "model_file", "input_shape", "batch", "max_spread")
    settings = json.dumps({name: vars(options)[name] for name in names})
    command += ["--", sys.executable, "-m", "tfscale.tune.links", settings]
    return int(options.run_command(command))
