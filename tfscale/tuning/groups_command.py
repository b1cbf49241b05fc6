"""`tfscale tune groups`: probes a training script with several numbers of groups."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfscale.errors import ConfigError

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
    from tfscale.tuning.batch_size_probe import integers
    from tfscale.tuning.groups import GroupProbe, advise, as_text, write

    numbers = check_groups(integers("--groups", options.groups))
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
            *(sys.executable, "-m", "tfscale.cli", "run", "-np", str(groups)),
            *(sys.executable, "-m", "tfscale.tuning.groups_probe", json.dumps(settings)),
            *(options.script, *options.arguments),
        ]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode or not result.exists():
            raise ConfigError(
                f"The script must train with model.fit for {options.steps} steps. Received: exit "
                f"code {done.returncode} with {groups} ranks. Its output is above."
            )
        return json.loads(result.read_text())
