"""Messages from the processes beside ranks to `tfscale run`: lines among the ranks' stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tfscale.comm.process import LEFT
from tfscale.config import PREEMPTED

# Seconds between heartbeats of the process beside each rank, if ranks run on several hosts.
BEAT_S = 2.0
# Set for the processes beside ranks if they are to send heartbeats.
BEAT_VARIABLE = "TFSCALE_BEAT"
_SILENCE_S = 20.0
# Messages that accumulated while the launcher or its output was blocked arrive within this time.
_PERSISTENT_S = 3.0
# Share of the time that communication may take without advice to make it faster.
_LITTLE_WAITING = 0.05
# Compression and other exchanges make messages below this size hardly faster.
_SMALL_MB = 0.1


# `host` is the name that a host gives itself (`socket.gethostname`).


@dataclass(frozen=True)
class Start:
    """One of `size` ranks has been started; `pid` is the id of the process beside it."""

    rank: int
    host: str
    pid: int
    size: int


@dataclass(frozen=True)
class Beat:
    """A heartbeat."""

    rank: int
    host: str


@dataclass(frozen=True)
class Change:
    """A rank is in `tfscale.init`, has left the job while others needed it, or has saved."""

    rank: int
    state: str  # STARTING, LEFT or another one of `tfscale.comm.process`
    has_saved: bool = False  # on request; it only has to end


@dataclass(frozen=True)
class Words:
    """A piece of the error that ended a rank; its `Report` follows."""

    rank: int
    text: str


@dataclass(frozen=True)
class Report:
    """The end of a rank."""

    rank: int
    host: str
    status: int | None  # exit status; None where a signal ended it
    signal: int | None  # number of the signal that ended it; None where it ended by itself
    is_failure: bool  # the other ranks cannot continue
    has_joined: bool  # `tfscale.init` had returned
    place: str = ""  # the last collective it finished
    error: str = ""  # its traceback
    is_lost: bool = False  # its host sends no heartbeats, so the kind of its end is unknown
    is_told: bool = False  # communication failed or other ranks ended it: maybe not the cause
    has_left: bool = False  # it left the job while others still called collectives
    is_alone: bool = False  # the process beside it ended without a report, and so did the rank
    was_asked: bool = False  # to save and stop; if not, exit status 75 is not genuine
    training: str = ""  # `process.write_training`
    is_starting: bool = False  # it ended in `tfscale.init`
    is_absent: bool = False  # others wait in `tfscale.init` for this rank, which ended before
    has_saved: bool = False  # on request, before it ended
    failed: str = ""  # why a collective failed, if one did

    @property
    def exit_code(self) -> int:
        """Exit code of the job if this report ends it; never 0 for a failure."""
        if self.signal is not None:
            return 128 + self.signal
        if self.is_unbelieved:
            return 1
        return self.status or (1 if self.is_failure else 0)

    @property
    def has_ended_as_asked(self) -> bool:
        """Whether the exit status says that the rank saved and stopped on request."""
        return self.status == PREEMPTED and self.was_asked

    @property
    def is_unbelieved(self) -> bool:
        """Whether the exit status is 75 (stopped on request) although no stop was requested."""
        return self.status == PREEMPTED and not self.was_asked

    def describe(self) -> str:
        """Return the lines that describe the end of the rank to users."""
        who = f"tfscale: rank {self.rank} on host {self.host}"
        if self.is_lost:
            text = f"{who} gives no sign of life: the host or its network is lost."
        elif self.is_alone:
            text = (
                f"{who} was killed with the process beside it, which ended without a word: it was "
                "killed, or the MPI's own process on that host was."
            )
        elif self.signal is not None:
            names = {int(number): number.name for number in signal.Signals}
            name = names.get(self.signal, "a real-time signal")  # most of these have no name
            text = f"{who} was killed by signal {self.signal} ({name})."
            if self.signal == signal.SIGKILL:
                text += " If no program sent it, the kernel did, for want of memory: see dmesg."
        elif self.is_absent:
            end = "" if self.status is None else f" with exit status {self.status}"
            text = f"{who} ended{end} without tfscale.init(), in which other ranks wait for it."
        elif self.status == 0:
            text = (
                f"{who} ended with exit status 0 before tfscale.shutdown() had ended for all, "
                "while the others counted on it (an early return, sys.exit, os._exit, or a caught "
                "ExchangeError?)."
            )
        else:
            text = f"{who} failed with exit status {self.status}"
            text += ", leaving the job before the others" if self.has_left else ""
            before = "in" if self.is_starting else "before"
            text += "." if self.has_joined else f", {before} tfscale.init()."
        if self.is_unbelieved:
            text += (
                f" {PREEMPTED} means that a checkpoint was written on request, and there was no "
                "request: the job ends with 1."
            )
        last = f"tfscale: its last collective was {self.place}.\n" if self.place else ""
        return f"{text}\n{last}"


def first_failure(reports: Sequence[Report]) -> Report | None:
    """Return the first failure, preferably of a rank that is its own cause, or None."""
    failures = [report for report in reports if report.is_failure]
    return next((r for r in failures if not r.is_told), next(iter(failures), None))


def describe_errors(reports: list[Report], failure: Report | None) -> str:
    """Return each distinct traceback once, with the ranks that had it; that of `failure` last."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        if report.error:
            ranks[report.error].append(report.rank)
    last = failure.error if failure is not None else ""
    text = ""
    for error, holders in sorted(ranks.items(), key=lambda item: item[0] == last):
        names = ", ".join(map(str, sorted(holders)))
        text += error if error.endswith("\n") else f"{error}\n"
        if error != last or len(holders) > 1:
            text += f"tfscale: the traceback of rank{'s' if len(holders) > 1 else ''} {names}.\n"
    return text


