"""Hosts that fall silent: a dead link or a crashed machine, which no launcher notices by itself."""

from __future__ import annotations

from dataclasses import dataclass

# Where ranks run on several hosts, the process beside each sends a sign of life so often.
BEAT_S = 2.0
# Given to these processes where they are to send signs of life.
BEAT_VARIABLE = "TFSCALE_BEAT"
_SILENCE_S = 20.0
# What piled up while the launcher or its output was blocked arrives within this time.
_PERSISTENT_S = 3.0


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        rank: Whose.
        host: Name of its host, as the host calls itself.
        is_last: The rank has ended in good order.
    """

    rank: int
    host: str
    is_last: bool = False


class Pulse:
    """Remembers who was heard when; times are in seconds of any steady clock.

    A host is lost when it has been silent for long while another one is heard. Where all are
    silent, it is the launcher that does not listen: its output may be blocked, or it was stopped.
    """

    def __init__(self) -> None:
        """Nobody was heard yet."""
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._suspected_since: float | None = None

    def hear(self, beat: Beat, now: float) -> None:
        """Note a sign of life."""
        if beat.is_last:
            self._heard.pop(beat.rank, None)
        else:
            self._heard[beat.rank] = (beat, now)

    def find_lost(self, now: float) -> Beat | None:
        """Return the last sign of life of a rank whose host is lost, or None. Ask often."""
        entries = list(self._heard.values())
        silent = [beat for beat, at in entries if now - at >= _SILENCE_S]
        silent_hosts = {beat.host for beat in silent}
        is_heard = any(
            now - at < 2 * BEAT_S and beat.host not in silent_hosts for beat, at in entries
        )
        if not (silent and is_heard):
            self._suspected_since = None
            return None
        if self._suspected_since is None:
            self._suspected_since = now
        is_sure = now - self._suspected_since >= _PERSISTENT_S
        return min(silent, key=lambda beat: beat.rank) if is_sure else None
