"""Train the same tiny models on a base commit and on this checkout; compare plans and bits.

    python tools/replay.py --base main --quick
    python tools/replay.py --base HEAD~1 --cells "lstm/*" "*/4" --expect "lstm/sharded/* *:labels"

Cells are in `tools/replay_cells.py`. Recordings are kept in `build/replay`: a commit is recorded
once. Ends with status 1 if a cell is missing, failed, or differs without being expected to.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import replay_cells

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "replay"
RECORDER = Path(replay_cells.__file__).resolve()
# One thread per operator, and kernels that do not depend on timing: the same bits in each run.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "KERAS_BACKEND": "tensorflow",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TFSCALE_REDUCE_THREADS": "1",
    "TFSCALE_SET_THREADS": "0",
    "TFSCALE_STALL_SHUTDOWN_S": "3000",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}
SILENCE_S, _POLL_S = 300.0, 0.1  # a job that ends no cell for so long has hung

Record = dict[str, Any]


def compare(
    base: dict[str, Record], new: dict[str, Record], cells: Sequence[str], expected: Sequence[str]
) -> tuple[list[str], bool]:
    """Compare two recordings.

    Args:
        base: Records of the base commit, by cell.
        new: Records of this checkout.
        cells: Names of the cells to compare.
        expected: Patterns of cells, or "cell:section", that may differ.

    Returns:
        A line per cell with its first difference, and whether one is wrong.
    """
    lines, is_wrong = [], False
    for cell in cells:
        found = differences(base.get(cell), new.get(cell))
        fatal = [section for section in found if not _is_expected(cell, section, expected)]
        word = "DIFFERENT" if fatal else "expected" if found else "equal"
        lines.append(f"{word:9s} {cell}")
        lines += [f"{'':9s}   {section}: {text}" for section, text in found.items()]
        is_wrong = is_wrong or bool(fatal)
    return lines, is_wrong


def differences(base: Record | None, new: Record | None) -> dict[str, str]:
    """Return the first difference of each section of a cell; "cell" where there is no record."""
    for name, record in (("base", base), ("this checkout", new)):
        if record is None:
            return {"cell": f"missing in {name}"}
        if "error" in record:
            return {"cell": f"failed in {name}: {record['error']}"}
    assert base is not None and new is not None
    texts = {s: first_difference(base[s], new[s]) for s in replay_cells.SECTIONS}
    return {section: text for section, text in texts.items() if text}


def first_difference(base: Sequence[Sequence[str]], new: Sequence[Sequence[str]]) -> str:
    """Return the first difference of two lists of pairs, or an empty string.

    Args:
        base: [name, value] pairs in order.
        new: Likewise.
    """
    for (name, value), (new_name, new_value) in zip(base, new, strict=False):
        if name != new_name:
            return f"{name} is now {new_name}"
        if value != new_value:
            return f"{name} was {value}, is {new_value}"
    if len(base) != len(new):
        longer, word = (base, "is gone") if len(base) > len(new) else (new, "is additional")
        name, value = longer[min(len(base), len(new))]
        return f"{name} ({value}) {word}; {len(base)} entries before, {len(new)} now"
    return ""


def _is_expected(cell: str, section: str, expected: Sequence[str]) -> bool:
    names = (cell, f"{cell}:{section}")
    return any(fnmatchcase(name, pattern) for name in names for pattern in expected)


def record(tree: Path, cells: Sequence[str], what: str) -> Iterator[dict[str, Record]]:
    """Run cells with the package of a checkout, those of one number of ranks in one job.

    Args:
        tree: Root of the checkout, its library built.
        cells: Names of the cells.
        what: The checkout, in messages.

    Yields:
        The records of each job, by cell. Where a job dies or hangs, the cell that it was at has an
        "error", and the following ones run in another job.
    """
    for n_ranks in replay_cells.RANKS:
        remaining = [cell for cell in cells if cell.endswith(f"/{n_ranks}")]
        while remaining:
            begin = time.monotonic()
            records, output = _run_job(tree, remaining, n_ranks)
            seconds = time.monotonic() - begin
            cpu_s = sum(own["cpu_s"] for own in records)
            _say(
                f"{what}: {len(records)} of {len(remaining)} cells on {n_ranks} ranks, "
                f"{seconds:.0f} s, {cpu_s:.0f} s of CPU"
            )
            found = {own["cell"]: own for own in records}
            remaining = remaining[len(records) :]
            if remaining:
                _say(f"{what}: {remaining[0]} failed\n{output}")
                found[remaining[0]] = {"cell": remaining[0], "error": output.strip()[-300:]}
                remaining = remaining[1:]
            yield found


def _run_job(tree: Path, cells: Sequence[str], n_ranks: int) -> tuple[list[Record], str]:
    """Run cells of one number of ranks; return the records and the end of what was printed."""
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        records, output = Path(folder) / "records.jsonl", Path(folder) / "output"
        records.touch()
        with output.open("w") as file:
            process = subprocess.Popen(
                [*mpiexec(n_ranks), sys.executable, str(RECORDER), str(records), *cells],
                cwd=folder,
                env=_environment(tree),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                is_over = _wait(process, records)
            finally:
                _end(process)
        done = [json.loads(line) for line in records.read_text().splitlines()]
        text = output.read_text(errors="replace")[-4000:]
        return done, text if is_over else f"{text}\nended: no cell within {SILENCE_S:.0f} s"


def _environment(tree: Path) -> dict[str, str]:
    """Return the variables of a job: tfscale's own settings are the defaults."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TFSCALE_")}
    return {**inherited, **ENVIRONMENT, "PYTHONPATH": str(tree)}