def describe_caught(reports: Sequence[Report]) -> str:
    """Return a line for each rank in which a collective failed, although no rank did."""
    return "".join(
        f"tfscale: rank {r.rank} on host {r.host} ended well, but a collective failed there, and "
        f"the program caught the error: {r.failed}\n"
        for r in reports
        if r.failed and not r.error
    )


def describe_training(reports: Sequence[Report]) -> str:
    """Return the closing lines of a job: its communication, and what to try next."""
    trained = [report.training.split() for report in reports if report.training]
    if not trained:
        return ""
    waiting = statistics.mean(float(share) for share, *_ in trained)
    _, step_bytes, exchange, _, bits = trained[0]
    is_crowded = any(crowded == "1" for *_, crowded, _ in trained)
    sent = int(step_bytes) / 1e6
    shown = f"{sent:.0f}" if sent >= 10 else f"{sent:.2g}"
    advice = "no more ranks: these share cores" if is_crowded else "more ranks"
    if waiting >= _LITTLE_WAITING and is_crowded:
        advice = "fewer ranks: there are more than cores, and they wait for each other's computing"
    elif waiting >= _LITTLE_WAITING and sent < _SMALL_MB:
        advice = "larger batches or fewer ranks: latency dominates messages this small"
    elif waiting >= _LITTLE_WAITING:
        chosen = {
            "allreduce": ('exchange="auto" (--exchange auto)',),
            "undecided": ('more steps: exchange="auto" was still measuring at the end',),
        }
        fewer = {"32": ("compression=tfscale.Compression.bf16",)}
        fewer["16"] = ("compression=tfscale.Compression.int8",)
        more = (*chosen.get(exchange, ()), *fewer.get(bits, ()), "larger batches")
        advice = ", ".join(more)
    return (
        f"tfscale: the last steps spent {100 * waiting:.0f} % of their time waiting for "
        f"communication; a step exchanges {shown} MB.\n"
        f"tfscale: what to try next: {advice}. See 'Which exchange' in the documentation, and "
        "`tfscale tune`.\n"
    )


Message = Start | Beat | Change | Words | Report
_KINDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind for kind in (Start, Beat, Change, Words, Report)
}
_MAX_LISTED = 8


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


