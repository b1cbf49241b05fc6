"""The command `tfscale`: run, demo, convert, doctor, build, report, plan and tune."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfscale.comm.places import Places, is_this_host, parse_places, require_hosts, spread
from tfscale.config import (
    ConfigError,
    ExchangeError,
    environment,
    parse_address,
    read_size,
    variable_name,
)
from tfscale.launcher import mpi_command
from tfscale.launcher.convert import add_convert
from tfscale.launcher.demo import add_demo
from tfscale.launcher.doctor import examine
from tfscale.launcher.hosts import check_hosts
from tfscale.launcher.plan import add_plan
from tfscale.launcher.restarting import AskPlaces, Job, RestartRule
from tfscale.monitor.exporter import listen
from tfscale.native import cache as library
from tfscale.native import mpi_library
from tfscale.native.cores import count_cores
from tfscale.transparent.__main__ import add_options_of_distribute
from tfscale.tune import add_tune


def _add_run(commands: argparse._SubParsersAction) -> None:
    run = commands.add_parser(
        "run",
        help="start a program on several ranks",
        usage="tfscale run -np 4 [options] python train.py ...",
    )
    add = run.add_argument
    add("-np", "-n", type=int, dest="size", metavar="N", help="number of ranks")
    add("-H", "--hosts", metavar="HOST:N,...", help="hosts and places")
    add("--hostfile", metavar="FILE", help="hosts, in the MPI's own format")
    add("--slurm", action="store_true", help="start with srun in an allocation")
    prefix_help = "print the rank before each line"
    add("--output-prefix", "--tag-output", action="store_true", help=prefix_help)
    bind_help = "none, core, socket (default: none; Intel MPI and srun: theirs)"
    add("--bind-to", metavar="WHAT", help=bind_help)
    env_help = "variable for every rank (repeatable)"
    add("--env", action="append", default=[], metavar="K=V", help=env_help)
    restarts_help = "start again after a failure, N times at most (default: 0)"
    add("--restarts", type=int, default=0, metavar="N", help=restarts_help)
    least_help = "restarts may leave out the place of a rank that failed, down to N ranks"
    add("--min-np", type=int, metavar="N", help=least_help)
    grace_help = "seconds that ranks have to end after SIGTERM or Ctrl-C (default: 30)"
    add("--grace-s", type=float, default=30.0, metavar="S", help=grace_help)
    add("--mpiexec", metavar="PATH", help="the mpiexec to use (default: found)")
    what = "rank 0 reads the standard input, which is empty for the others (default: for all)"
    add("--stdin", action="store_true", help=what)
    what = "train an unchanged Keras script: each rank computes its part of each batch"
    add("--distribute", action="store_true", help=what)
    add_options_of_distribute(add, "for --distribute: ")
    what = "serve metrics of the training for Prometheus, at rank 0's host"
    add("--metrics", metavar="[HOST]:PORT", help=what)
    add("--dry-run", action="store_true", help="print the command, start nothing")
    quiet_help = "do not print numbers of the training at the end"
    add("--quiet", action="store_true", help=quiet_help)
    what = "show the command, and what TensorFlow says at its start"
    add("--verbose", action="store_true", help=what)
    add("command", nargs=argparse.REMAINDER, help="program and its arguments")
    run.set_defaults(handler=_run)


def _read_spec(options: argparse.Namespace, environ: dict[str, str]) -> mpi_command.LaunchSpec:
    size = options.size
    if size is None and options.slurm and "SLURM_NTASKS" in environ:
        size = int(environ["SLURM_NTASKS"])
    if size is None:
        raise ConfigError(
            "-np must be given. Received: no "
            f"-np{', and no SLURM_NTASKS: not in an allocation' if options.slurm else ''}. "
            "Example: tfscale run -np 4 python train.py"
        )
    variables = {}
    for item in options.env:
        name, equals, value = item.partition("=")
        if not (name and equals):
            raise ConfigError(f"--env must be K=V. Received: --env {item}. Write --env K=V.")
        variables[name] = value
    if options.metrics is not None:
        parse_address(options.metrics, "--metrics")
        variables[_METRICS] = options.metrics
        token = variable_name("metrics_token")  # also to other hosts
        variables |= {token: environ[token]} if token in environ and token not in variables else {}
    command = _read_command(options.command, needs_python=options.distribute)
    if options.distribute:
        command = _distributed(command, options)
        if {**environ, **variables}.get(_HASH_SEED, "random") == "random":
            variables[_HASH_SEED] = "0"  # sets of words have the same order on all ranks
    return mpi_command.LaunchSpec(
        command=command,
        size=size,
        hostfile=None if options.restarts else options.hostfile,
        is_slurm=options.slurm,
        is_prefixed=options.output_prefix,
        has_stdin=options.stdin,
        bind_to=options.bind_to,
        is_root=os.geteuid() == 0,
        n_cores=count_cores(),
        cpus_per_task=environ.get("SLURM_CPUS_PER_TASK", ""),
        environment=variables,
    )


def _read_command(command: Sequence[str], needs_python: bool) -> tuple[str, ...]:
    """Return the program and its arguments; Python runs a .py file that is not executable."""
    command = command[1:] if command[:1] == ["--"] else command
    if command and command[0].endswith(".py") and (needs_python or not shutil.which(command[0])):
        return (sys.executable, *command)
    return tuple(command)


# Python's option that hash() of texts depends on; it is read before a program starts.
_HASH_SEED = "PYTHONHASHSEED"
_METRICS = variable_name("metrics")
# Options of `tfscale.transparent`, passed on from --distribute.
_PASSED = ("exchange", "batch_norm", "seed", "all_output", "verify", "decode", "shard_embeddings")


def _require_distribute(options: argparse.Namespace) -> None:
    used = _options_of_distribute(options)
    if used and not options.distribute:
        raise ConfigError(
            f"{used[0]} is an option of --distribute. Received: {used[0]} without it. Add "
            "--distribute, or make the choice in the script (tfscale.distribute, "
            "tfscale.DistributedOptimizer)."
        )
    if options.shard_embeddings is not None:
        read_size(options.shard_embeddings, "--shard-embeddings")
    if options.seed is not None and not 0 <= options.seed < 2**32:
        raise ConfigError(f"--seed must be in [0, 2**32). Received: --seed {options.seed}.")


def _options_of_distribute(options: argparse.Namespace) -> list[str]:
    used = []
    for name in _PASSED:
        value, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and value is not False:  # 0 is a seed
            used.append(option if value is True else f"{option}={value}")
    return used


def _distributed(command: Sequence[str], options: argparse.Namespace) -> tuple[str, ...]:
    """Return a command of Python as one that calls `tfscale.distribute` before its program."""
    if not command:
        return ()  # refused where the command of the MPI is built
    if not re.fullmatch(r"python[\d.]*t?", Path(command[0]).name):
        raise ConfigError(
            f"--distribute needs a Python program. Received: {command[0]}. Write python and the "
            "script; or, without --distribute, put `-m tfscale.transparent` after the python that "
            "this command starts, or call tfscale.distribute() in its script."
        )
    interpreter, program = _split_python(command)
    if options.seed is None:  # ranks that send one cannot set TensorFlow's threads afterwards
        options.seed = secrets.randbelow(2**32)
    if not program:
        raise ConfigError(
            "--distribute needs a script, -m module or -c code. Received: "
            f"{shlex.join(command)}. Example: tfscale run --distribute -np 4 python train.py"
        )
    return (
        *(*interpreter, "-m", "tfscale.transparent"),
        *(*_options_of_distribute(options), "--", *program),
    )


def _split_python(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter with its options, and the script, `-m module` or `-c code`."""
    at = 1
    while at < len(command) and re.match(r"-.", command[at]):
        word = command[at]
        # Letters may be joined, as in -um module; of these four the rest is a value, or the next.
        match = None if word.startswith("--") else re.match(r"-([^WXmc]*)([WXmc])", word)
        if match is None:
            at += 2 if word == "--check-hash-based-pycs" else 1
            continue
        value = word[match.end() :]
        if match[2] in "WX":
            at += 1 if value else 2
            continue
        rest = [value, *command[at + 1 :]] if value else [*command[at + 1 :]]
        flags = [f"-{match[1]}"] if match[1] else []
        return [*command[:at], *flags], [f"-{match[2]}", *rest] if rest else []
    return [*command[:at]], [] if "-" in command[at : at + 1] else [*command[at:]]


