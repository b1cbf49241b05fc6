"""Runs cells in turn, A B A B, each in processes of its own, and writes JSON after each run."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import alternate, provenance, sessions
from benchmarks.launch import RunFailedError, cluster_for, interpreter_of, run_ranks
from benchmarks.places import SLOW_MOTION, parse_place
from tfscale.files import sha256

# Where layers sleep: the share of the cores' time, and the factor that is not enough for it only
# where other programs use the cores.
_LEAST_IDLE, _SLOWEST = 1 / 3, 16
# The programs of suites that have none of their own.
_WORKERS = {"speedup": "step"}


@dataclass(frozen=True)
class Cell:
    """One system at one place.

    Attributes:
        suite: "collectives" or "step".
        group: Cells of one group run in turn and are compared.
        system: What is measured.
        place: See `benchmarks.places`.
        n_ranks: Number of ranks.
        arguments: Of the worker.
        most_rounds: Fewer rounds than the run has are enough; 0 for all of them.
    """

    suite: str
    group: str
    system: str
    place: str
    n_ranks: int
    arguments: tuple[str, ...]
    most_rounds: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """Fields that identify the cell in a file."""
        return (self.suite, self.group, self.system, self.place, self.n_ranks)


def measure(
    cells: Sequence[Cell],
    n_rounds: int,
    path: Path,
    timeout_s: float,
    tell: Callable[[str], None],
    side_by_side: bool = False,
    slow_motion: int = 1,
) -> dict[str, Any]:
    """Run every cell `n_rounds` times and write a file, whose runs are kept unless they failed.

    The same cells on the same commit and machine continue where they were interrupted; anything
    else begins a session of its own, in which nothing is done yet.

    Args:
        cells: In the order in which the cells of a group take turns, in every second round
            backwards.
        n_rounds: Times that each group's cells are gone through.
        path: JSON; written after each run, so that an interrupted run can continue.
        timeout_s: Limit of one run.
        tell: Takes lines: one per run, and those of progress.
        side_by_side: The jobs of a group live at the same time, and take turns of the steps that a
            run would have: see `benchmarks.alternate`. What was interrupted is measured again.
        slow_motion: The factor of all times to begin with where layers sleep.

    Returns:
        The content of the file.
    """
    content = sessions.read(path) if path.exists() else {"sessions": {}, "runs": []}
    content["runs"] = [run for run in content["runs"] if "error" not in run]
    session, done = _begin(content, cells)
    groups = dict.fromkeys(cell.group for cell in cells)

    def keep(cell: Cell, run: dict[str, Any]) -> None:
        run = {**asdict(cell), "arguments": list(cell.arguments), "session": session, **run}
        sessions.add(content, run)
        sessions.write(path, content)
        tell(_line(run))

    with cluster_for([(cell.place, cell.n_ranks) for cell in cells]):
        for group in groups:
            turns = [cell for cell in cells if cell.group == group]
            if parse_place(turns[0].place).sleep_speed is not None:
                so_far = (content, session, slow_motion)
                _run_sleeping(turns, n_rounds, timeout_s, so_far, keep, tell)
                continue
            if side_by_side:
                if not all((*cell.key, n_rounds - 1) in done for cell in turns):
                    _run_side_by_side(turns, n_rounds, timeout_s, keep, tell)
                continue
            for number in range(n_rounds):
                # To and fro: none always comes after the same other one, or last.
                for cell in turns[:: -1 if number % 2 else 1]:
                    if (*cell.key, number) in done or 0 < cell.most_rounds <= number:
                        continue
                    keep(cell, {"round": number, **run_cell(cell, timeout_s)})
    return content


def _run_sleeping(
    cells: Sequence[Cell],
    n_rounds: int,
    timeout_s: float,
    so_far: tuple[sessions.Content, str, int],
    keep: Callable[[Cell, dict[str, Any]], None],
    tell: Callable[[str], None],
) -> None:
    """Run cells whose layers sleep, so slowly that cores are idle for a third of the time.

    The factor is that of the group's runs of this session so far, or the one given. A run with
    busier cores is thrown away, and the group begins again with twice the factor, up to 16.
    """
    content, session, slow_motion = so_far
    names, here = {cell.key for cell in cells}, (session, provenance.commit())

    def done() -> list[dict[str, Any]]:
        runs = [run for run in content["runs"] if (run["session"], run["commit"]) == here]
        return [run for run in runs if sessions.key_of(run) in names]

    slow_motion = max((run["slow_motion"] for run in done()), default=slow_motion)
    while True:
        turns = [
            (number, cell)
            for number in range(n_rounds)
            for cell in cells[:: -1 if number % 2 else 1]
            if not 0 < cell.most_rounds <= number
        ]
        for number, cell in turns:
            known = [(*sessions.key_of(r), r["round"], r["slow_motion"]) for r in done()]
            if (*cell.key, number, slow_motion) in known:
                continue
            run = run_cell(cell, timeout_s * slow_motion, {SLOW_MOTION: str(slow_motion)})
            if run.get("idle_share", 1.0) < _LEAST_IDLE and slow_motion < _SLOWEST:
                tell(
                    f"{cell.group} {cell.system}: cores were idle for {run['idle_share']:.0%} of "
                    f"the time; again in slow motion, {2 * slow_motion} times"
                )
                slow_motion *= 2
                faster = done()
                content["runs"] = [run for run in content["runs"] if run not in faster]
                break
            keep(cell, {"round": number, "slow_motion": slow_motion, **run})
        else:
            return


def _run_side_by_side(
    cells: Sequence[Cell],
    n_rounds: int,
    timeout_s: float,
    keep: Callable[[Cell, dict[str, Any]], None],
    tell: Callable[[str], None],
) -> None:
    total_s = timeout_s * len(cells)  # others have their turns meanwhile
    run_cells = [functools.partial(run_cell, cell, total_s) for cell in cells]
    tell(f"{cells[0].group}: {len(cells)} jobs side by side")
    runs = alternate.measure(run_cells, [cell.n_ranks for cell in cells], n_rounds, tell)
    for cell, found in zip(cells, runs, strict=True):
        for run in found:
            keep(cell, run)


def _begin(content: dict[str, Any], cells: Sequence[Cell]) -> tuple[str, set[tuple]]:
    """Return the session of this invocation, and what is done of it: keys with rounds."""
    described = json.dumps([asdict(cell) for cell in cells])
    description = provenance.describe()
    description["cells"] = sha256(described.encode())[:12]
    session = sessions.enter(content, description)
    here = (session, description["commit"])  # a commit may have been made while the session ran
    done = [run for run in content["runs"] if (run["session"], run["commit"]) == here]
    return session, {(*sessions.key_of(run), run["round"]) for run in done}


def run_cell(
    cell: Cell, timeout_s: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one cell once, with some environment variables in addition.

    Returns:
        "samples": durations in seconds per case, the slowest rank's each; "sent_bytes" per case
        and call by the link of a host, the largest; "peak_bytes" of the largest rank; "start_s"
        until the slowest rank had its first result; "bytes" of the links; "load" before and after;
        "commit" and "command". Or "error".
    """
    with tempfile.TemporaryDirectory(prefix="tfscale-bench-") as folder:
        python = interpreter_of(cell.system)
        worker = "ddp" if cell.system.startswith("ddp") else _WORKERS.get(cell.suite, cell.suite)
        program = ["-m", f"benchmarks.worker_{worker}", "--system", cell.system]
        program += cell.arguments
        command = [python, *program, "--output", folder]
        path = os.pathsep.join(filter(None, [str(provenance.ROOT), os.environ.get("PYTHONPATH")]))
        extra = {
            "PYTHONPATH": path,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "-1",
            "BENCH_LOG": str(Path(folder) / "log"),
            "BENCH_STARTED": repr(time.time()),
            "BENCH_HOSTS": str(parse_place(cell.place, cell.n_ranks).n_hosts),
            **(variables or {}),
        }
        before = provenance.load()
        commit = provenance.commit()
        result: dict[str, Any] = {"commit": commit, "command": program, "load": [before]}
        try:
            result["bytes"] = run_ranks(cell.place, cell.n_ranks, command, extra, timeout_s)
            result.update(merge(Path(folder), cell.n_ranks, float(extra.get(SLOW_MOTION, "1"))))
        except RunFailedError as error:
            result["error"] = str(error)
        result["load"].append(provenance.load())
        return result


def merge(folder: Path, n_ranks: int, slow_motion: float = 1.0) -> dict[str, Any]:
    """Merge what the ranks wrote: of each duration the slowest rank's, without slow motion."""
    ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(n_ranks)]
    samples = {
        case: [
            max(values) / slow_motion
            for values in zip(*(r["samples"][case] for r in ranks), strict=True)
        ]
        for case in ranks[0]["samples"]
    }
    return {
        **ranks[0].get("facts", {}),
        "samples": samples,
        "sent_bytes": {case: max(r["sent_bytes"][case] for r in ranks) for case in samples},
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "start_s": max(rank["start_s"] for rank in ranks),
        "idle_share": min(rank["idle_share"] for rank in ranks),
    }


def _line(run: dict[str, Any]) -> str:
    name = f"{run['group']} {run['system']} {run['place']} x{run['n_ranks']} #{run['round']}"
    if "error" in run:
        return f"{name}: FAILED {run['error'][-600:]}"
    shown = {case: f"{1e3 * sorted(s)[len(s) // 2]:.1f} ms" for case, s in run["samples"].items()}
    if "slow_motion" in run:
        return f"{name}: {shown} (slow motion {run['slow_motion']}, idle {run['idle_share']:.0%})"
    return f"{name}: {shown}"