# Less than the size of an atomic write to a pipe (PIPE_BUF), so that a message stays in one piece.
# A character takes 12 bytes of JSON at most.
_MAX_BYTES = 4000
_MAX_CHARACTERS = 300
_START = b"\x1e"
# Launchers' prefixes of a line: "[1] " (MPICH), "1: " (srun), "[1,1]<stderr>:" (Open MPI).
_PREFIX = rb"(?:\[\d+\] |\d+: |\[\d+,\d+\]<std\w+>: ?)?"
_LINE = re.compile(_PREFIX + rb"\x1etfscale ([^\n]*)\n")
# TensorFlow's message about an iterator that is left when Python has ended: after a stop in `fit`.
_LEFT_ITERATOR = (
    rb"(?:W\d{4} [\d:.]+ +\d+ |[\d-]+ [\d:.]+: W )[\w./]+\.cc:\d+\] Error occurred when finalizing "
    rb"GeneratorDataset iterator: FAILED_PRECONDITION: Python interpreter state is not initialized"
)
# Its first line, which the next chunk may continue.
_CUT = re.compile(rb"^" + _PREFIX + _LEFT_ITERATOR + rb".*\n\Z", re.MULTILINE)
# TensorFlow's start-up messages, printed for every TF_CPP_MIN_LOG_LEVEL: those below a warning, and
# those about a missing GPU.
_NOISE = re.compile(
    rb"^"
    + _PREFIX
    + rb"(?:"
    + _LEFT_ITERATOR
    + rb".*\n"
    + _PREFIX
    + rb"\t \[\[\{\{node PyFunc\}\}\]\]|"
    + _LEFT_ITERATOR
    + rb"|WARNING: All log messages before absl::InitializeLog\(\) is called"
    rb"|To enable the following instructions: "
    rb"|(?:I\d{4} [\d:.]+ +\d+ |[\d-]+ [\d:.]+: I )[\w./]+\.(?:cc|h):\d+\] "
    rb"|(?:E\d{4} [\d:.]+ +\d+ |[\d-]+ [\d:.]+: E )[\w./]+\.(?:cc|h):\d+\] "
    rb"(?:failed call to cuInit|Unable to register cu\w+ factory)).*\n",
    re.MULTILINE,
)
# Seconds for which the beginning of a line is held back, as it may be one of these.
_HELD_S = 0.2


def encode(message: Message) -> bytes:
    """Return a message as a line to print; the error of a report goes first, in `Words`."""
    if isinstance(message, Report) and message.error:
        error, step = message.error, _MAX_CHARACTERS
        starts = range(0, len(error), step)
        lines: list[Message] = [Words(message.rank, error[i : i + step]) for i in starts]
        lines.append(dataclasses.replace(message, error=""))
        return b"".join(map(encode, lines))
    fields = {"kind": type(message).__name__.lower(), **dataclasses.asdict(message)}
    return _START + b"tfscale " + json.dumps(fields).encode() + b"\n"


def send(message: Message) -> None:
    """Print a message on stderr, line by line."""
    # The rank shares this file, and may have made it non-blocking or closed its other end.
    with contextlib.suppress(OSError):
        for line in encode(message).splitlines(keepends=True):
            os.write(2, line)


def _decode(text: bytes) -> Message | None:
    try:
        fields = json.loads(text)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class Pulse:
    """The last heartbeats of the ranks; times are in seconds of a monotonic clock.

    A host is lost if it has been silent for a long time while another one sends heartbeats. If all
    are silent, the launcher does not pass them on: its output may be blocked, or it was stopped.
    """

    def __init__(self) -> None:
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._suspected_since: float | None = None

    def hear(self, beat: Beat, now: float) -> None:
        """Record a heartbeat."""
        self._heard[beat.rank] = (beat, now)

    def forget(self, rank: int) -> None:
        """Expect no heartbeats of a rank that has ended without a failure."""
        self._heard.pop(rank, None)

    def find_lost(self, now: float) -> Beat | None:
        """Return the last heartbeat of a rank whose host is lost, or None. Call this often."""
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