def _read_places(options: argparse.Namespace) -> Places:
    """Return all hosts; those of a host file only for restarts, which may leave some out."""
    if options.hosts is not None and options.hostfile is not None:
        raise ConfigError(
            f"-H excludes --hostfile. Received: -H and --hostfile {options.hostfile}. Give one."
        )
    if options.hosts is not None:
        return parse_places(require_hosts(options.hosts, "-H"))
    if options.hostfile is None:
        return ()
    try:
        text = Path(options.hostfile).read_text()
    except OSError as error:
        raise ConfigError(f"--hostfile must be readable. Received: {error}.") from error
    require_hosts(text, f"--hostfile {options.hostfile}")
    return parse_places(text) if options.restarts else ()


def _run(options: argparse.Namespace) -> int:
    job = prepare_job(options)
    return 0 if options.dry_run else job.run()


def prepare_job(options: argparse.Namespace, ask_places: AskPlaces | None = None) -> Job:
    """Return the job that options of `tfscale run` ask for, ready to start; or only print it.

    `ask_places` returns the places of a restart, where hosts are not those of the options.

    Raises:
        ConfigError: Options do not fit, or a host cannot start ranks.
        ExchangeError: The library cannot be compiled.
    """
    environ = dict(environment())
    _require_distribute(options)
    spec = _read_spec(options, environ)
    rule = RestartRule(options.restarts, options.min_np, _read_places(options), options.grace_s)
    mpi = mpi_command.choose_mpi(options.mpiexec, options.slurm)
    job = Job(spec, mpi, rule, environ, options.verbose, not options.quiet, ask_places)
    command = _show(job, spec)
    if options.dry_run:
        print(command)
        return job
    _try_address(options, spec, rule.places, environ)
    _prepare_library(dataclasses.replace(spec, hosts=rule.places), mpi, environ)
    variables = {**environ, **(spec.environment or {})}
    if rule.places:
        first = dataclasses.replace(spec, hosts=spread(rule.places, spec.size))
        check_hosts(first, mpi, variables)
    elif not (spec.is_slurm or spec.hostfile) and environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
        print(
            f"tfscale: Slurm has given this job {environ['SLURM_JOB_NUM_NODES']} nodes, and "
            "without --slurm all ranks start on this one.",
            file=sys.stderr,
        )
    if options.verbose and not options.quiet:  # the output may be piped into another program
        print(f"tfscale: {command}", file=sys.stderr, flush=True)
    return job


