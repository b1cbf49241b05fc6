"""Start ranks with the installed MPI: places, command lines, variables, processes of a job."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfscale.comm.places import Places, is_this_host, listed
from tfscale.comm.process import SLURM_VARIABLES
from tfscale.config import ConfigError, setting
from tfscale.native.compiler import find_tool


def place_of(rank: int, hosts: Places) -> tuple[str, int]:
    """Return the host on which a rank starts, and its number of ranks; ("", 1) for this host."""
    for name, n_ranks in hosts:
        if rank < n_ranks:
            return name, n_ranks
        rank -= n_ranks
    return "", 1


@dataclass(frozen=True)
class Mpi:
    """An MPI that can start ranks: "mpich", "openmpi" or "intel", and the path of its mpiexec."""

    kind: str
    version: str
    mpiexec: str


@dataclass(frozen=True)
class LaunchSpec:
    """A program to start on several ranks, and the way to start it."""

    command: tuple[str, ...]  # program and arguments of each rank
    size: int  # ranks, at least 1
    hosts: Places = ()  # empty means this host
    hostfile: str | None = None  # in the MPI's own format
    is_slurm: bool = False  # start with srun inside an allocation
    is_prefixed: bool = False  # print the rank before each line of output
    bind_to: str | None = None  # "none", "core", "socket" or another word of the MPI; None: default
    environment: Mapping[str, str] | None = None  # for every rank; see `variables_of`
    is_root: bool = False  # started by root, which Open MPI refuses without an option
    n_cores: int = 1  # of this host
    has_stdin: bool = False  # rank 0 reads the launcher's standard input
    cpus_per_task: str = ""  # requested by the batch script; srun does not read that itself


def _mpich(spec: LaunchSpec, mpi: Mpi) -> list[str]:
    line = [mpi.mpiexec, *(["-prepend-rank"] if spec.is_prefixed else [])]
    line += ["-hosts", listed(spec.hosts)] if spec.hosts else []
    line += ["-f", spec.hostfile] if spec.hostfile else []
    line += ["-bind-to", spec.bind_to] if spec.bind_to else []
    return [*line, "-n", str(spec.size), *spec.command]


def _intel(spec: LaunchSpec, mpi: Mpi) -> list[str]:
    line = [mpi.mpiexec, *(["-prepend-rank"] if spec.is_prefixed else [])]
    line += ["-f", spec.hostfile] if spec.hostfile else []
    if not spec.hosts:
        return [*line, "-n", str(spec.size), *spec.command]
    # One argument set per host: -hosts takes no numbers here, and -ppn is the same for all.
    for position, (name, n_ranks) in enumerate(spec.hosts):
        line += [":"] if position else []
        line += ["-host", name, "-n", str(n_ranks), *spec.command]
    return line


def _openmpi(spec: LaunchSpec, mpi: Mpi) -> list[str]:
    line = [mpi.mpiexec, *(["--allow-run-as-root"] if spec.is_root else [])]
    is_remote = bool(spec.hosts or spec.hostfile)
    # Open MPI refuses more ranks than cores (not threads), or than tasks of an allocation.
    line += [] if is_remote else ["--oversubscribe"]
    line += ["--tag-output"] if spec.is_prefixed else []
    # Its default binds a rank to one core, which leaves TensorFlow one core.
    line += ["--bind-to", spec.bind_to or "none"]
    for name in spec.environment or {}:  # mpirun reads the values from its own environment
        line += ["-x", name]
    line += ["-H", listed(spec.hosts)] if spec.hosts else []
    line += ["--hostfile", spec.hostfile] if spec.hostfile else []
    return [*line, "-np", str(spec.size), *spec.command]


def _srun(spec: LaunchSpec, mpi: Mpi | None) -> list[str]:
    # Pass on srun's whole environment, even if the batch script was started with --export=NONE.
    line = ["srun", "--kill-on-bad-exit=1", "--export=ALL"]
    if mpi is not None:
        line += ["--mpi=pmix" if mpi.kind == "openmpi" else "--mpi=pmi2"]
    line += [f"--ntasks={spec.size}", *(["--label"] if spec.is_prefixed else [])]
    line += [f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []
    line += [f"--cpu-bind={spec.bind_to}"] if spec.bind_to else []
    if spec.hosts:
        names = ",".join(name for name, _ in spec.hosts)
        line += [f"--nodelist={names}", f"--nodes={len(spec.hosts)}"]
        counts = {n for _, n in spec.hosts}  # srun has no option for unequal numbers
        line += [f"--ntasks-per-node={counts.pop()}"] if len(counts) == 1 else []
    line += [f"--nodefile={spec.hostfile}"] if spec.hostfile else []
    # Its default sends the input to all ranks.
    line += ["--input=0" if spec.has_stdin else "--input=none"]
    return [*line, *spec.command]


def build_command(spec: LaunchSpec, mpi: Mpi | None) -> list[str]:
    """Return the words of the mpiexec or srun command that starts the ranks.

    Run it with `variables_of(spec, mpi)` in its environment, which every launcher passes on to the
    ranks; in its arguments other users could read them. `mpi` may be None with srun only.
    """
    if spec.size < 1 or not spec.command:
        raise ConfigError(
            f"-np must be 1 or more, and command a program. Received: -np {spec.size}, "
            f"command={list(spec.command)}. Example: tfscale run -np 4 python train.py"
        )
    if spec.is_slurm:
        return _srun(spec, mpi)
    if mpi is None:
        raise ConfigError(
            "Could not find an MPI. Received: no mpiexec in this environment or on PATH. "
            "Install one (pip install mpich), or use --slurm in an allocation."
        )
    return {"mpich": _mpich, "intel": _intel, "openmpi": _openmpi}[mpi.kind](spec, mpi)


def parse_version(text: str) -> tuple[str, str] | None:
    """Return kind and version of an MPI from the output of `mpiexec --version`, or None."""
    patterns = (
        ("intel", r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)"),
        ("openmpi", r"\((?:OpenRTE|Open MPI|PRRTE)\)\s+([\d.]+)"),
        ("mpich", r"HYDRA build details:\s+Version:\s+([\w.]+)"),
    )
    for kind, pattern in patterns:
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return kind, match.group(1)
    return None


def variables_of(spec: LaunchSpec, mpi: Mpi | None) -> dict[str, str]:
    """Return the environment variables for the launcher of `spec`, which all ranks inherit."""
    variables = dict(spec.environment or {})
    if mpi is not None and mpi.kind == "intel" and spec.bind_to:
        is_none = spec.bind_to == "none"
        variables |= {"I_MPI_PIN": "0"} if is_none else {"I_MPI_PIN_DOMAIN": spec.bind_to}
    return variables


# Option that precedes the words of a command as JSON, see `quote`.
WORDS_OPTION = "--words"


def quote(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that pass a command to `rank_process` through mpiexec.

    A word ":" anywhere ends the command for every mpiexec, so such a command is sent as JSON.
    """
    return (WORDS_OPTION, json.dumps(list(command))) if ":" in command else ("--", *command)


