"""Reports of ranks to the launcher and their signs of life."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import threading
import time
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


# Less than a pipe takes at once (PIPE_BUF), so that a report stays in one piece.
_MAX_BYTES = 3900
_START = b"\x1e"
# What launchers print before a line: "[1] " (MPICH), "1: " (srun), "[1,1]<stderr>:" (Open MPI).
_LINE = re.compile(rb"(?:\[\d+\] |\d+: |\[\d+,\d+\]<std\w+>: ?)?\x1etfscale ([^\n]*)\n")


@dataclass(frozen=True)
class Report:
    """How a rank ended.

    Attributes:
        rank: Its number.
        host: Name of its host, as the host calls itself.
        status: Exit status; None where a signal ended it.
        signal: Number of the signal that ended it; None where it ended by itself.
        is_failure: The other ranks cannot go on.
        has_joined: It had come through `tfscale.init`.
        place: The last collective it finished; may be empty.
        error: End of its traceback; may be empty.
        is_lost: Nothing is heard of its host; how it ended nobody knows.
        is_told: It ended because of others, or of communication: it may not be the cause.
    """

    rank: int
    host: str
    status: int | None
    signal: int | None
    is_failure: bool
    has_joined: bool
    place: str = ""
    error: str = ""
    is_lost: bool = False
    is_told: bool = False

    @property
    def exit_code(self) -> int:
        """Exit code of the job, if this is how it ends; never 0 for a failure."""
        if self.signal is not None:
            return 128 + self.signal
        return self.status or (1 if self.is_failure else 0)

    def describe(self) -> str:
        """Return the lines that name the rank, for people."""
        who = f"tfscale: rank {self.rank} on host {self.host}"
        if self.is_lost:
            text = f"{who} gives no sign of life: the host or its network is lost."
        elif self.signal is not None:
            text = f"{who} was killed by signal {self.signal} ({_name(self.signal)})."
            if self.signal == signal.SIGKILL:
                text += " If nobody sent it, the kernel did, for want of memory: see dmesg."
        elif self.status == 0:
            text = (
                f"{who} ended with exit status 0 before tfscale.shutdown() had ended for all, "
                "while the others counted on it (os._exit, or a caught ExchangeError?)."
            )
        else:
            text = f"{who} failed with exit status {self.status}"
            text += "." if self.has_joined else ", before tfscale.init()."
        last = f"tfscale: its last collective was {self.place}.\n" if self.place else ""
        return f"{self.error}{text}\n{last}"


def _name(number: int) -> str:
    """Return what a signal is called; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def encode(report: Report) -> bytes:
    """Return a report as the line that is printed, short enough to stay in one piece."""
    fields = {"kind": "end", **dataclasses.asdict(report)}
    n_kept = len(report.error)
    while True:
        fields["error"] = report.error[len(report.error) - n_kept :]
        line = _START + b"tfscale " + json.dumps(fields).encode() + b"\n"
        if len(line) <= _MAX_BYTES:
            return line
        n_kept = n_kept * 3 // 4


def encode_beat(beat: Beat) -> bytes:
    """Return a sign of life as the line that is printed."""
    fields = {"kind": "beat", **dataclasses.asdict(beat)}
    return _START + b"tfscale " + json.dumps(fields).encode() + b"\n"


def _decode(text: bytes) -> Report | Beat | None:
    try:
        fields = json.loads(text)
        return {"end": Report, "beat": Beat}[fields.pop("kind")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class ReportReader(threading.Thread):
    """Passes on what a launcher prints, and takes the reports out."""

    def __init__(self, source: int, target: int) -> None:
        """Begin to read.

        Args:
            source: Descriptor to read from, until its end.
            target: Descriptor to write to.
        """
        super().__init__(daemon=True)
        self._source, self._target = source, target
        self._rest = b""
        self._pulse = Pulse()
        self.reports: list[Report] = []
        self.first_failure_at: float | None = None
        self.start()

    def look_for_lost_hosts(self) -> None:
        """Report a rank whose host is lost, once; to be called often."""
        lost = self._pulse.find_lost(time.monotonic())
        if lost is not None and self.first_failure_at is None:
            self.first_failure_at = time.monotonic()
            self.reports.append(Report(lost.rank, lost.host, None, None, True, True, is_lost=True))

    def failure(self) -> Report | None:
        """Return the first report of a failure, best of one that was its own; or None."""
        failures = [report for report in self.reports if report.is_failure]
        return next((r for r in failures if not r.is_told), next(iter(failures), None))

    def run(self) -> None:
        """Read until the end; on a thread of its own."""
        # An error: the descriptor was closed, and nobody waits for this thread any more.
        with contextlib.suppress(OSError):
            while chunk := os.read(self._source, 1 << 16):
                self._feed(chunk)
        self._write(self._rest)

    def _feed(self, chunk: bytes) -> None:
        text = self._rest + chunk
        self._write(_LINE.sub(self._take, text[: (end := _end_of_whole(text))]))
        self._rest = text[end:]

    def _take(self, found: re.Match[bytes]) -> bytes:
        report = _decode(found.group(1))
        if report is None:
            return found.group(0)
        if isinstance(report, Beat):
            self._pulse.hear(report, time.monotonic())
            return b""
        self.reports.append(report)
        if report.is_failure and self.first_failure_at is None:
            self.first_failure_at = time.monotonic()
        return b""

    def _write(self, text: bytes) -> None:
        try:
            while text:
                text = text[os.write(self._target, text) :]
        except OSError:
            return  # Nobody reads it any more; reports still count.


def _end_of_whole(text: bytes) -> int:
    """Return where a report begins that is not all there yet; the length if there is none."""
    start = text.rfind(_START)
    if start < 0 or b"\n" in text[start:] or len(text) - start > 2 * _MAX_BYTES:
        return len(text)
    return text.rfind(b"\n", 0, start) + 1
