"""`tfscale.run`: ranks for a function of a running program or of a notebook's cell.

Between the caller and the ranks is one more process, `python -m tfscale.launcher.from_python`. It
does what `tfscale run` does: it starts the ranks, watches them and starts them again. It gets the
caller's signals, and ends with the caller. The caller reads what the ranks write from pipes, as
`sys.stdout` of a notebook is no file.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import inspect
import json
import os
import selectors
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tfscale.comm.places import parse_places, require_hosts
from tfscale.comm.process import discover
from tfscale.config import (
    PREEMPTED,
    ConfigError,
    ExchangeError,
    RankError,
    check_integer,
    environment,
    read_size,
    require,
    variable_name,
)
from tfscale.exchange import EXCHANGES
from tfscale.files import read_json, write_atomically
from tfscale.launcher import agent, call, mpi_command
from tfscale.launcher.hosts import END_FACTOR
from tfscale.launcher.restarting import TERMINAL_VARIABLE

_LOOK_S = 0.1
_OPTIONS, _END = "options.json", "end.json"
_DEFAULT_SIZE = 4
_CLUSTER = "Name the hosts that are reserved for the job, a job does not grow."
_SSH = "Write it into ~/.ssh/config."
_MPI = "Set a variable of the MPI, by env={...}: see 'Unattended jobs' in the documentation."
# Arguments of horovod.run that have another name here, are not needed, or are refused.
_RENAMED = {
    "num_proc": "np",
    "min_num_proc": "min_np",
    "reset_limit": "restarts",
    "start_timeout": "start_timeout",
}
_NOT_NEEDED = ("disable_cache", "use_gloo", "use_mpi")
_REFUSED = {
    "max_num_proc": _CLUSTER,
    "max_np": _CLUSTER,
    "slots": _CLUSTER,
    "cooldown_range": _CLUSTER,
    "ssh_port": _SSH,
    "ssh_identity_file": _SSH,
    "output_filename": "Use output_prefix=True, or write files in the function.",
    "mpi_args": _MPI,
    "network_interface": _MPI,
    "executable": "Ranks run the Python of the caller: call tfscale.run in the other one.",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    hostfile: str | None = None,
    slurm: bool = False,
    distribute: bool = False,
    exchange: str | None = None,
    batch_norm: str | None = None,
    seed: int | None = None,
    verify: str | int | None = None,
    decode: str | None = None,
    shard_embeddings: str | int | None = None,
    all_output: bool = False,
    output_prefix: bool = False,
    env: Mapping[str, str] | None = None,
    metrics: str | None = None,
    restarts: int | None = None,
    min_np: int | None = None,
    grace_s: float = 30.0,
    bind_to: str | None = None,
    mpiexec: str | None = None,
    quiet: bool = False,
    verbose: bool = False,
    **horovod: Any,
) -> list[Any]:
    """Call a function on ranks that are started for it, and return its results by rank.

    It works in a script, with or without `if __name__ == "__main__"`, and in a notebook's cell. The
    function may be one of the script or the cell, a lambda or a closure; cloudpickle sends it with
    the variables that it uses. Ranks are new processes: they import no script of the caller, and
    nothing of the caller's TensorFlow and Keras is there. They have the caller's working folder,
    environment variables, `sys.path` and `sys.argv`. What rank 0 prints is shown while it runs.
    Ranks end with this call: at Ctrl-C, at an interrupt of the notebook's kernel, and when this
    process ends.

    Args:
        func: Called as `func(*args, **kwargs)` on every rank, where it begins with
            `tfscale.init()` unless `distribute` is given.
        args: Arguments by position; cloudpickle must be able to send them.
        kwargs: Arguments by name.
        np: Number of ranks; 4 by default, and that of the allocation with `slurm`.
        hosts: Hosts with their numbers of ranks, "host1:2,host2:2"; by default this one. All hosts
            must share the working folder, through which function and results are sent.
        hostfile: A file of hosts, in the MPI's own format.
        slurm: Start ranks by srun, within an allocation.
        distribute: Call `tfscale.distribute` before the function, so that Keras code for one
            process trains on all ranks.
        exchange: For `distribute`: the name of an exchange, such as "auto".
        batch_norm: For `distribute`: "global" or "local".
        seed: For `distribute`: seed of Python, NumPy, TensorFlow and Keras.
        verify: For `distribute`: steps to verify, "off", "first" or a number.
        decode: For `distribute`: what a rank makes of a `tf.data.Dataset`, "rows" or "batches".
        shard_embeddings: For `distribute`: size of a table, such as "100MB", from which on its rows
            are spread over the ranks.
        all_output: Show what ranks other than 0 print, too. Standard error is always shown.
        output_prefix: Print the rank before each line.
        env: Environment variables of the ranks in addition to those of this process.
        metrics: Where rank 0 serves metrics of the training for Prometheus: ":9464" on this host
            alone, or "HOST:PORT".
        restarts: Call the function again after a failure, at most this many times (0).
        min_np: Restarts may leave out the place of a rank that failed, down to so many ranks.
        grace_s: Seconds that ranks have to end after an interrupt.
        bind_to: "none", "core", "socket" or another word of the MPI.
        mpiexec: Path of the mpiexec to use.
        quiet: Print no numbers of the training at the end.
        verbose: Print the command of the MPI, and TensorFlow's start-up messages.
        **horovod: Other arguments of `horovod.run`: `num_proc`, `min_num_proc`, `reset_limit` and
            `start_timeout` (seconds) have an effect; those that have none here are refused.

    Returns:
        The results, one for each rank in order, of any size. Objects of the
        caller's classes keep their class.

    Raises:
        ConfigError: An argument is invalid, or cannot be pickled (the text names the variable); a
            host cannot start ranks; or this process is a rank itself.
        ExchangeError: The library cannot be compiled.
        RankError: The function failed on a rank, or did not return. The text has the tracebacks,
            `rank` is the first that failed, and `__cause__` its exception.
        KeyboardInterrupt: The call was interrupted; all ranks have ended.

    Examples:
        >>> def train(rate):
        ...     tfscale.init()
        ...     total = tfscale.allreduce(rate, op=tfscale.Sum)
        ...     return tfscale.rank(), float(total)
        >>> tfscale.run(train, args=(0.5,), np=2)
        [(0, 1.0), (1, 1.0)]
    """
    options = {**locals()}
    for name in ("func", "args", "kwargs"):
        del options[name]
    options |= options.pop("horovod")
    return call_on_ranks(func, args, kwargs, options)


class Nodes(Protocol):
    """Other hosts that the caller of a job reaches in its own way, without ssh or shared files."""

    def serve(self, folder: Path) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        """Start processes on nodes while this context is open; enter with options of the job.

        These are `hosts`, `env` (a mapping) and `places_from`, the address at which
        `agent.ask_places` asks for the places of a restart. `folder` has the function. When the
        context is left, the results are there.
        """


def call_on_ranks(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    arguments: Mapping[str, Any],
    nodes: Nodes | None = None,
) -> list[Any]:
    """Call a function on ranks as `run` does; see there.

    Args:
        func: The function.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        arguments: Other arguments of `run` by name; those that are missing have their defaults.
        nodes: Where ranks start, instead of hosts that share the working folder.
    """
    _require_no_rank()
    parameters = inspect.signature(run).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty}
    for name in ("args", "kwargs"):
        del options[name]
    horovod = _read_horovod({n: v for n, v in arguments.items() if n not in options})
    options |= {**{n: v for n, v in arguments.items() if n in options}, **horovod}
    require(callable(func), "func", "a function", func)
    if options["distribute"]:
        _check_choices(*(options[name] for name in ("exchange", "batch_norm", "verify", "decode")))
        if options["shard_embeddings"] is not None:
            read_size(options["shard_embeddings"], "shard_embeddings")
    variables = {str(name): str(value) for name, value in (options["env"] or {}).items()}
    if (start_s := options.pop("start_timeout", None)) is not None:
        variables[variable_name("start_s")] = str(start_s / END_FACTOR)
    size = options.pop("np")
    size = _DEFAULT_SIZE if size is None and not options["slurm"] else size
    all_output = options["all_output"]
    options |= {
        "size": size if size is None else check_integer("np", size, 1),
        "all_output": all_output and options["distribute"],
        "restarts": options["restarts"] or 0,
        "verbose": bool(options["verbose"]),
    }
    places = options["hosts"], options["hostfile"], options["slurm"]
    shared = None if nodes is not None else _shared_folder(*places, variables)
    with tempfile.TemporaryDirectory(
        prefix=".tfscale-run-" if shared else "tfscale-run-", dir=shared, ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        call.write_call(folder, func, args, kwargs or {}, all_output)
        command = [sys.executable, "-m", call.__name__, *([] if nodes is not None else [name])]
        with contextlib.nullcontext({}) if nodes is None else nodes.serve(folder) as added:
            options |= {**added, "command": command}
            env = {**added.get("env", {}), **variables}
            options["env"] = [f"{name}={value}" for name, value in env.items()]
            write_atomically(folder / _OPTIONS, json.dumps(options))
            code, was_interrupted = _run_starter(
                folder, not options["output_prefix"], None if nodes is None else os.sep
            )
        if was_interrupted:
            raise KeyboardInterrupt
        return _read_end(folder, code)


def _require_no_rank() -> None:
    environ = environment()
    launch = discover(environ)
    # A process that srun started alone, as servers of notebooks may be, is no rank of a job.
    if launch is not None and (launch.size > 1 or mpi_command.JOB_VARIABLE in environ):
        raise ConfigError(
            "tfscale.run starts ranks, and its caller must not be one. Received: a call on rank "
            f"{launch.rank} of {launch.size}. Call the function itself there, or start the program "
            "by `python` alone."
        )


def _read_horovod(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `horovod.run` that were given, under their names here."""
    for name, value in arguments.items():
        if name not in (*_RENAMED, *_NOT_NEEDED, *_REFUSED):
            raise TypeError(f"run() got an unexpected keyword argument {name!r}")
        if name in _REFUSED and value is not None:
            raise ConfigError(
                f"{name} is an argument of horovod.run that has no meaning here. Received: "
                f"{name}={value!r}. {_REFUSED[name]}"
            )
    return {_RENAMED[n]: v for n, v in arguments.items() if n in _RENAMED and v is not None}


