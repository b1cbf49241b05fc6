"""The hosts of a job: whether ranks can start there, and which of them give no sign of life."""

from __future__ import annotations

import concurrent.futures
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tfscale.comm.places import is_this_host
from tfscale.config import ConfigError, variable_name
from tfscale.launcher.mpi_command import LaunchSpec, Mpi, place_of
from tfscale.launcher.reports import Start

# Seconds that a host has to answer before the start.
PROBE_S = 20.0
# The same while a job waits for it.
_SILENT_S = 10.0
# The start fails after so many times the seconds of the first message.
END_FACTOR = 5
_TRY = "ssh -o BatchMode=yes {host} true"
# Exit codes: of ssh that fails, and of the first of the tests on a host.
_NO_SSH, _FIRST_TEST = 255, 81


def _ssh_of(mpi: Mpi | None, environ: Mapping[str, str]) -> str | None:
    """Return the program by which an mpiexec reaches other hosts; None if it is not ssh."""
    kind = mpi.kind if mpi is not None else ""
    launchers, programs = {
        "mpich": (("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP"), ("HYDRA_LAUNCHER_EXEC",)),
        "intel": (("I_MPI_HYDRA_BOOTSTRAP",), ("I_MPI_HYDRA_BOOTSTRAP_EXEC",)),
    }.get(kind, ((), ()))
    chosen = [environ[name] for name in launchers if environ.get(name)]
    if not launchers or any(name != "ssh" for name in chosen):
        return None
    return next((environ[name] for name in programs if environ.get(name)), "ssh")


