"""Common parts of the measured programs: options, and the file each rank writes."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The environment variable with the folder and the number of `Turns`, of jobs that take turns.
TURNS = "BENCH_TURNS"
_POLL_S = 0.01
_IMPORTED = time.time()


def parser() -> argparse.ArgumentParser:
    """Return a parser with the options of every worker."""
    made = argparse.ArgumentParser()
    made.add_argument("--system", required=True)
    made.add_argument("--output", type=Path, required=True)
    made.add_argument("--warmup", type=int, default=2)
    made.add_argument("--repeats", type=int, default=5)
    return made


@dataclass(frozen=True)
class Samples:
    """Measurements of a call.

    Attributes:
        seconds: Durations.
        sent_bytes: Bytes that this host's link sent per call, those for warming up included; 0 in
            memory.
        idle_share: Of the time of this machine's cores meanwhile.
    """

    seconds: list[float]
    sent_bytes: float = 0.0
    idle_share: float = 0.0


def n_hosts() -> int:
    """The number of hosts that the ranks are on; 1 where no harness started them."""
    return int(os.environ.get("BENCH_HOSTS", "1"))


def link_bytes() -> int:
    """Return the bytes that the link of this emulated host has sent so far; 0 in memory."""
    link = os.environ.get("FI_TCP_IFACE")
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text()) if link else 0


class IdleShare:
    """The share of their time that this machine's cores are idle, from when it is made."""

    def __init__(self) -> None:
        self._begin = self._times()

    def so_far(self) -> float:
        """The share, in [0, 1]."""
        spent = [now - before for now, before in zip(self._times(), self._begin, strict=True)]
        # Idle, waiting for disks, and spent on programs of `nice`, which give way to these.
        return (spent[1] + spent[3] + spent[4]) / max(sum(spent[:8]), 1)

    @staticmethod
    def _times() -> list[int]:
        return [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


class Turns:
    """Files by which jobs that live side by side take turns, see `benchmarks.alternate`.

    Attributes:
        folder: Of the job.
        n: Number of turns.
    """

    def __init__(self, folder: Path, n: int) -> None:
        self.folder, self.n = folder, n

    @classmethod
    def of_environment(cls) -> Turns | None:
        """Return those of this process, or None if it is measured as a whole."""
        folder, _, n = os.environ.get(TURNS, "").rpartition(":")
        return cls(Path(folder), int(n)) if folder else None

    def wait(self, turn: int) -> None:
        """Tell that this process is ready for its turn, and wait until it begins.

        Raises:
            FileNotFoundError: The folder has gone: the measurement has ended.
        """
        self._tell(f"ready{turn}")
        while not self.beginning(turn).exists():
            if not self.folder.exists():
                raise FileNotFoundError(f"{self.folder} has gone: the measurement has ended.")
            time.sleep(_POLL_S)  # other jobs have the cores; this process is stopped meanwhile

    def beginning(self, turn: int) -> Path:
        """Return the file that is there once a turn has begun."""
        return self.folder / f"begin{turn}"

    def ready_for(self, turn: int) -> list[int]:
        """Return the ids of the processes that are ready for a turn; after the last, at its end."""
        return [int(path.suffix[1:]) for path in self.folder.glob(f"ready{turn}.*")]

    def end(self) -> None:
        """Tell that this process has had all its turns."""
        self._tell(f"ready{self.n}")

    def _tell(self, what: str) -> None:
        (self.folder / f"{what}.{os.getpid()}").touch()


def sample(run: Callable[[], object], warmup: int, repeats: int, block: int = 1) -> Samples:
    """Measure a call.

    Args:
        run: What is measured.
        warmup: Blocks left out.
        repeats: Blocks kept.
        block: Calls whose mean is one duration, where not every call does the same.
    """
    kept: list[float] = []
    sent, idle = 0, IdleShare()
    turns = Turns.of_environment()
    n_turns = turns.n if turns else 1
    for turn in range(n_turns):
        if turns:
            turns.wait(turn)
        durations = []
        before = link_bytes()
        for _ in range(warmup + repeats):
            start = time.perf_counter()
            for _ in range(block):
                run()
            durations.append((time.perf_counter() - start) / block)
        sent += link_bytes() - before
        kept += durations[warmup:]
    if turns:
        turns.end()
    return Samples(kept, sent / (n_turns * block * (warmup + repeats)), idle.so_far())


def sample_in_turn(
    names: Sequence[str], block: Callable[[str], float], warmup: int, repeats: int
) -> dict[str, Samples]:
    """Measure blocks of several systems, which take turns; who begins alternates.

    Args:
        names: Of the systems.
        block: Runs a block of one of them; returns seconds per step.
        warmup: Turns left out.
        repeats: Turns kept.
    """
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + repeats):
        for name in names[:: 1 if number % 2 else -1]:
            samples[name].append(block(name))
    return {name: Samples(seconds[warmup:]) for name, seconds in samples.items()}


def write(folder: Path, rank: int, samples: dict[str, Samples], **facts: Any) -> None:
    """Write what a rank measured, for `harness.merge`.

    Args:
        folder: Of the run.
        rank: Of this process.
        samples: Per case.
        **facts: "start_s", and what else belongs into the result, such as a number of bytes.
    """
    content = {
        "samples": {case: found.seconds for case, found in samples.items()},
        "sent_bytes": {case: found.sent_bytes for case, found in samples.items()},
        "idle_share": min(found.idle_share for found in samples.values()),
        "start_s": facts.pop("start_s"),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "facts": facts,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(content))


def since_start() -> float:
    """The seconds since the launcher was started, or since this import."""
    return time.time() - float(os.environ.get("BENCH_STARTED", _IMPORTED))
