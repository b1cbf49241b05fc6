"""How to start: the command line of each MPI, as pure functions; `job` runs what is built here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tfscale.errors import ConfigError

KINDS = ("mpich", "openmpi", "intel")


@dataclass(frozen=True)
class Mpi:
    """An MPI that can start ranks.

    Attributes:
        kind: One of `KINDS`.
        version: As printed by its mpiexec, such as "5.0.2".
        mpiexec: Absolute path.
    """

    kind: str
    version: str
    mpiexec: str


@dataclass(frozen=True)
class LaunchSpec:
    """What to start.

    Attributes:
        command: Program and arguments of each rank.
        size: Number of ranks, at least 1.
        hosts: (name, number of ranks) pairs; empty means this host.
        hostfile: Path in the MPI's own format; None without.
        is_slurm: Start with srun inside an allocation.
        is_prefixed: Print the rank before each line of output.
        bind_to: "none", "core", "socket" or another word of the MPI; None leaves the choice to us.
        environment: Variables given to every rank.
        is_root: Started by root, which Open MPI refuses unless told otherwise.
        n_cores: Cores of this host.
        cpus_per_task: What the batch script asked Slurm for; its srun does not read that itself.
    """

    command: tuple[str, ...]
    size: int
    hosts: tuple[tuple[str, int], ...] = ()
    hostfile: str | None = None
    is_slurm: bool = False
    is_prefixed: bool = False
    bind_to: str | None = None
    environment: Mapping[str, str] | None = None
    is_root: bool = False
    n_cores: int = 1
    cpus_per_task: str = ""


def _mpich(spec: LaunchSpec, mpi: Mpi) -> list[str]:
    line = [mpi.mpiexec, *(["-prepend-rank"] if spec.is_prefixed else [])]
    for name, value in (spec.environment or {}).items():
        line += ["-genv", name, value]
    if spec.hosts:
        line += ["-hosts", ",".join(f"{name}:{n}" for name, n in spec.hosts)]
    line += ["-f", spec.hostfile] if spec.hostfile else []
    line += ["-bind-to", spec.bind_to] if spec.bind_to else []
    return [*line, "-n", str(spec.size), *spec.command]


def _intel(spec: LaunchSpec, mpi: Mpi) -> list[str]:
    line = [mpi.mpiexec, *(["-prepend-rank"] if spec.is_prefixed else [])]
    environment = dict(spec.environment or {})
    if spec.bind_to == "none":
        environment["I_MPI_PIN"] = "0"
    elif spec.bind_to:
        environment["I_MPI_PIN_DOMAIN"] = spec.bind_to
    for name, value in environment.items():
        line += ["-genv", name, value]
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
    # It counts cores without their threads, or the tasks of an allocation, and refuses more ranks.
    line += [] if is_remote else ["--oversubscribe"]
    line += ["--tag-output"] if spec.is_prefixed else []
    # Its default binds a rank to one core, which leaves TensorFlow one core.
    line += ["--bind-to", spec.bind_to or "none"]
    for name, value in (spec.environment or {}).items():
        line += ["-x", f"{name}={value}"]
    line += ["-H", ",".join(f"{name}:{n}" for name, n in spec.hosts)] if spec.hosts else []
    line += ["--hostfile", spec.hostfile] if spec.hostfile else []
    return [*line, "-np", str(spec.size), *spec.command]


def _nodes(hosts: tuple[tuple[str, int], ...]) -> list[str]:
    words = [f"--nodelist={','.join(name for name, _ in hosts)}", f"--nodes={len(hosts)}"]
    counts = {n for _, n in hosts}  # srun has no way to say unequal ones
    return [*words, *([f"--ntasks-per-node={counts.pop()}"] if len(counts) == 1 else [])]


def _srun(spec: LaunchSpec, mpi: Mpi | None) -> list[str]:
    # srun hands its own environment on; a value in --export could not hold a comma.
    environment = [f"{name}={value}" for name, value in (spec.environment or {}).items()]
    line = [*(["env", *environment] if environment else []), "srun", "--kill-on-bad-exit=1"]
    line += ["--export=ALL"]  # also where the batch script was to get nothing (--export=NONE)
    if mpi is not None:
        line += ["--mpi=pmix" if mpi.kind == "openmpi" else "--mpi=pmi2"]
    line += [f"--ntasks={spec.size}", *(["--label"] if spec.is_prefixed else [])]
    line += [f"--cpus-per-task={spec.cpus_per_task}"] if spec.cpus_per_task else []
    line += [f"--cpu-bind={spec.bind_to}"] if spec.bind_to else []
    line += _nodes(spec.hosts) if spec.hosts else []
    line += [f"--nodefile={spec.hostfile}"] if spec.hostfile else []
    return [*line, *spec.command]


_LINES: dict[str, Callable[[LaunchSpec, Mpi], list[str]]] = {
    "mpich": _mpich,
    "intel": _intel,
    "openmpi": _openmpi,
}


def build_command(spec: LaunchSpec, mpi: Mpi | None) -> list[str]:
    """Build the command line that starts the ranks.

    Args:
        spec: What to start.
        mpi: The MPI that is there; None is enough with srun only.

    Returns:
        The words of the command, mpiexec's or srun's.

    Raises:
        ConfigError: Nothing to start, no rank, hosts given twice, or no MPI.
    """
    if spec.size < 1 or not spec.command:
        raise ConfigError(
            f"A launch needs a program and at least one rank. Received: -np {spec.size}, "
            f"command={list(spec.command)}. Example: tfscale run -np 4 python train.py"
        )
    if spec.hosts and spec.hostfile:
        raise ConfigError(
            f"Hosts come from one place. Received: -H and --hostfile {spec.hostfile}. Give one."
        )
    if spec.is_slurm:
        return _srun(spec, mpi)
    if mpi is None:
        raise ConfigError(
            "Starting ranks needs an MPI. Received: no mpiexec in this environment or on PATH. "
            "Install one (pip install mpich), or use --slurm in an allocation."
        )
    return _LINES[mpi.kind](spec, mpi)


def parse_version(text: str) -> tuple[str, str] | None:
    """Recognise an MPI by what `mpiexec --version` prints.

    Returns:
        (kind, version), or None for an unknown one.
    """
    patterns = (
        ("intel", r"Intel\(R\) MPI Library.*?Version\s+([\d.]+)"),
        ("openmpi", r"\((?:OpenRTE|Open MPI|PRRTE)\)\s+([\d.]+)"),
        ("mpich", r"HYDRA build details:\s+Version:\s+([\w.]+)"),
    )
    for kind, pattern in patterns:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return kind, found.group(1)
    return None


def without_values(command: list[str], variables: Mapping[str, str]) -> list[str]:
    """Return a command for everyone to see: what the user gives in variables may be secret."""
    shown = {f"{name}={value}": f"{name}=..." for name, value in variables.items()}
    pairs = zip(["", *command], command, strict=False)  # as MPICH has it: -genv NAME VALUE
    return ["..." if variables.get(last) == word else shown.get(word, word) for last, word in pairs]