def _check_choices(exchange: Any, batch_norm: Any, verify: Any, decode: Any) -> None:
    names = ", ".join(EXCHANGES)
    remedy = "Others are arguments of tfscale.distribute, which the function may call itself."
    is_choice = exchange is None or (isinstance(exchange, str) and exchange in EXCHANGES)
    require(is_choice, "exchange", f"one of {names}", exchange, remedy)
    is_choice = batch_norm in (None, "global", "local")
    require(is_choice, "batch_norm", "'global' or 'local'", batch_norm)
    is_choice = verify in (None, "off", "first") or (type(verify) is int and verify > 0)
    require(is_choice, "verify", "'off', 'first' or a number of steps", verify)
    require(decode in (None, "rows", "batches"), "decode", "'rows' or 'batches'", decode)


def _shared_folder(
    hosts: str | None, hostfile: str | None, slurm: bool, variables: Mapping[str, str]
) -> Path | None:
    """Return the working folder if ranks may be on other hosts, else None."""
    places = parse_places(require_hosts(hosts, "hosts")) if hosts else ()
    spec = mpi_command.LaunchSpec((), 1, hosts=places, hostfile=hostfile, is_slurm=slurm)
    has_others = mpi_command.has_other_hosts(spec, {**environment(), **variables})
    return Path.cwd() if has_others else None


