"""Run a job, and restart it after a failure as its rule allows."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tfscale.comm.places import Places, spread
from tfscale.comm.process import STOP_VARIABLE
from tfscale.config import PREEMPTED, ConfigError, require, setting
from tfscale.launcher import hosts, mpi_command
from tfscale.launcher.attempt import Outcome, StopRequest, run_attempt
from tfscale.launcher.reports import BEAT_VARIABLE

_MAX_PAUSE_S = 60.0
# After an attempt that lasted this long the next pause is short again.
WORTHWHILE_S = 60.0


@dataclass(frozen=True)
class RestartRule:
    """Limits of restarts: their number, ranks and places."""

    restarts: int = 0
    min_ranks: int | None = None  # None: as many as at first
    places: Places = ()  # spare ones included; empty for this host alone
    grace_s: float = 30.0  # time of ranks to end after a signal to the launcher


def check_rule(rule: RestartRule, spec: mpi_command.LaunchSpec) -> None:
    """Raise ConfigError for numbers outside of their range, and for --min-np under Slurm."""
    require(rule.restarts >= 0, "--restarts", "0 or more", rule.restarts)
    require(rule.grace_s >= 0, "--grace-s", "0 or more", rule.grace_s)
    if spec.has_stdin and rule.restarts:
        raise ConfigError(
            "--stdin excludes --restarts: input is read once. Received: --stdin with --restarts "
            f"{rule.restarts}. Leave one of them out, or let the script read a file."
        )
    if rule.min_ranks is None:
        return
    allowed = f"in [1, {spec.size}], the number of ranks"
    require(1 <= rule.min_ranks <= spec.size, "--min-np", allowed, rule.min_ranks)
    if spec.is_slurm:
        raise ConfigError(
            "--min-np excludes --slurm. Received: --min-np with --slurm. Leave it out, and let "
            "Slurm requeue the job where a host is lost: see 'Slurm' in the documentation."
        )


def may_restart(outcome: Outcome) -> bool:
    """Return whether another attempt could succeed.

    It could not after success, preemption, a signal to `tfscale run`, or where all ranks left the
    job together; nor after a rank failed before `tfscale.init`, for example by a wrong argument or
    a missing module, unless it failed while waiting there for other ranks.
    """
    if outcome.was_stopped or outcome.is_orderly or outcome.exit_code in (0, PREEMPTED):
        return False
    failure = outcome.failure
    if failure is None or failure.is_lost:
        return True
    return failure.has_joined or failure.is_told or failure.signal is not None


def pause_s(n_short: int) -> float:
    """Return the seconds to wait after a number of consecutive short attempts: 1, 2, 4, ... 60."""
    return min(_MAX_PAUSE_S, 2.0 ** min(n_short, 10))


def lost_place(outcome: Outcome, hosts: Places) -> tuple[str, int] | None:
    """Return the place that `--min-np` allows to leave out after a failure: (host, ranks).

    That is the host of the failed rank with all its ranks, or one place of this host if `hosts` is
    empty. None if no rank is the cause.
    """
    if outcome.failure is None or outcome.failure.is_told:
        return None
    return mpi_command.place_of(outcome.failure.rank, hosts)


def next_places(
    places: Places, lost: tuple[str, int] | None, rule: RestartRule, size: int
) -> Places | None:
    """Return the places of the next attempt, or None; `places` are those on hosts that answer.

    Without `min_ranks` these are all places, if they suffice for `size` ranks. With it, the places
    without the lost one if they suffice for `min_ranks`, else all if these suffice.
    """
    candidates = [places]
    if rule.min_ranks is not None and lost is not None:
        # A named host loses all its places, also those without a rank.
        gone = 10**9 if lost[0] else lost[1]
        kept = [(name, n - gone if name == lost[0] else n) for name, n in places]
        candidates.insert(0, tuple((name, n) for name, n in kept if n > 0))
    fewest = size if rule.min_ranks is None else rule.min_ranks
    return next((c for c in candidates if sum(n for _, n in c) >= fewest), None)


# Number of restarts of this job so far; the script may read it.
RESTART_VARIABLE = "TFSCALE_RESTART"
# Set if the job's output is shown in a terminal; ranks write to a pipe, so they cannot detect it.
TERMINAL_VARIABLE = "TFSCALE_TERMINAL"
# TensorFlow's level of messages; see also `ReportReader`.
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ANSWER_S = 20.0
# Returns places; its argument is a function that says whether the job is to end.
AskPlaces = Callable[[Callable[[], bool]], Places]


class Job:
    """A job that runs in one or more attempts.

    Attributes:
        n_restarts: Number of restarts so far.
    """

    def __init__(
        self,
        spec: mpi_command.LaunchSpec,
        mpi: mpi_command.Mpi | None,
        rule: RestartRule,
        environ: Mapping[str, str],
        is_verbose: bool = False,
        closes: bool = True,
        ask_places: AskPlaces | None = None,
    ) -> None:
        """Prepare a job from its first start (without the hosts of `rule`) and the environment.

        Raises ConfigError if the rule does not fit. `is_verbose` shows TensorFlow's start-up
        messages; `closes` prints the numbers of the training at the end of the job; `ask_places`
        returns the places of a restart, by default those of `rule` on hosts that answer.
        """
        check_rule(rule, spec)
        variables = {**environ, **(spec.environment or {})}
        self._log_level = variables.get(_LOG_LEVEL)
        self._is_quiet = not is_verbose and self._log_level != "0"
        self._closes, self._ask_places = closes, ask_places
        self._start_s = setting("start_s", variables)
        self._spec, self._mpi, self._rule, self._environ = spec, mpi, rule, environ
        self._places: Places = rule.places or (("", spec.size),)
        self.n_restarts = self._n_short = 0
        # At SIGTERM srun kills the ranks, and Open MPI's mpirun gives them one second; both only
        # pass on SIGUSR1.
        passes_on = spec.is_slurm or (mpi is not None and mpi.kind == "openmpi")
        self._stop_signal = signal.SIGUSR1 if passes_on else signal.SIGTERM

    def command(self) -> list[str]:
        """Return the command of the next attempt; raises ConfigError if it cannot be built."""
        spec = self._next_spec()
        beside = (sys.executable, "-m", "tfscale.launcher.rank_process")
        command = (*beside, *mpi_command.quote(spec.command)) if spec.command else ()
        return mpi_command.build_command(dataclasses.replace(spec, command=command), self._mpi)

    def variables(self) -> dict[str, str]:
        """Return the variables of the next attempt, for the launcher's environment."""
        return mpi_command.variables_of(self._next_spec(), self._mpi)

    def _next_spec(self) -> mpi_command.LaunchSpec:
        size = self._spec.size
        if self.n_restarts:
            size = min(size, sum(n for _, n in self._places))
        used = spread(self._places, size) if self._rule.places else ()
        spec = dataclasses.replace(self._spec, size=size, hosts=used)
        variables = dict(spec.environment or {})
        present = {**self._environ, **variables}
        threads = mpi_command.thread_variables(spec, present)
        threads |= mpi_command.loopback_variables(spec, self._mpi, present)
        threads |= mpi_command.allocation_variables(spec, self._mpi, present)
        ours = {RESTART_VARIABLE: str(self.n_restarts)}
        if self._is_quiet and not self._log_level:
            ours[_LOG_LEVEL] = "1"
        if mpi_command.has_other_hosts(spec, present):
            ours[BEAT_VARIABLE] = "1"
        if self._stop_signal != signal.SIGTERM:
            ours[STOP_VARIABLE] = self._stop_signal.name
        if spec.has_stdin:
            ours[mpi_command.STDIN_VARIABLE] = "1"
        if sys.stdout.isatty() and not spec.is_prefixed:  # a bar would overwrite the prefix
            ours[TERMINAL_VARIABLE] = "1"
        return dataclasses.replace(spec, environment={**threads, **variables, **ours})

    def run(self) -> int:
        """Run all attempts, explain on stderr why each ended, and return the job's exit code."""
        outcome = self.run_attempts()
        _say(outcome.describe() + (outcome.closing if self._closes else ""))
        return outcome.exit_code

    def run_attempts(self) -> Outcome:
        """Run all attempts, explain why each but the last ended, and return how the last did."""
        with StopRequest(self._rule.grace_s) as stop:
            while True:
                started = time.monotonic()
                outcome = run_attempt(
                    self.command(),
                    {**self._environ, **self.variables()},
                    stop,
                    self._stop_signal,
                    may_kill=not self._spec.is_slurm,
                    is_quiet=self._is_quiet,
                    has_stdin=self._spec.has_stdin,
                    watch=hosts.StartWatch(self._next_spec(), self._start_s, self._find_silent),
                )
                is_long = time.monotonic() - started >= WORTHWHILE_S
                self._n_short = 0 if is_long else self._n_short + 1
                if self.n_restarts >= self._rule.restarts or not may_restart(outcome):
                    return outcome
                if not self._prepare_next(outcome, stop):
                    few = "" if stop.first else "tfscale: too few hosts are left to start again.\n"
                    return dataclasses.replace(outcome, notes=few + outcome.notes, closing="")

    @property
    def size(self) -> int:
        """Number of ranks of the last attempt."""
        return self._next_spec().size

    def _prepare_next(self, outcome: Outcome, stop: StopRequest) -> bool:
        """Prepare another attempt and say why it follows; return False where it cannot start."""
        stop.sleep(pause_s(max(0, self._n_short - 1)))
        lost = lost_place(outcome, self._next_spec().hosts)
        places = next_places(self._find_places(stop), lost, self._rule, self._spec.size)
        if stop.first is not None or places is None:
            return False
        self.n_restarts, self._places = self.n_restarts + 1, places
        _say(
            f"{outcome.describe()}tfscale: restart {self.n_restarts} of {self._rule.restarts}, "
            f"with {self.size} ranks.\n"
        )
        return True

    def _find_places(self, stop: StopRequest) -> Places:
        if self._ask_places is not None:
            return self._ask_places(lambda: stop.first is not None)
        if len(self._places) < 2:
            return self._places  # The restart itself shows whether a single host answers.
        return tuple((name, n) for name, n in self._places if self._answers(name))

    def _find_silent(self, names: list[str]) -> list[str]:
        return hosts.find_silent(names, self._mpi, {**self._environ, **self.variables()})

    def _answers(self, host: str) -> bool:
        """Return whether the MPI can start a program on a host."""
        spec = dataclasses.replace(self._spec, command=("true",), size=1, hosts=((host, 1),))
        command = mpi_command.build_command(spec, self._mpi)
        done = mpi_command.run_within(_ANSWER_S, command, {**self._environ, **self.variables()})
        if done is None or done.returncode != 0:
            _say(f"tfscale: host {host} does not answer and is left out.\n")
            return False
        return True


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
