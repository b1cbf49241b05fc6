"""Process sets: groups of ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Sequence

from tfscale import config, runtime
from tfscale.backends.base import Group
from tfscale.end_of_job import deadline_of_start
from tfscale.errors import ConfigError, ExchangeError


class ProcessSet:
    """A set of ranks, usable in collectives once `add_process_set` or `init` made it known.

    Attributes:
        ranks: Its ranks in ascending order; None for the global set before `init`.
        process_set_id: Number of the set, equal on all ranks; None before it is known.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        """Describe a set.

        Args:
            ranks: Distinct ranks, in any order.

        Raises:
            ConfigError: A rank is negative or named twice, or there is none.
        """
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        if ranks is not None:
            self.ranks = sorted(int(r) for r in ranks)
            if not self.ranks or self.ranks[0] < 0 or len(set(self.ranks)) < len(self.ranks):
                raise ConfigError(
                    "A process set needs one or more distinct ranks, 0 or greater. "
                    f"Received: ranks={list(ranks)}."
                )

    def group(self) -> Group:
        """Return the set as backends know it.

        Raises:
            ExchangeError: The set is not known yet, or tfscale is not initialised.
        """
        if self is global_process_set:
            return runtime.world()
        if self.process_set_id is None or self.ranks is None:
            raise ExchangeError(
                "A process set must be added before it is used. Received: ranks="
                f"{self.ranks}. Call tfscale.add_process_set(...) or init(process_sets=[...])."
            )
        own = runtime.rank()
        place = self.ranks.index(own) if own in self.ranks else -1
        return Group(self.process_set_id, tuple(self.ranks), place)

    def included(self) -> bool:
        """Return whether this process belongs to the set."""
        return self.group().rank >= 0

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return self.group().size

    def rank(self) -> int:
        """Return this process's number within the set, or -1 outside of it."""
        return self.group().rank

    def __repr__(self) -> str:
        """Return the ranks."""
        return f"ProcessSet({self.ranks}, id={self.process_set_id})"


global_process_set = ProcessSet(None)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks usable. Collective: all ranks must call this, in the same order.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, with its id.

    Raises:
        ConfigError: A rank is not in [0, size), or the set is known already.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    if process_set.process_set_id is not None or process_set is global_process_set:
        raise ConfigError(f"A process set can be added once. Received: {process_set!r}.")
    if ranks[-1] >= runtime.size():
        raise ConfigError(
            f"Ranks of a process set must lie in [0, {runtime.size()}). Received: ranks={ranks}."
        )
    settings = config.settings()
    with deadline_of_start(
        settings.stall_warning_s, settings.stall_shutdown_s, "tfscale.add_process_set()"
    ):
        process_set.process_set_id = runtime.backend().add_group(ranks)
    runtime.known_process_sets().append(process_set)
    return process_set


class _OwnProcessSet(ProcessSet):
    """Made by tfscale, so that nobody takes it out of use."""


def own_process_set(ranks: Sequence[int]) -> ProcessSet:
    """Return tfscale's own set of these ranks, made once. Collective, as `add_process_set`.

    MPI has a limited number of communicators; the optimizers of a search share theirs.

    Args:
        ranks: Its members, ascending.
    """
    for known in runtime.known_process_sets():
        if isinstance(known, _OwnProcessSet) and known.ranks == list(ranks):
            return known
    return add_process_set(_OwnProcessSet(ranks))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a set out of use. Collective: all ranks must call this, in the same order.

    Args:
        process_set: A set that was added.

    Returns:
        True if it was known; False for the global set and for unknown ones.
    """
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    process_set.process_set_id = None
    return True
