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
    """

    seconds: list[float]
    sent_bytes: float = 0.0


def n_hosts() -> int:
    """Return the number of hosts that the ranks are on."""
    return int(os.environ["BENCH_HOSTS"])


def link_bytes() -> int:
    """Return the bytes that the link of this emulated host has sent so far; 0 in memory."""
    link = os.environ.get("FI_TCP_IFACE")
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text()) if link else 0


def sample(run: Callable[[], object], warmup: int, repeats: int, block: int = 1) -> Samples:
    """Measure a call.

    Args:
        run: What is measured.
        warmup: Blocks left out.
        repeats: Blocks kept.
        block: Calls whose mean is one duration, where not every call does the same.
    """
    durations = []
    sent = link_bytes()
    for _ in range(warmup + repeats):
        start = time.perf_counter()
        for _ in range(block):
            run()
        durations.append((time.perf_counter() - start) / block)
    sent = link_bytes() - sent
    return Samples(durations[warmup:], sent / (block * (warmup + repeats)))


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
        "start_s": facts.pop("start_s"),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "facts": facts,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(content))


def since_start() -> float:
    """Return the seconds since the launcher was started."""
    return time.time() - float(os.environ["BENCH_STARTED"])