def _try_address(
    options: argparse.Namespace,
    spec: mpi_command.LaunchSpec,
    places: Places,
    environ: dict[str, str],
) -> None:
    """Raise a ConfigError before ranks start if rank 0 cannot listen for readers of metrics.

    On another host rank 0 itself finds out.
    """
    text = {**environ, **(spec.environment or {})}.get(_METRICS, "")
    is_here = is_this_host(places[0][0]) if places else not (spec.is_slurm or spec.hostfile)
    if text and is_here:
        listen(text, _METRICS if options.metrics is None else "--metrics").close()


def _prepare_library(
    spec: mpi_command.LaunchSpec, mpi: mpi_command.Mpi | None, environ: dict[str, str]
) -> None:
    """Compile the library before the ranks start, unless they need none or are on other hosts."""
    variables = {**environ, **(spec.environment or {})}
    is_engine = variables.get(variable_name("backend"), "") in ("", "auto", "engine")
    if spec.size > 1 and is_engine and not mpi_command.has_other_hosts(spec, variables):
        chosen = mpi_library.find(mpi.kind if mpi else "", library.built_for())
        library.prepare_libraries(chosen)


def _show(job: Job, spec: mpi_command.LaunchSpec) -> str:
    """Return the command of a job as typed in a shell, without values that may be secret."""
    command = shlex.join(job.command())
    secret = spec.environment or {}
    shown = " ".join(
        f"{name}={'...' if name in secret else shlex.quote(value)}"
        for name, value in job.variables().items()
    )
    return f"env {shown} {command}"


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser("doctor", help="say what is here and what is missing")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--timeout-s", type=float, default=120.0, help="limit of each test")
    doctor.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    checks = examine(environment(), options.timeout_s)
    is_complete = all(check.status != "missing" for check in checks)
    if options.json:
        answer = {"ok": is_complete, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(answer, indent=2))
    else:
        for check in checks:
            print(f"{check.status:8} {check.name:11} {check.detail}")
            if check.remedy:
                print(f"{'':8} {'':11} -> {check.remedy}")
        print("Ready for several ranks." if is_complete else "Not ready for several ranks.")
    return 0 if is_complete else 1