# The process between the caller and the ranks.


def _run_starter(folder: Path, is_terminal: bool, start_in: str | None) -> tuple[int, bool]:
    """Run the process that starts the ranks; return its exit code, and whether Ctrl-C ended it.

    Launchers need its working folder, `start_in` or the caller's, on every host.
    """
    environ = dict(environment())
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *path)
    if package not in (*folders, site.getusersitepackages()):  # found by the caller's sys.path only
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package, *path]))
    if is_terminal and sys.stdout is not None and sys.stdout.isatty():
        environ[TERMINAL_VARIABLE] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder), str(os.getpid())],
        env=environ,
        cwd=start_in,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches it once, through this process
    )
    try:
        return _show_output(process)
    finally:
        if process.poll() is None:  # an error of this process, such as a closed output
            for number in (signal.SIGTERM, signal.SIGINT):  # the second leaves ranks no time
                process.send_signal(number)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        process.wait()


def _show_output(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Write what the ranks write to sys.stdout and sys.stderr, until the process has ended."""
    was_interrupted = False
    with selectors.DefaultSelector() as selector:
        for name in ("stdout", "stderr"):
            pipe = getattr(process, name)
            os.set_blocking(pipe.fileno(), False)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            selector.register(pipe, selectors.EVENT_READ, (name, decoder))
        while True:
            try:
                code = process.poll()
                ready = selector.select(_LOOK_S if code is None else 0)
                for key, _ in ready:
                    name, decoder = key.data
                    if not (data := os.read(key.fd, 1 << 16)):
                        selector.unregister(key.fileobj)
                    elif (stream := getattr(sys, name)) is not None:
                        stream.write(decoder.decode(data))
                        stream.flush()
                # Not until the pipes' end: a process that a rank left may hold them open.
                if code is not None and not ready:
                    return code, was_interrupted
            except KeyboardInterrupt:
                was_interrupted = True
                process.send_signal(signal.SIGINT)


def _read_end(folder: Path, code: int) -> list[Any]:
    """Return the results of all ranks, or raise the error that the call has ended with."""
    end = read_json(folder / _END)
    if not end:
        raise RankError(
            "No results: the process that starts ranks has ended. Received: its exit code "
            f"{code}. If no program has ended it, see the messages above."
        )
    for kind in (ConfigError, ExchangeError):
        if end.get("error") == kind.__name__:
            raise kind(end["text"])
    rank, attempt, code = end["rank"], end["attempt"], end["exit_code"]
    if code == PREEMPTED:
        raise RankError(
            f"ranks were asked to save and stop, and have done so. Received: exit code {code}. "
            "Call tfscale.run again to continue.",
            exit_code=code,
        )
    if code != 0:
        text = end["text"] or f"tfscale: the ranks ended with exit code {code}.\n"
        if rank is None:
            raise RankError(text, exit_code=code)
        cause = call.read_error(folder, attempt, rank)
        reason = f": {type(cause).__name__}: {cause}" if cause else ""
        raise RankError(f"rank {rank} failed{reason}\n{text}", rank=rank, exit_code=code) from cause
    results = []
    for rank in range(end["size"]):
        try:
            results.append(call.read_result(folder, attempt, rank))
        except FileNotFoundError:
            _raise_no_result(rank)
    return results


def _raise_no_result(rank: int) -> NoReturn:
    raise RankError(
        f"rank {rank} ended before the function returned. Received: exit status 0. Return a "
        "value instead of calling sys.exit().",
        rank=rank,
    )


def main(folder: Path, caller: int) -> None:
    """Start the ranks of a call, and write down how they ended; end when the caller does."""
    # Until the job handles it; `finally` below then removes the files that the caller has left.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    mpi_command.set_death_signal(signal.SIGTERM)
    try:
        if os.getppid() == caller:
            write_atomically(folder / _END, json.dumps(_run_job(folder)))
    finally:
        if os.getppid() != caller:
            address = (read_json(folder / _OPTIONS) or {}).get("places_from")
            for left in (folder, *([Path(address).parent] if address else [])):
                shutil.rmtree(left, ignore_errors=True)


def _run_job(folder: Path) -> dict[str, Any]:
    """Run the job of a call to its end; return how it ended, for `_read_end`."""
    # Imported here: the caller of `run` needs no other commands.
    from tfscale.launcher import cli

    options = cli.parse(["run"])
    vars(options).update({"places_from": None, **read_json(folder / _OPTIONS)})
    address = options.places_from
    try:
        ask = functools.partial(agent.ask_places, address) if address else None
        job = cli.prepare_job(options, ask)
        outcome = job.run_attempts()
    except (ConfigError, ExchangeError) as error:
        kind = ConfigError if isinstance(error, ConfigError) else ExchangeError
        return {"error": kind.__name__, "text": str(error)}
    if outcome.was_stopped or outcome.exit_code == 0:  # else it is the text of an error
        sys.stderr.write(outcome.describe() + ("" if options.quiet else outcome.closing))
    return {
        "exit_code": outcome.exit_code,
        "rank": outcome.failure.rank if outcome.failure else None,
        "text": outcome.describe(),
        "attempt": job.n_restarts,
        "size": job.size,
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), int(sys.argv[2]))
