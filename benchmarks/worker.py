"""Common parts of the measured programs: options, and the file each rank writes."""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
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


def sample(run: Callable[[], object], warmup: int, repeats: int, block: int = 1) -> list[float]:
    """Return durations in seconds of a call, those for warming up left out.

    Args:
        run: What is measured.
        warmup: Blocks left out.
        repeats: Blocks kept.
        block: Calls whose mean is one duration, where not every call does the same.
    """
    durations = []
    for _ in range(warmup + repeats):
        start = time.perf_counter()
        for _ in range(block):
            run()
        durations.append((time.perf_counter() - start) / block)
    return durations[warmup:]


def sample_in_turn(
    names: Sequence[str], block: Callable[[str], float], warmup: int, repeats: int
) -> dict[str, list[float]]:
    """Return what blocks of several systems take, which take turns; who begins alternates.

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
    return {name: seconds[warmup:] for name, seconds in samples.items()}


def write(folder: Path, rank: int, samples: dict[str, list[float]], **facts: Any) -> None:
    """Write what a rank measured, for `harness.merge`.

    Args:
        folder: Of the run.
        rank: Of this process.
        samples: Durations in seconds per case.
        **facts: "start_s", and what else belongs into the result, such as a number of bytes.
    """
    content = {
        "samples": samples,
        "start_s": facts.pop("start_s"),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "facts": facts,
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(content))


def since_start() -> float:
    """Return the seconds since the launcher was started."""
    return time.time() - float(os.environ["BENCH_STARTED"])
