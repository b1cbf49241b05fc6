"""When a job is started again after a failure, and on which places: pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from tfscale.errors import ConfigError
from tfscale.exit_codes import PREEMPTED
from tfscale.launcher.attempt import Outcome
from tfscale.launcher.mpi_command import LaunchSpec
from tfscale.launcher.places import Places

_MAX_PAUSE_S = 60.0
# An attempt that lasted so long was worth it: the next pause is short again.
WORTHWHILE_S = 60.0


@dataclass(frozen=True)
class RestartRule:
    """How often, and with how few ranks, a job may be started again.

    Attributes:
        restarts: Times; 0 for never.
        min_ranks: Fewest ranks; None for no fewer than at first.
        places: All places, spare ones too; empty for this host alone.
        grace_s: Seconds that ranks have to end after a signal to the launcher.
    """

    restarts: int = 0
    min_ranks: int | None = None
    places: Places = ()
    grace_s: float = 30.0


def check_rule(rule: RestartRule, spec: LaunchSpec) -> None:
    """Refuse what does not go together.

    Raises:
        ConfigError: A number is outside of its range, or the ranks' hosts are Slurm's to choose.
    """
    if rule.restarts < 0 or rule.grace_s < 0:
        raise ConfigError(
            "--restarts and --grace-s must be 0 or more. Received: "
            f"--restarts {rule.restarts}, --grace-s {rule.grace_s:g}."
        )
    if rule.min_ranks is None:
        return
    if not 1 <= rule.min_ranks <= spec.size:
        raise ConfigError(
            f"--min-np must lie in [1, {spec.size}], the number of ranks. "
            f"Received: {rule.min_ranks}."
        )
    if spec.is_slurm:
        raise ConfigError(
            "Slurm decides where ranks run. Received: --min-np with --slurm. Leave it out, and let "
            "Slurm requeue the job where a host is lost, see docs/operations.md."
        )


def may_restart(outcome: Outcome) -> bool:
    """Return whether another attempt could end better.

    Not after success, preemption or a signal to `tfscale run`; not where all ranks left the job
    together; and not where a rank failed by itself before `tfscale.init`, which it would do again:
    a wrong argument, a missing module. One that waited there for others in vain did not.
    """
    if outcome.was_stopped or outcome.is_orderly or outcome.exit_code in (0, PREEMPTED):
        return False
    failure = outcome.failure
    if failure is None or failure.is_lost:
        return True
    return failure.has_joined or failure.is_told or failure.signal is not None


def pause_s(n_short: int) -> float:
    """Return the seconds to wait before a restart: 1, 2, 4, ... 60.

    Args:
        n_short: Attempts right before this one that lasted less than `WORTHWHILE_S`.
    """
    return min(_MAX_PAUSE_S, 2.0 ** min(n_short, 10))


def lost_place(outcome: Outcome, hosts: Places) -> tuple[str, int] | None:
    """Return what `--min-np` allows to give up after a failure.

    Args:
        outcome: How the attempt ended.
        hosts: (host, number of ranks) pairs in the order of ranks; empty for this host alone.

    Returns:
        The host of the rank that failed, with all its ranks; on this host alone, one place. None
        where no rank is to blame, or the one that was only told of a failure.
    """
    if outcome.failure is None or outcome.failure.is_told:
        return None
    rank = outcome.failure.rank
    for name, n_ranks in hosts:
        if rank < n_ranks:
            return name, n_ranks
        rank -= n_ranks
    return ("", 1)


def next_places(
    places: Places, lost: tuple[str, int] | None, rule: RestartRule, size: int
) -> Places | None:
    """Decide where the next attempt may run.

    Args:
        places: Those on hosts that answer.
        lost: From `lost_place`.
        rule: The rule.
        size: Number of ranks at first.

    Returns:
        Without `min_ranks` all `places`, if they suffice for `size` ranks. With it, those without
        the lost one if they suffice for `min_ranks`, else all if these suffice. Else None.
    """
    candidates = [places]
    if rule.min_ranks is not None and lost is not None:
        # A host of several has lost all its places, also those that had no rank.
        gone = 10**9 if lost[0] else lost[1]
        kept = [(name, n - gone if name == lost[0] else n) for name, n in places]
        candidates.insert(0, tuple((name, n) for name, n in kept if n > 0))
    fewest = size if rule.min_ranks is None else rule.min_ranks
    return next((c for c in candidates if sum(n for _, n in c) >= fewest), None)