class ReportReader(threading.Thread):
    """Copies a launcher's stderr, takes out the messages, and watches the processes beside ranks.

    Attributes:
        reports: Ends of ranks, in the order in which they became known.
        first_failure_at: Time of the first failure (`time.monotonic`), or None.
    """

    def __init__(self, source: int, target: int, is_quiet: bool = False) -> None:
        """Start to copy, without TensorFlow's start-up messages if `is_quiet`."""
        super().__init__(daemon=True)
        # A descriptor of its own: closing the given one must not leave this thread waiting.
        self._source, self._target, self._is_quiet = os.dup(source), target, is_quiet
        self._rest = b""
        self._pulse = Pulse()
        self._words: dict[int, str] = defaultdict(str)
        self._starts: dict[int, Start] = {}
        # By rank; the time is that of its first change, its call of `tfscale.init`.
        self._changes: dict[int, tuple[Change, float]] = {}
        # The processes beside this host's ranks by descriptor, and those that have ended.
        self._beside: dict[int, Start] = {}
        self._gone: list[Start] = []
        self.reports: list[Report] = []
        self.first_failure_at: float | None = None
        self.start()

    def look_for_lost_hosts(self) -> None:
        """Report a rank whose host is lost, once. Call this often."""
        lost = self._pulse.find_lost(time.monotonic())
        if lost is not None and self.first_failure_at is None:
            self._add(Report(lost.rank, lost.host, None, None, True, True, is_lost=True))

    def failure(self) -> Report | None:
        """Return the first failure, preferably of a rank that is its own cause, or None."""
        return first_failure(self.reports)

    def find_unreported(self) -> Report | None:
        """Return a report for the first rank whose process ended without one, or None."""
        ended = {report.rank for report in self.reports}
        gone = next((start for start in self._gone if start.rank not in ended), None)
        if gone is None:
            return None
        number = int(signal.SIGKILL)
        return Report(gone.rank, gone.host, None, number, True, True, is_alone=True)

    def starts(self) -> list[Start]:
        """Return the signs of ranks that have been started."""
        return list(self._starts.values())

    def pids_beside(self) -> set[int]:
        """Return the ids of the processes beside this host's ranks."""
        return {start.pid for start in self._beside.values()}

    def has_other_hosts(self) -> bool:
        """Return whether ranks run on other hosts than this process."""
        return any(start.host != socket.gethostname() for start in self._starts.values())

    def look_for_absent_ranks(self) -> None:
        """Report one rank as failed if it ended before `tfscale.init`, where others wait for it."""
        if self.first_failure_at is not None or not self._changes:
            return
        for index, report in enumerate(self.reports):
            # A rank that has joined the job has kept none of them waiting in `init`.
            if not report.has_joined:
                failure = dataclasses.replace(report, is_failure=True, is_absent=True)
                self.reports[index] = failure
                self.first_failure_at = time.monotonic()
                return

    def have_all_saved(self) -> bool:
        """Return whether all ranks have saved as they were asked to."""
        saved = {rank for rank, (change, _) in self._changes.items() if change.has_saved}
        saved |= {r.rank for r in self.reports if r.has_saved or r.has_ended_as_asked}
        return 0 < self._size() <= len(saved)

    def ranks_not_ended(self) -> set[int]:
        """Return the ranks that have started and not ended."""
        return set(self._starts) - {report.rank for report in self.reports}

    def explain_wait(self) -> str:
        """Return a line that says why `tfscale.init` has waited for other ranks in vain."""
        now, calls = time.monotonic(), {rank: at for rank, (_, at) in self._changes.items()}
        if not calls:
            return ""
        first, last = min(calls.values()), max(calls.values())
        if missing := set(range(self._size())) - set(calls):
            text = f"{self.names(missing)} had not called tfscale.init() by then."
        elif now - last < (now - first) / 2:
            late = {rank for rank, at in calls.items() if at == last}
            text = f"{self.names(late)} called tfscale.init() {last - first:.0f} s after the first."
        else:
            hosts = sorted({start.host for start in self._starts.values()})
            text = f"all ranks called tfscale.init(), but did not reach each other on {hosts[0]}."
            if len(hosts) > 1:
                text = (
                    f"all ranks called tfscale.init(), but hosts {_listed(hosts)} cannot reach "
                    "each other. Open the ports between them (firewall), or name the network that "
                    "MPI is to use: see 'Unattended jobs' in the documentation."
                )
        return f"tfscale: {text}\n"

    def names(self, ranks: Iterable[int]) -> str:
        """Return names of ranks with their hosts; "" for none."""
        hosts = {rank: f" on host {start.host}" for rank, start in self._starts.items()}
        return _listed([f"rank {rank}{hosts.get(rank, '')}" for rank in sorted(ranks)])

    def _size(self) -> int:
        return next((start.size for start in self._starts.values()), 0)

    def is_cause_to_come(self) -> bool:
        """Return whether a rank that made others fail is still ending."""
        failure, ended = self.failure(), {report.rank for report in self.reports}
        leaving = {rank for rank, (change, _) in self._changes.items() if change.state == LEFT}
        return failure is not None and failure.is_told and bool(leaving - ended)

    def have_all_ended(self) -> bool:
        """Return whether the ends of all ranks have been reported."""
        return 0 < self._size() <= len({report.rank for report in self.reports})

    def run(self) -> None:
        """Read until the end, on a thread of its own."""
        poll = select.epoll()  # whose answers are in the order of the events, unlike poll's
        try:
            poll.register(self._source, select.EPOLLIN)
            while True:
                ready = poll.poll(_HELD_S if self._rest else None)
                if not ready and _START not in self._rest:  # a prompt or a progress bar
                    self._write_rest()
                # Ends of processes first: the end of the source ends this loop.
                for descriptor, _ in sorted(ready, key=lambda event: event[0] == self._source):
                    if descriptor != self._source:
                        poll.unregister(descriptor)
                        self._gone.append(self._beside[descriptor])
                        continue
                    if not (chunk := os.read(self._source, 1 << 16)):
                        return
                    before = set(self._beside)
                    self._feed(chunk)
                    for new in set(self._beside) - before:
                        poll.register(new, select.EPOLLIN)
        finally:
            self._write_rest()
            poll.close()
            for descriptor in (self._source, *self._beside):
                os.close(descriptor)

    def _feed(self, chunk: bytes) -> None:
        text = self._rest + chunk
        end = text.rfind(b"\n") + 1
        is_held = self._is_quiet or _START in text[end:]
        if not is_held or len(text) - end > 2 * _MAX_BYTES:
            end = len(text)
        elif self._is_quiet and (cut := _CUT.search(text[:end])):
            end = cut.start()
        text, self._rest = _LINE.sub(self._take, text[:end]), text[end:]
        self._write(_NOISE.sub(b"", text) if self._is_quiet else text)

    def _write_rest(self) -> None:
        self._write(_NOISE.sub(b"", self._rest) if self._is_quiet else self._rest)
        self._rest = b""

    def _take(self, match: re.Match[bytes]) -> bytes:
        message = _decode(match.group(1))
        if message is None:
            return match.group(0)
        if isinstance(message, Start):
            self._starts[message.rank] = message
            if message.host == socket.gethostname():
                # pidfd_open is missing on an old kernel, or in a Python that was built on one.
                with contextlib.suppress(OSError, AttributeError):
                    self._beside[os.pidfd_open(message.pid)] = message
        elif isinstance(message, Beat):
            self._pulse.hear(message, time.monotonic())
        elif isinstance(message, Change):
            _, at = self._changes.get(message.rank, (None, time.monotonic()))
            self._changes[message.rank] = (message, at)
        elif isinstance(message, Words):
            self._words[message.rank] += message.text
        else:
            self._add(dataclasses.replace(message, error=self._words.pop(message.rank, "")))
        return b""

    def _add(self, report: Report) -> None:
        self.reports.append(report)
        if not report.is_failure:
            self._pulse.forget(report.rank)
        elif self.first_failure_at is None:
            self.first_failure_at = time.monotonic()

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # the output has no reader; reports still count
            while text:
                text = text[os.write(self._target, text) :]


@contextlib.contextmanager
def without_start_messages() -> Iterator[None]:
    """Within a block, take TensorFlow's start-up messages out of this process's stderr."""
    sys.stderr.flush()
    stderr, (source, sink) = os.dup(2), os.pipe()
    reader = ReportReader(source, stderr, is_quiet=True)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(sink)
        os.close(source)
        reader.join(_PERSISTENT_S)  # a process that the block started may hold the pipe open