def mpiexec(n_ranks: int) -> list[str]:
    """Return the words that start a program on some ranks, whatever commit it imports."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("mpiexec", path=path)
    if found is None:
        raise SystemExit("Replaying needs an MPI launcher. Received: no mpiexec. Run make build.")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    options = []
    if "Open MPI" in version.stdout or "OpenRTE" in version.stdout:
        options = ["--oversubscribe", "--bind-to", "none"]
        options += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [found, *options, "-n", str(n_ranks)]


def _wait(process: subprocess.Popen, records: Path) -> bool:
    """Return whether a job ends by itself; False once it has been silent for too long.

    Polls are counted, as a job that was suspended together with this process has not hung.
    """
    size = n_silent = 0
    while n_silent * _POLL_S < SILENCE_S:
        if process.poll() is not None:
            return True
        time.sleep(_POLL_S)
        now = records.stat().st_size
        n_silent = 0 if now > size else n_silent + 1
        size = now
    return False


def _end(process: subprocess.Popen) -> None:
    """End mpiexec, which ends its ranks; harmless if it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


class Recording:
    """The records of a commit, kept in a file; those of other versions or machines do not count."""

    def __init__(self, commit: str) -> None:
        """Read what is there."""
        self._path = FOLDER / f"{commit}.json"
        self._made_with = {
            "recorder": _digest_code(RECORDER.read_text()),
            "machine": f"{platform.node()} {platform.machine()} {os.cpu_count()}",
            "python": platform.python_version(),
        } | {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
        self.cells: dict[str, Record] = {}
        if self._path.exists():
            content = json.loads(self._path.read_text())
            if content["made_with"] == self._made_with:
                self.cells = content["cells"]

    def add(self, cells: dict[str, Record]) -> None:
        """Keep further records; cells that failed are tried again in the next run."""
        self.cells |= {name: own for name, own in cells.items() if "error" not in own}
        content = {"made_with": self._made_with, "cells": self.cells}
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(content, indent=1))
        unfinished.replace(self._path)


def _digest_code(source: str) -> str:
    """Return a digest of a module that does not depend on comments and layout."""
    return hashlib.sha256(ast.dump(ast.parse(source)).encode()).hexdigest()


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check out a commit in a temporary worktree, with its library, and remove it at the end."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    tree = Path(tempfile.mkdtemp(prefix="tree-", dir=FOLDER))
    try:
        _git("worktree", "add", "--detach", "--force", str(tree), commit)
        _provide_library(tree, commit)
        yield tree
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _git("worktree", "remove", "--force", str(tree))
        shutil.rmtree(tree, ignore_errors=True)