# Set for the processes beside ranks if rank 0 reads the standard input of `tfscale run`.
STDIN_VARIABLE = "TFSCALE_STDIN"
# Every process of a job has this variable, so that all are found at its end.
JOB_VARIABLE = "TFSCALE_JOB"


def run_within(
    timeout_s: float, command: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a command without input; None if it cannot be started, or does not end in time."""
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def find_mpi(mpiexec: str | None = None) -> Mpi | None:
    """Return the MPI of an mpiexec, by default that of this environment, a wheel or PATH."""
    path = mpiexec or find_tool("mpiexec")
    done = run_within(30.0, [path, "--version"]) if path else None
    version = parse_version(done.stdout + done.stderr) if done else None
    return Mpi(*version, path) if path and version else None


def choose_mpi(mpiexec: str | None, is_slurm: bool) -> Mpi | None:
    """Return the MPI that starts a job, or None where there is none, or srun needs none."""
    mpi = find_mpi(mpiexec)
    path = mpiexec or (None if is_slurm else find_tool("mpiexec"))
    if mpi is None and path is not None:
        raise ConfigError(
            "mpiexec must be that of MPICH, Open MPI or Intel MPI, which its --version tells. "
            f"Received: {path}, which is another one or cannot be run. Name one with --mpiexec, "
            "install one (pip install mpich), or use --slurm in an allocation."
        )
    return mpi


# Host files that mpiexec reads although no option names them.
_HOST_FILES = (
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"),
    *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
)


def has_other_hosts(spec: LaunchSpec, environ: Mapping[str, str]) -> bool:
    """Return whether the user or a scheduler may place ranks on other hosts.

    mpiexec itself reads the host lists of PBS, LSF and Grid Engine, and files named by variables.
    """
    if spec.hosts:
        return not all(is_this_host(name) for name, _ in spec.hosts)
    hosts = set(environ.get("LSB_MCPU_HOSTS", "").split()[::2])  # "host1 2 host2 2"
    for name in ("PBS_NODEFILE", "PE_HOSTFILE"):
        with contextlib.suppress(OSError):  # not in such a job, or not on its first host
            lines = Path(environ.get(name, "")).read_text().splitlines()
            hosts |= {line.split()[0] for line in lines if line.strip()}
    is_slurm = spec.is_slurm or environ.get("HYDRA_LAUNCHER") == "slurm"
    has_file = bool(spec.hostfile) or any(environ.get(name) for name in _HOST_FILES)
    return is_slurm or has_file or len(hosts) > 1


def thread_variables(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that share the cores of a host among its ranks.

    Without them each rank starts a thread per core. An operation gets cores / ranks-per-host
    threads, at least 1; at least 2 operations run at a time, which overlapping communication needs.
    Variables in `environ` are not changed. Empty for one rank, with TFSCALE_SET_THREADS=0, and
    where ranks may be on other hosts, whose cores are unknown here: `tfscale.init` then sets the
    threads.
    """
    if not setting("set_threads", environ) or spec.size < 2 or has_other_hosts(spec, environ):
        return {}
    threads = max(1, spec.n_cores // spec.size)
    wanted = {
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": max(2, threads),
    }
    return {name: str(value) for name, value in wanted.items() if name not in environ}


def loopback_variables(
    spec: LaunchSpec, mpi: Mpi | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return variables that let MPICH listen on the loopback interface only, for ranks of one host.

    An interface that the user chose in `environ` stays.
    """
    if mpi is None or mpi.kind != "mpich" or has_other_hosts(spec, environ):
        return {}
    wanted = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    return {name: value for name, value in wanted.items() if name not in environ}


def allocation_variables(
    spec: LaunchSpec, mpi: Mpi | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return variables without which a Slurm allocation would change, or prevent, the start.

    With `--slurm` see `process.SLURM_VARIABLES`. Without it, mpiexec takes variables of Slurm, also
    old ones of a job that has ended, as a request to start ranks by srun on all its nodes; its
    usual start is named instead. Variables in `environ` are not changed.
    """
    kind = mpi.kind if mpi is not None else ""
    if spec.is_slurm:
        wanted = SLURM_VARIABLES if kind == "mpich" else {}
    elif any(name.startswith("SLURM_") for name in environ):
        wanted = _WITHOUT_SLURM.get(kind, {})
    else:
        wanted = {}
    return {name: value for name, value in wanted.items() if name not in environ}


_WITHOUT_SLURM = {
    "mpich": {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"},
    "intel": {"I_MPI_HYDRA_BOOTSTRAP": "ssh"},
    # Open MPI 4, and 5.
    "openmpi": dict.fromkeys(
        ("OMPI_MCA_plm", "OMPI_MCA_ras", "PRTE_MCA_plm", "PRTE_MCA_ras"), "^slurm"
    ),
}


def new_job(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return the id of a new job, and the environment with it."""
    job = uuid.uuid4().hex
    return job, {**environ, JOB_VARIABLE: job}


def find_processes(job: str, variable: str = JOB_VARIABLE) -> list[int]:
    """Return the ids of this host's processes that belong to a job, zombies left out.

    They inherit the variable, whose value is the id of the job.
    """
    marker = f"{variable}={job}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            # A zombie's environment is empty.
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def end_processes(
    job: str,
    grace_s: float = 2.0,
    keep: Callable[[int], bool] = lambda pid: False,
    variable: str = JOB_VARIABLE,
) -> None:
    """End the processes of a job: SIGTERM first, SIGKILL after `grace_s`; wait until none is left.

    Processes whose id satisfies `keep` are left running.
    """

    def find() -> list[int]:
        return [pid for pid in find_processes(job, variable) if not keep(pid)]

    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        left = find()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = find()
        if not left:
            return


def set_death_signal(number: int) -> None:
    """Let this process get a signal when its parent ends; for `preexec_fn`."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
