"""Measure what `tfscale run --metrics` costs a training step: blocks of steps with and without it.

    python tools/metrics_cost.py [-np 2] [--rounds 12] [--cell mlp/allreduce] [--every-s 1]

Two jobs of this checkout take turns, as those of `tools/step_times.py`; one serves metrics, and is
read every second. The ratio is paired by round, with a bootstrap interval of 95 %.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import replay  # noqa: E402
import step_times  # noqa: E402

from benchmarks.numbers import paired_ratio  # noqa: E402


@contextlib.contextmanager
def reader(port: int, every_s: float) -> Iterator[list[int]]:
    """Read the page regularly within a block, as Prometheus does; yields the bytes of each page."""
    is_over, sizes = threading.Event(), list[int]()

    def read() -> None:
        while not is_over.wait(every_s):
            page = f"http://127.0.0.1:{port}/metrics"
            # Not served yet, or no longer.
            with contextlib.suppress(OSError), urllib.request.urlopen(page, timeout=10) as answer:
                sizes.append(len(answer.read()))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()


def free_port() -> int:
    """A port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a line."""
    parser = argparse.ArgumentParser(description="What serving metrics costs a step.")
    parser.add_argument("-np", type=int, default=2, metavar="N", help="number of ranks")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cell", default="mlp/allreduce", help="see tools/step_times.py")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between two reads")
    arguments = parser.parse_args(argv)
    port, launcher = free_port(), replay.mpiexec(arguments.np)
    serving = ["env", f"TFSCALE_METRICS=:{port}", *launcher]
    rounds: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="tfscale-metrics-") as name, ExitStack() as stack:
        jobs = []
        for kind, start in (("off", launcher), ("on", serving)):
            folder = Path(name) / kind
            jobs.append(step_times.Job(ROOT, arguments.cell, arguments.np, folder, start))
            stack.callback(jobs[-1].end)
        sizes = stack.enter_context(reader(port, arguments.every_s))
        for number in range(arguments.rounds + 1):
            order = (0, 1) if number % 2 else (1, 0)
            times = {index: jobs[index].run_block() for index in order}
            if number:  # the first is a warm-up
                rounds.append([times[0], times[1]])
    off, on = ({n: [row[side]] for n, row in enumerate(rounds)} for side in (0, 1))
    ratio = paired_ratio(on, off, level=0.95)
    assert ratio is not None
    medians = [statistics.median(side) for side in zip(*rounds, strict=True)]
    print(
        f"{arguments.cell}: {medians[0]:.3f} ms per step without, {medians[1]:.3f} ms with metrics "
        f"(read {len(sizes)} times); with / without {ratio.median:.4f}, 95 % interval "
        f"[{ratio.low:.4f}, {ratio.high:.4f}]"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
