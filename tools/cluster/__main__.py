"""An emulated cluster on this machine: a network namespace per node, links with a rate.

    sudo .venv/bin/python -m tools.cluster up -n 4
    sudo .venv/bin/python -m tools.cluster run -np 4 --rate 1gbit -- .venv/bin/python train.py
    sudo .venv/bin/python -m tools.cluster down

`run` makes a cluster for itself where none is up, and removes it afterwards. The bytes that each
node sent and received are printed as JSON. See docs/cluster.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfscale.config import ConfigError, ExchangeError
from tfscale.plan.slow_links import read_time
from tools.cluster import control, running
from tools.cluster.commands import Shape
from tools.cluster.layout import parse_rate
from tools.cluster.state import read_state


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="main", help="of the cluster; default: main")
    verbs = parser.add_subparsers(dest="verb", required=True)
    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--rate", help="of each link and direction: 1gbit, 250mbit, none")
    shape.add_argument("--delay", type=float, default=0.0, help="milliseconds per link")
    rtt = "round trip between two nodes, such as 100ms, instead of --delay"
    shape.add_argument("--rtt", help=rtt)
    shape.add_argument("--loss", type=float, default=0.0, help="percent of packets per link")
    reorder = "percent of packets that are not delayed and overtake others"
    shape.add_argument("--reorder", type=float, default=0.0, help=reorder)
    up = verbs.add_parser("up", help="make the cluster", parents=[shape])
    up.add_argument("-n", "--nodes", type=int, default=4)
    verbs.add_parser("rate", help="give its links a rate", parents=[shape])
    link = verbs.add_parser("link", help="cut the link of a node, or mend it")
    link.add_argument("node", type=int)
    link.add_argument("state", choices=("up", "down"))
    run = verbs.add_parser("run", help="run a program on its nodes", parents=[shape])
    run.add_argument("-np", type=int, default=None, help="ranks; default: one per node")
    run.add_argument("--json", type=Path, help="write exit code and bytes there too")
    run.add_argument("--timeout", type=float, help="seconds")
    run.add_argument("command", nargs=argparse.REMAINDER, help="-- program and arguments")
    verbs.add_parser("bytes", help="print what each node has sent and received")
    verbs.add_parser("down", help="end what runs in it and remove it")
    return parser


def read_shape(options: argparse.Namespace) -> Shape | None:
    """Return the shape that the options name; None without a rate."""
    if options.rtt is not None and options.delay:
        raise ConfigError(
            f"--rtt excludes --delay. Received: --rtt {options.rtt} --delay {options.delay:g}. "
            "A round trip has four delays: leave one out."
        )
    # A packet passes two links each way.
    delay_ms = options.delay if options.rtt is None else 1e3 * read_time(options.rtt) / 4
    quality = (delay_ms, options.loss, options.reorder)
    if options.rate in (None, "none"):
        if any(quality):
            raise ConfigError(
                f"--delay, --rtt, --loss and --reorder need a rate. Received: {options.rate}. "
                "Add --rate 1gbit."
            )
        return None
    return Shape(parse_rate(options.rate), *quality)


def apply_shape(options: argparse.Namespace) -> None:
    """Shape the links as the options say; without any option they stay as they are."""
    if options.rate is not None:
        control.set_shape(options.name, read_shape(options))


def run(options: argparse.Namespace) -> int:
    """Run a program, in the cluster that is up or in one of its own."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    is_temporary = read_state(options.name) is None
    if is_temporary:
        control.up(options.name, options.np or 4)
    try:
        apply_shape(options)
        state = read_state(options.name)
        size = options.np or (len(state.layout.nodes) if state else 1)
        result = running.run(options.name, size, command, timeout_s=options.timeout)
    finally:
        if is_temporary:
            control.down(options.name)
    text = json.dumps({"exit_code": result.exit_code, "bytes": result.bytes})
    print(text, file=sys.stderr)
    if options.json:
        options.json.write_text(text)
    return result.exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = make_parser().parse_args(arguments)
    running.leave_on_sigterm()
    try:
        if os.geteuid() != 0:
            raise ConfigError("Network namespaces need root. Received: another user. Use sudo.")
        if options.verb in ("run", "up", "rate"):
            read_shape(options)  # before anything is made
        if options.verb == "run":
            return run(options)
        if options.verb == "up":
            control.up(options.name, options.nodes)
        if options.verb in ("up", "rate"):
            apply_shape(options)
        elif options.verb == "link":
            control.set_link(options.name, options.node, options.state == "up")
        elif options.verb == "bytes":
            print(json.dumps(control.read_bytes(options.name)))
        else:
            control.down(options.name)
    except (ConfigError, ExchangeError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2
    except subprocess.TimeoutExpired:
        print(f"cluster: ended after --timeout {options.timeout:g} s.", file=sys.stderr)
        return 124
    return 0


if __name__ == "__main__":
    sys.exit(main())
