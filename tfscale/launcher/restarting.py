"""`tfscale run`: a job that is started, and started again as its rule says."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from tfscale.launcher.attempt import Outcome, StopRequest, run_attempt
from tfscale.launcher.job import thread_variables
from tfscale.launcher.launch import STOP_VARIABLE
from tfscale.launcher.mpi_command import LaunchSpec, Mpi, build_command
from tfscale.launcher.places import Places, spread
from tfscale.launcher.pulse import BEAT_VARIABLE
from tfscale.launcher.restart_rules import (
    WORTHWHILE_S,
    RestartRule,
    check_rule,
    lost_place,
    may_restart,
    next_places,
    pause_s,
)

# How often this job was started again; the script may read it.
RESTART_VARIABLE = "TFSCALE_RESTART"
# Set where the job's output is shown in a terminal: ranks write to a pipe and cannot tell.
TERMINAL_VARIABLE = "TFSCALE_TERMINAL"
_ANSWER_S = 20.0


class Job:
    """A job that is started, and started again as its rule says."""

    def __init__(
        self, spec: LaunchSpec, mpi: Mpi | None, rule: RestartRule, environ: Mapping[str, str]
    ) -> None:
        """Prepare a job.

        Args:
            spec: What to start at first, without the hosts of `rule`.
            mpi: The MPI that is there.
            rule: When and where to start again.
            environ: Environment variables of the launcher.

        Raises:
            ConfigError: The rule does not fit.
        """
        check_rule(rule, spec)
        self._spec, self._mpi, self._rule, self._environ = spec, mpi, rule, environ
        self._places: Places = rule.places or (("", spec.size),)
        self._n_restarts = self._n_short = 0
        # At SIGTERM srun kills the ranks, and mpirun of Open MPI gives them one second; both just
        # pass SIGUSR1 on.
        passes_on = spec.is_slurm or (mpi is not None and mpi.kind == "openmpi")
        self._stop_signal = signal.SIGUSR1 if passes_on else signal.SIGTERM

    def command(self) -> list[str]:
        """Return the command of the next attempt.

        Raises:
            ConfigError: There is nothing to start, no MPI, or no place for all ranks.
        """
        spec = self._next_spec()
        # So that nobody mistakes a rank that was started by hand for one that is looked after.
        watched = (sys.executable, "-m", "tfscale.launcher.rank_process", "--", *spec.command)
        command = watched if spec.command else ()
        return build_command(dataclasses.replace(spec, command=command), self._mpi)

    def _next_spec(self) -> LaunchSpec:
        size = self._spec.size
        if self._n_restarts:
            size = min(size, sum(n for _, n in self._places))
        hosts = spread(self._places, size) if self._rule.places else ()
        spec = dataclasses.replace(self._spec, size=size, hosts=hosts)
        given = dict(spec.environment or {})
        threads = thread_variables(spec, {**self._environ, **given})
        ours = {RESTART_VARIABLE: str(self._n_restarts)}
        if len(hosts) > 1 or spec.hostfile or spec.is_slurm:
            ours[BEAT_VARIABLE] = "1"
        if self._stop_signal != signal.SIGTERM:
            ours[STOP_VARIABLE] = self._stop_signal.name
        if sys.stdout.isatty() and not spec.is_prefixed:  # a bar would overwrite the prefix
            ours[TERMINAL_VARIABLE] = "1"
        return dataclasses.replace(spec, environment={**threads, **given, **ours})

    def run(self) -> int:
        """Run to the end, saying on stderr why an attempt ended.

        Returns:
            The exit code, see docs/operations.md.
        """
        is_slurm = self._spec.is_slurm
        with StopRequest(self._rule.grace_s) as stop:
            while True:
                started = time.monotonic()
                outcome = run_attempt(
                    self.command(), self._environ, stop, self._stop_signal, may_kill=not is_slurm
                )
                is_long = time.monotonic() - started >= WORTHWHILE_S
                self._n_short = 0 if is_long else self._n_short + 1
                if not self._prepare_next(outcome, stop):
                    return outcome.exit_code

    def _prepare_next(self, outcome: Outcome, stop: StopRequest) -> bool:
        """Return whether there is another attempt; say why this one ended, last of all."""
        why = outcome.describe()
        if self._n_restarts >= self._rule.restarts or not may_restart(outcome):
            _say(why)
            return False
        stop.sleep(pause_s(max(0, self._n_short - 1)))
        lost = lost_place(outcome, self._next_spec().hosts)
        places = next_places(self._find_places(), lost, self._rule, self._spec.size)
        if stop.first is not None or places is None:
            few = "" if stop.first else "tfscale: too few hosts are left to start again.\n"
            _say(few + why)
            return False
        self._n_restarts, self._places = self._n_restarts + 1, places
        size = self._next_spec().size
        _say(
            f"{why}tfscale: restart {self._n_restarts} of {self._rule.restarts}, with {size} "
            "ranks.\n"
        )
        return True

    def _find_places(self) -> Places:
        if len(self._places) < 2:
            return self._places  # Starting again shows soon enough whether it answers.
        return tuple((name, n) for name, n in self._places if self._answers(name))

    def _answers(self, host: str) -> bool:
        """Return whether the MPI can start a program on a host."""
        spec = dataclasses.replace(self._spec, command=("true",), size=1, hosts=((host, 1),))
        command = build_command(spec, self._mpi)
        try:
            done = subprocess.run(
                command,
                env=dict(self._environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ANSWER_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is None or done.returncode != 0:
            _say(f"tfscale: host {host} does not answer and is left out.\n")
            return False
        return True


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
