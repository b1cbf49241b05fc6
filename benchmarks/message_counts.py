"""Messages of an allreduce by the number of ranks: counted, by formula, and what they cost.

    python -m benchmarks.message_counts --output docs

starts the engine without TensorFlow on 2 to 64 ranks of this machine, as if each had a host of its
own, and counts what rank 0 sends; the formulas continue to 1,024 ranks. Times are simulated with
the constants by which the engine chooses (`kMessageBytes` in custom_ops/comm/reduction.cc): ranks
that share cores cannot show them.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from benchmarks.provenance import ROOT, describe
from tfscale.plan.costs import relayed
from tfscale.plan.machines import Link

SIZES = {1024: "1 KB", 4096: "4 KB", 65536: "64 KB", 1 << 20: "1 MB"}
COUNTED = (2, 4, 8, 16, 32, 64)
RANKS = tuple(2**k for k in range(1, 11))
LINK = Link(latency_s=40e-6, bytes_per_s=125e6)
# As in custom_ops/comm/reduction.cc.
_DIRECT_BYTES, _ALIGNED = 32 * 1024, 256
_FEW_HOSTS, _FINE_SEGMENT, _FINE_CHUNK, _CHUNK = 8, 512 * 1024, 16 * 1024, 1 << 20


def rounds(n_ranks: int) -> int:
    """Return log2 of a number of ranks, rounded up."""
    return math.ceil(math.log2(n_ranks))


def engine(n_bytes: int, n_ranks: int) -> tuple[int, int]:
    """Return the messages and bytes that rank 0 sends in an allreduce of the engine."""
    if short := relayed(n_bytes, n_ranks, n_ranks):
        return short.n_messages, int(short.sent_bytes)
    return direct(n_bytes, n_ranks)


def direct(n_bytes: int, n_ranks: int) -> tuple[int, int]:
    """Return the same where each rank sends to all others, and nothing is passed on."""
    if n_bytes * n_ranks <= _DIRECT_BYTES:
        return n_ranks - 1, (n_ranks - 1) * n_bytes
    segment = math.ceil(n_bytes / n_ranks / _ALIGNED) * _ALIGNED
    lengths = [max(0, min(segment, n_bytes - n * segment)) for n in range(n_ranks)]
    even = 4 * math.ceil(n_bytes / 4 / n_ranks)
    is_fine = n_ranks <= _FEW_HOSTS and even < _FINE_SEGMENT
    chunk = max(_FINE_CHUNK, even // 4) if is_fine else _CHUNK
    chunks = [math.ceil(length / chunk) for length in lengths]
    n_messages = sum(chunks[1:]) + (n_ranks - 1) * chunks[0]
    return n_messages, n_bytes - lengths[0] + (n_ranks - 1) * lengths[0]


def halving(n_bytes: int, n_ranks: int) -> tuple[int, float]:
    """Return the same for the faster of recursive doubling and Rabenseifner's algorithm."""
    whole = rounds(n_ranks), float(rounds(n_ranks) * n_bytes)
    parts = 2 * rounds(n_ranks), 2 * n_bytes * (n_ranks - 1) / n_ranks
    return min(whole, parts, key=simulated_s)


def simulated_s(sent: tuple[int, float]) -> float:
    """Return the seconds of messages and bytes that a rank sends one after another."""
    return sent[0] * LINK.latency_s + sent[1] / LINK.bytes_per_s


def count(n_ranks: int) -> dict[int, tuple[int, int]]:
    """Return messages and bytes that rank 0 sends, for each size, by the engine itself.

    Raises:
        subprocess.CalledProcessError: The ranks failed; their output is in `stdout`.
    """
    command = [sys.executable, str(ROOT / "tools" / "cpp_tests.py"), "--times", str(n_ranks)]
    command += ["--ranks-per-host", "1", "--seconds", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [words for words in lines if len(words) == 7 and words[0].isdigit()]
    return {int(r[0]): (int(r[4]), int(r[5])) for r in rows if int(r[0]) in SIZES}


def draw(counts: dict[int, dict[int, tuple[int, int]]], made: str, path: Path) -> None:
    """Write the picture: messages, bytes, and simulated times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 5))
    for width, (n_bytes, name) in zip(
        (4, 1.5, 4, 1.5), SIZES.items(), strict=True
    ):  # some coincide
        messages = [engine(n_bytes, n)[0] for n in RANKS]
        (line,) = left.plot(RANKS, messages, linewidth=width, label=name)
        points = [(n, of_size[n_bytes][0]) for n, of_size in counts.items()]
        left.plot(*zip(*points, strict=True), "o", color=line.get_color())
        sent = [engine(n_bytes, n)[1] / n_bytes for n in RANKS]
        middle.plot(RANKS, sent, linewidth=width, color=line.get_color(), label=name)
        shares = [(n, of_size[n_bytes][1] / n_bytes) for n, of_size in counts.items()]
        middle.plot(*zip(*shares, strict=True), "o", color=line.get_color())
        times = [1e3 * simulated_s(engine(n_bytes, n)) for n in RANKS]
        right.plot(RANKS, times, color=line.get_color(), label=name)
        times = [1e3 * simulated_s(halving(n_bytes, n)) for n in RANKS]
        right.plot(RANKS, times, "--", color=line.get_color())
        times = [1e3 * simulated_s(direct(n_bytes, n)) for n in RANKS]
        right.plot(RANKS, times, ":", color=line.get_color())
    left.set_title("Messages of rank 0 (points: counted)")
    left.set_ylabel("messages")
    middle.set_title("Bytes of rank 0, in vectors (points: counted)")
    middle.set_ylabel("bytes sent / bytes of the vector")
    right.set_ylabel("ms")
    right.set_title("Simulated ms (dashed: recursive, dotted: direct)")
    for axis in (left, middle, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("ranks, one per host")
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    lines = left.get_legend_handles_labels()
    figure.legend(*lines, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.text(0.5, 0.0, made, fontsize=8, color="0.4", ha="center", va="top")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def foot(made: dict) -> str:
    """Return commit and machine, for the foot of the picture."""
    machine = made["machine"]
    commit, plus, _ = made["commit"].partition("+")
    return f"commit {commit[:7]}{plus}; {machine['cpu']}, {machine['n_cores']} cores"


def main() -> int:
    """Count, compare with the formulas, and write JSON and picture; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs"), help="folder")
    folder = parser.parse_args().output
    counts = {n: count(n) for n in COUNTED}
    differ = [
        f"{n} ranks, {n_bytes} bytes: {sent}, by formula {engine(n_bytes, n)}"
        for n, of_size in counts.items()
        for n_bytes, sent in of_size.items()
        if sent != engine(n_bytes, n)
    ]
    print("\n".join(differ) or f"All counts on {COUNTED} ranks are those of the formulas.")
    made = describe()
    written = {"provenance": made, "sent_by_rank_0": counts}
    (folder / "message-counts.json").write_text(json.dumps(written, indent=2) + "\n")
    draw(counts, foot(made), folder / "message-counts.png")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