def _add_build(commands: argparse._SubParsersAction) -> None:
    what = "compile the library into the package, for the TensorFlow and MPI that are here"
    build = commands.add_parser("build", help=what)
    library.add_options(build)
    build.set_defaults(handler=library.run)


def _add_report(commands: argparse._SubParsersAction) -> None:
    what = "draw the reports of a finished run again: communication, theta"
    report = commands.add_parser("report", help=what)
    report.add_argument("directory", metavar="DIR", help="folder of the report or timeline")
    report.set_defaults(handler=_report)


def _report(options: argparse.Namespace) -> int:
    # Imported here: matplotlib and its fonts take a second.
    from tfscale.measure import report as communication
    from tfscale.measure import theta
    from tfscale.trace.chrome import merge_parts

    folder = Path(options.directory)
    has_theta = (folder / theta.FILE_NAME).is_file()
    if has_theta:
        print(theta.write_report(folder), end="")
    if merge_parts(options.directory):
        print(f"Merged the ranks' timelines in {options.directory}.")
    elif not has_theta or (folder / communication.FILE_NAME).is_file():
        print(communication.write_report(folder), end="")
    return 0


# Functions that add the parser of a command; its `handler` maps the options to an exit code.
COMMANDS = {
    "run": _add_run,
    "demo": add_demo,
    "convert": add_convert,
    "doctor": _add_doctor,
    "build": _add_build,
    "report": _add_report,
    "plan": add_plan,
    "tune": add_tune,
}


def run_apart(arguments: Sequence[str]) -> int:
    """Run a command line in a process that ends with this one; return its exit code.

    What it writes goes to the standard error of this one.
    """
    command = [sys.executable, "-m", "tfscale.launcher.cli", *arguments]
    end_too = functools.partial(mpi_command.set_death_signal, signal.SIGTERM)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=end_too
    ).returncode


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line; `handler` runs it. Exits where the line is wrong."""
    parser = argparse.ArgumentParser(
        prog="tfscale", description="Trains Keras models on several processes."
    )
    parser.set_defaults(run_command=main, run_apart=run_apart)  # for commands that start ranks
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # Add only the command in use: modules of others may import TensorFlow, which takes seconds.
    for name in arguments[:1] if arguments[:1] and arguments[0] in COMMANDS else COMMANDS:
        COMMANDS[name](commands)
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return the exit code."""
    options = parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return int(options.handler(options))
    except ConfigError as error:
        print(f"tfscale: {error}", file=sys.stderr)
        return 2
    except ExchangeError as error:
        print(f"tfscale: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the library is compiled; a job handles signals itself
        return 130


if __name__ == "__main__":
    sys.exit(main())
