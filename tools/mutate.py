"""Mutation test of the core: break one operator or bound at random places, and run the tests.

    python tools/mutate.py --seed 7cd378f2 [--places 20] [--only 3,4] [--list] [--all]

The seed, usually the first eight hex digits of a commit, chooses the places. Each mutant is made in
a copy of the last commit's tree, where the tests of `make test` run until one fails. Survivors run
the remaining tests of `make test-all` if `--all` is given. Results are written to
`build/mutation.json` after each place, and a later run continues with the places not yet there.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "build" / "mutation.json"
# Plan, executor, shards, averaging, clipping, accumulation, checkpoints; scheduler, reductions.
CORE = (
    "tfscale/plan/*.py",
    "tfscale/exchange/*.py",
    "tfscale/optimizer/*.py",
    "tfscale/checkpoints/*.py",
    "tfscale/data/*.py",
    "custom_ops/comm/scheduler*.cc",
    "custom_ops/comm/plan*.cc",
    "custom_ops/comm/*reduc*.cc",
    "custom_ops/comm/lanes.cc",
    "custom_ops/comm/collectives.cc",
    "custom_ops/comm/gather.cc",
)
# Each operator and its neighbour: a bound moves by one, a comparison or a sign turns round.
SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "+", "+=": "-=", "-=": "+=",
    "&&": "||", "||": "&&", "and": "or", "or": "and", "min": "max", "max": "min",
    "any": "all", "all": "any",
}  # fmt: skip
# A stage that takes longer than this hangs, which counts as caught.
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Place:
    """An operator in a source file; `column` counts characters from 0."""

    file: str
    line: int
    column: int
    old: str

    @property
    def new(self) -> str:
        """The operator that takes its place."""
        return SWAPS[self.old]


def _texts_only(tree: ast.AST) -> set[int]:
    """Return lines where a change alters messages, annotations or imports, and no result."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            parts = [node]
        elif isinstance(node, (ast.AnnAssign, ast.arg)):
            parts = [node.annotation]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parts = [node.returns]
        for part in parts:
            if part is not None:
                lines |= set(range(part.lineno, part.end_lineno + 1))  # type: ignore[attr-defined]
    return lines


def python_places(text: str, file: str) -> Iterator[Place]:
    """Yield the operators of Python code."""
    skipped = _texts_only(ast.parse(text))
    before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line, column = token.start
        # A sign or a star before an operand is no operator between two.
        is_infix = before is not None and (
            before.type in (tokenize.NAME, tokenize.NUMBER) or before.string in (")", "]")
        )
        is_operator = token.type == tokenize.OP and is_infix
        is_word = token.type == tokenize.NAME
        if token.string in SWAPS and line not in skipped and (is_operator or is_word):
            yield Place(file, line, column, token.string)
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token


def cpp_places(text: str, file: str) -> Iterator[Place]:
    """Yield the operators of C++ code, which clang-format has set between spaces."""
    operator = re.compile(r"(?<= )(<=|>=|==|!=|\+=|-=|&&|\|\||[<>+*/%-])(?= )|\b(min|max)(?=\()")
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"(\\.|[^"\\])*"', lambda found: "_" * len(found[0]), line.split("//")[0])
        if code.lstrip().startswith(("#", "throw", "Fail")):
            continue
        for found in operator.finditer(code):
            yield Place(file, number, found.start(), found[0])


def places_of(root: Path) -> list[Place]:
    """Return all places of the core, in a fixed order."""
    found: list[Place] = []
    for path in sorted({path for pattern in CORE for path in root.glob(pattern)}):
        kind = python_places if path.suffix == ".py" else cpp_places
        found += kind(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    return found


def mutate(root: Path, place: Place) -> None:
    """Change the operator in the file."""
    path = root / place.file
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    line, end = lines[place.line - 1], place.column + len(place.old)
    if line[place.column : end] != place.old:
        raise ValueError(f"{place} must be in {path}. Received the line: {line!r}")
    lines[place.line - 1] = line[: place.column] + place.new + line[end:]
    path.write_text("".join(lines), encoding="utf-8")


def copy_of_head(folder: Path) -> None:
    """Make a fresh tree of the last commit, with the present library."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    shutil.copytree(ROOT / "tfscale" / "_lib", folder / "tfscale" / "_lib", dirs_exist_ok=True)


def stages(place: Place, runs_all: bool) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the commands of `make test`, then what `make test-all` adds."""
    pytest = [sys.executable, "-m", "pytest", "-x"]
    is_cpp = place.file.endswith(".cc")
    cpp = [sys.executable, "tools/cpp_tests.py", "--variants"]
    build = [[sys.executable, "tools/build_native.py"], [*cpp, "plain"]] if is_cpp else []
    yield (
        "make test",
        [
            *build,
            [*pytest, "tests/unit", "-n", "2", "--dist", "loadfile", "-m", "not slow"],
            [*pytest, "tests/parallel", "tests/faults", "tests/scripts", "-m", "quick"],
        ],
    )
    if runs_all:
        rest = ["tests/parallel", "tests/faults", "tests/horovod_contract", "tests/scripts"]
        yield (
            "make test-all",
            [
                *([[*cpp, "thread"]] if is_cpp else []),
                [*pytest, "tests/unit", "-n", "2", "--dist", "loadfile", "-m", "slow"],
                *([*pytest, folder] for folder in rest),
            ],
        )


def caught_by(folder: Path, place: Place, runs_all: bool) -> tuple[str | None, str]:
    """Return the stage that failed, or None, and the end of what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    for stage, commands in stages(place, runs_all):
        for command in commands:
            variables = dict(environment)
            if stage == "make test" and "quick" in command:
                variables["RANKS"] = "quick"
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=variables,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                )
            except subprocess.TimeoutExpired:
                return stage, f"hangs: {' '.join(command[1:4])}"
            if done.returncode != 0:
                words = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return stage, words[0] if words else (done.stdout + done.stderr)[-300:]
    return None, ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the mutants; return 0 once all have a result."""
    parser = argparse.ArgumentParser(description="Break the core at random places, run the tests.")
    parser.add_argument("--seed", required=True, help="hex digits, as of a commit")
    parser.add_argument("--places", type=int, default=20)
    parser.add_argument("--only", default="", help="numbers of places, as 3,4")
    parser.add_argument("--list", action="store_true", help="show the places")
    parser.add_argument("--all", action="store_true", help="survivors run the rest of all tests")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(argv)
    places = random.Random(int(arguments.seed, 16)).sample(places_of(ROOT), arguments.places)
    chosen = {int(word) for word in arguments.only.split(",") if word} or set(range(len(places)))
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    folder = ROOT / "build" / "mutant"
    for number, place in enumerate(places):
        name = f"{place.file}:{place.line}:{place.column} {place.old} -> {place.new}"
        known = results.get(name)
        print(f"{number:2} {name}", flush=True)
        is_known = known and (known["caught_by"] or known["ran_all"] or not arguments.all)
        if number in chosen and not arguments.list and not is_known:
            copy_of_head(folder)
            mutate(folder, place)
            stage, test = caught_by(folder, place, arguments.all)
            known = {**asdict(place), "caught_by": stage, "test": test, "ran_all": arguments.all}
            results[name] = known
            arguments.output.parent.mkdir(exist_ok=True)
            arguments.output.write_text(json.dumps(results, indent=1))
        if known:
            print(f"   {known['caught_by'] or 'SURVIVED'}  {known['test']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