def _provide_library(tree: Path, commit: str) -> None:
    """Copy this checkout's library where the C++ sources are equal, else build the commit's own."""
    kept = FOLDER / "libraries" / _git("rev-parse", f"{commit}:custom_ops")
    changed = _git("diff", "--name-only", commit, "--", "custom_ops")
    changed += _git("ls-files", "--others", "--exclude-standard", "custom_ops")
    source = kept if changed else ROOT
    if _copy_library(source, tree) and _fits(tree):
        return
    _say(f"The library of {commit[:12]} is built: minutes.")
    subprocess.run([sys.executable, "tools/build_native.py"], cwd=tree, check=True)
    _copy_library(tree, kept)


def _copy_library(source: Path, target: Path) -> bool:
    """Copy the folders of built libraries to the same places of another tree, if there are any."""
    libraries = list((source / "tfscale").rglob("libtfscale*.so"))
    for library in libraries:
        place = library.parent.relative_to(source)
        shutil.copytree(library.parent, target / place, dirs_exist_ok=True)
    return bool(libraries)


def _fits(tree: Path) -> bool:
    """Return whether a checkout finds its library: its place may have moved."""
    code = "import sys, tfscale; sys.exit(not tfscale.mpi_built())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=FOLDER, env=_environment(tree), capture_output=True, check=False
    )
    return done.returncode == 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _recordings(base: str, cells: Sequence[str]) -> tuple[dict[str, Record], dict[str, Record]]:
    """Return the records of a base commit and of this checkout, making those that are missing."""
    commit = _git("rev-parse", "--verify", f"{base}^{{commit}}")
    own = _unchanged_commit()
    kept = Recording(commit)
    old: dict[str, Record] = {}
    new: dict[str, Record] = {}
    missing = [cell for cell in cells if cell not in kept.cells]
    if missing:
        with checkout(commit) as tree:
            for made in record(tree, missing, f"base {commit[:12]}"):
                kept.add(made)
                old |= made
    for made in record(ROOT, cells, "this checkout"):
        new |= made
    if own and own == _unchanged_commit():
        head = Recording(own)  # the base of a later run
        head.add({cell: new[cell] for cell in new if cell not in head.cells})
    return {**old, **kept.cells}, new


def _unchanged_commit() -> str:
    """Return the commit that is checked out here; empty if a file differs from it."""
    return "" if _git("status", "--porcelain") else _git("rev-parse", "HEAD")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; return 1 if something is wrong, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--base", metavar="COMMIT", help="commit to compare this checkout with")
    source.add_argument(
        "--files", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two recordings"
    )
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="ten cells on 2 ranks")
    extent.add_argument("--all", action="store_true", help="each pair on each number of ranks")
    extent.add_argument("--cells", nargs="+", default=[], metavar="PATTERN", help="such cells")
    parser.add_argument(
        "--expect", default="", metavar='"CELL CELL:SECTION"', help="patterns of what may differ"
    )
    options = parser.parse_args(argv)
    known = replay_cells.all_cells()
    chosen = known if options.all else replay_cells.standard_cells()
    chosen = list(replay_cells.QUICK) if options.quick else chosen
    if options.cells:
        chosen = [c for c in known if any(fnmatchcase(c, pattern) for pattern in options.cells)]
    expected = options.expect.split()
    for pattern in (*options.cells, *(words.partition(":")[0] for words in expected)):
        if not any(fnmatchcase(cell, pattern) for cell in known):
            parser.error(f"A pattern must name a cell such as {known[0]}. Received: {pattern}.")
    if options.files:
        base, new = (json.loads(path.read_text())["cells"] for path in options.files)
    else:
        base, new = _recordings(options.base, chosen)
    lines, is_wrong = compare(base, new, chosen, expected)
    print("\n".join(lines))
    n_wrong = sum(line.startswith("DIFFERENT") for line in lines)
    print(f"{len(chosen)} cells, {n_wrong} wrong")
    return int(is_wrong)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # as Ctrl-C: ranks are ended, too
    sys.exit(main())