def _tests_of(mpi: Mpi, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the commands that each host is given, and what it lacks where one fails."""
    folder, python = Path.cwd(), shlex.quote(sys.executable)
    tests = {
        f"cd {shlex.quote(str(folder))}": f"the working folder {folder} is missing there. Start "
        "from a folder that all hosts share",
        f"command -v {python} >/dev/null": f"{sys.executable} is missing there. Install the same "
        "environment under the same path, or share it",
    }
    if mpi.kind == "mpich":
        helper = Path(mpi.mpiexec).resolve().parent
        tests[f"test -x {shlex.quote(str(helper / 'hydra_pmi_proxy'))}"] = (
            f"hydra_pmi_proxy of MPICH is missing there in {helper}. Install the same MPI under "
            "the same path"
        )
    names = ("PYTHONPATH", "LD_LIBRARY_PATH")
    variables = " ".join(f"{n}={shlex.quote(environ[n])}" for n in names if n in environ)
    test = f"{variables} {python} -c 'import tfscale.launcher.rank_process'"
    return {**tests, test: f"{sys.executable} cannot import tfscale there"}


def _ask(
    names: Sequence[str], ssh: str, command: str, timeout_s: float, what: Mapping[int, str]
) -> dict[str, str]:
    """Run a command on hosts, all at a time; return the faults of those where it fails.

    `what` explains exit codes.
    """

    def ask(host: str) -> str:
        # A password could not be typed: mpiexec has no terminal.
        options = ["-oBatchMode=yes", f"-oConnectTimeout={max(1, round(timeout_s))}"]
        attempt = f"Try: {_TRY.format(host=host)}"
        try:
            done = subprocess.run(
                [ssh, *options, host, command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return f"no answer in {timeout_s:g} s. {attempt}"
        except OSError as error:
            return f"{ssh} cannot be started ({error}). Install an ssh client"
        if done.returncode == 0:
            return ""
        said = " ".join(done.stderr.split())[-300:]
        reason = f"exit code {done.returncode} of a test"
        reason = f"ssh fails. {attempt}" if done.returncode == _NO_SSH else reason
        return what.get(done.returncode, reason) + (f" ({said})" if said else "")

    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        faults = dict(zip(names, pool.map(ask, names), strict=True))
    return {name: fault for name, fault in faults.items() if fault}


def find_silent(names: Sequence[str], mpi: Mpi | None, environ: Mapping[str, str]) -> list[str]:
    """Return the hosts that do not answer by ssh; none where they are reached in another way."""
    ssh = _ssh_of(mpi, environ)
    return [*_ask(names, ssh, "true", _SILENT_S, {})] if ssh and names else []


def check_hosts(
    spec: LaunchSpec,
    mpi: Mpi | None,
    environ: Mapping[str, str],
    timeout_s: float = PROBE_S,
) -> None:
    """Raise ConfigError unless each named host can start ranks of this program, by ssh.

    It is asked for this working folder, this Python, MPI's helper and tfscale; all hosts at a time.
    Nothing is asked where the hosts are not reached by ssh, or where their names are in a file.
    """
    names = [name for name, _ in spec.hosts if not is_this_host(name)]
    ssh = _ssh_of(mpi, environ)
    if not names or ssh is None or mpi is None or spec.is_slurm:
        return
    tests = _tests_of(mpi, environ)
    lines = [f"{test} || exit {code}" for code, test in enumerate(tests, _FIRST_TEST)]
    command = f"sh -c {shlex.quote('; '.join(lines))}"
    faults = _ask(names, ssh, command, timeout_s, dict(enumerate(tests.values(), _FIRST_TEST)))
    if faults:
        listed = "".join(f"\n  {name}: {fault}" for name, fault in faults.items())
        raise ConfigError(
            "-H must name hosts that start ranks, by ssh without a password. Received: "
            f"{len(faults)} that cannot:{listed}\nSee 'Several hosts' in the documentation."
        )


class StartWatch:
    """Watches the start of ranks, for which launchers wait without a limit."""

    def __init__(
        self,
        spec: LaunchSpec,
        limit_s: float,
        find_silent: Callable[[list[str]], list[str]] = lambda names: [],
    ) -> None:
        """Begin to count.

        Args:
            spec: The start; ranks fill its hosts in order.
            limit_s: Seconds without a sign of a host until it is named; the start fails after
                `END_FACTOR` times as long.
            find_silent: Returns which of these hosts do not answer. hydra starts no rank before it
                has heard of all hosts, so that one of them silences the others.
        """
        self._spec, self._limit_s, self._find_silent = spec, limit_s, find_silent
        self._who: tuple[str, str] | None = None
        self._waited_s, self._before = 0.0, time.monotonic()
        self.has_failed = False

    def look(self, starts: Collection[Start]) -> str:
        """Return lines to print, once, and set `has_failed` at the end. Call this often."""
        now = time.monotonic()
        # A process that was stopped (Ctrl-Z) has not waited: what ranks sent meanwhile comes now.
        self._waited_s += min(now - self._before, 1.0)
        self._before = now
        if self._waited_s < self._limit_s or not self._missing(starts):
            return ""
        self.has_failed = self._waited_s >= END_FACTOR * self._limit_s
        if self._who is not None:
            return ""
        self._who = who, remedy = self._name(starts)
        left_s = (END_FACTOR - 1) * self._limit_s
        return (
            f"tfscale: {self._waited_s:.0f} s without a sign of {who}. {remedy} The job ends if "
            f"there is none in another {left_s:.0f} s ({variable_name('start_s')}).\n"
        )

    def describe(self, starts: Collection[Start], exit_code: int) -> str:
        """Return why a job ended in which no rank failed; "" where all ranks had started."""
        if not self._missing(starts):
            return ""
        if self._who is None or not self.has_failed:
            self._who = self._name(starts)
        who, remedy = self._who
        if self.has_failed:
            return f"tfscale: {self._waited_s:.0f} s without a sign of {who}. {remedy}\n"
        return (
            f"tfscale: the launcher ended with exit code {exit_code} before the start of {who}. "
            f"{remedy}\n"
        )

    def _missing(self, starts: Collection[Start]) -> list[int]:
        if any(start.size != self._spec.size for start in starts):
            return []  # ranks that do not find each other: tfscale.init says so
        started = {start.rank for start in starts}
        return [rank for rank in range(self._spec.size) if rank not in started]

    def _name(self, starts: Collection[Start]) -> tuple[str, str]:
        """Return the hosts, or ranks, without a sign, and what to try."""
        missing = {rank: self._host_of(rank) for rank in self._missing(starts)}
        hosts = [name for name in dict.fromkeys(missing.values()) if name]
        hosts = self._find_silent(hosts) or hosts
        named = [rank for rank, name in missing.items() if name in hosts or not hosts]
        ranks = f"rank{'s' if len(named) > 1 else ''} {_listed(map(str, named))}"
        if hosts:
            who = f"host{'s' if len(hosts) > 1 else ''} {_listed(hosts)} ({ranks})"
            return who, f"Try: {_TRY.format(host=hosts[0])} ('Several hosts' in the documentation)."
        if self._spec.is_slurm:
            return ranks, "srun may wait for nodes, or for another step: see squeue --steps."
        return ranks, "See the launcher's messages above; `tfscale doctor` tests the start."

    def _host_of(self, rank: int) -> str:
        """Return the other host on which a rank starts; "" for this one, or an unknown one."""
        name, _ = place_of(rank, self._spec.hosts)
        return "" if is_this_host(name) else name


def _listed(names: Iterable[str]) -> str:
    first, *more = [*names][:9]
    return ", ".join([first, *more[:7], *(["..."] if len(more) > 7 else [])])
