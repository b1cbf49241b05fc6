"""Run tests with other versions of TensorFlow, Keras and Python, and tell the outcome in a table.

    python tools/test_versions.py [lowest | highest | coming | 2.20/3.13]... [--python PYTHON]
        [--all] [--output FILE] [-- PYTEST_ARGUMENTS]

Each pair has an environment of its own under build/versions, where the present sources are
installed with a library of that TensorFlow. Without `--all`, the quick tests on ranks run: equality
with one process, and the cases of the launcher. `make test-versions` does the three named pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import test_all

ROOT = test_all.ROOT
ENVIRONMENTS = ROOT / "build" / "versions"
NAMED = {
    "lowest": ("tensorflow==2.18.*", "keras==3.10.*"),
    "highest": ("tensorflow==2.21.*", "keras==3.15.*"),
    "coming": ("tf-nightly", "keras-nightly"),
}
QUICK = ("tests/parallel", "tests/faults", "tests/scripts", "-m", "quick")
_ASK = """
import json, platform, keras, tensorflow as tf
print(json.dumps([tf.__version__, keras.__version__, platform.python_version()]))
"""


@dataclass(frozen=True)
class Row:
    """The outcome of one pair: versions as the packages name themselves, and counts of tests."""

    tensorflow: str
    keras: str
    python: str
    outcome: str
    minutes: float

    def __str__(self) -> str:
        """The row of a Markdown table."""
        cells = (self.tensorflow, self.keras, self.python, self.outcome, f"{self.minutes:.0f} min")
        return f"| {' | '.join(cells)} |"


HEADER = "| TensorFlow | Keras | Python | tests | time |\n|---|---|---|---|---|"


def requirements_of(pair: str) -> tuple[str, str]:
    """The requirements of pip that a pair stands for: a name of `NAMED`, or "2.20/3.13"."""
    if pair in NAMED:
        return NAMED[pair]
    found = re.fullmatch(r"([\d.]+)/([\d.]+)", pair)
    if not found:
        raise argparse.ArgumentTypeError(
            f"a pair must be {', '.join(NAMED)} or TENSORFLOW/KERAS, as 2.20/3.13. Received: {pair}"
        )
    return f"tensorflow=={found[1]}.*", f"keras=={found[2]}.*"


def prepare(pair: str, python: str) -> Path:
    """Make the environment of a pair, with the present sources installed; return its Python."""
    requirements = requirements_of(pair)
    version = subprocess.check_output(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    folder = ENVIRONMENTS / f"{pair.replace('/', '-')}-python{version}"
    own_python = folder / "bin" / "python"
    if not own_python.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)

    def install(*words: str) -> None:
        command = [str(own_python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*command, *words], check=True, cwd=ROOT)

    # tf-nightly is no `tensorflow` to pip, which would install the latter over it.
    others = []
    for requirement in metadata.requires("tfscale") or []:
        found = re.fullmatch(r"([^;]+)(?:; extra == .(\w+).)?", requirement)
        if found and found[2] in (None, "mpich", "recipes"):
            others += [found[1]] if not re.match(r"(tensorflow|keras)\b", found[1]) else []
    install("pip>=25.1", "setuptools>=77.0.3")  # this pip knows dependency groups
    install("--group", "test", *others)
    install("--upgrade", "--pre", *requirements)
    # pip keeps an installed package of the same version: this one is of the present sources.
    install("--no-build-isolation", "--no-deps", "--force-reinstall", ".")
    return own_python


def test(python: Path, is_whole: bool, words: Sequence[str]) -> Row:
    """Run the tests, in a folder without the library's sources."""
    started = time.monotonic()
    asked = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"TensorFlow cannot be imported by {python}:\n{asked.stderr[-2000:]}")
    tensorflow, keras, interpreter = json.loads(asked.stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory(prefix="tfscale-tests-") as name:
        folder = Path(name)
        for source in test_all.COPIED:
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, folder / source)  # type: ignore[operator]
        asked_for = ("tests",) if is_whole else QUICK
        left_out = [f"--ignore=tests/unit/{name}.py" for name in test_all.OF_SOURCES]
        command = [str(python), "-m", "pytest", *asked_for, *left_out, *words]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "RANKS": "quick"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip().strip("=").strip() or last
        status = process.wait()
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", last)
    outcome = ", ".join(counts) if counts else f"ended with status {status}: {last}"
    minutes = (time.monotonic() - started) / 60
    return Row(tensorflow, keras, interpreter, outcome, minutes)


def main(argv: Sequence[str] | None = None) -> int:
    """Test the pairs in turn; return 1 if one failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="Run tests with other versions of TensorFlow.")
    parser.add_argument("pairs", nargs="*", default=list(NAMED), metavar="PAIR")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to use")
    parser.add_argument("--all", action="store_true", help="all tests, not the quick ones")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the table is written")
    arguments = parser.parse_args(words[:cut])
    for pair in arguments.pairs:
        try:
            requirements_of(pair)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    rows = []
    for pair in arguments.pairs:
        print(f"== {pair}: {' and '.join(requirements_of(pair))}", flush=True)
        rows.append(test(prepare(pair, arguments.python), arguments.all, words[cut + 1 :]))
    table = "\n".join([HEADER, *map(str, rows)])
    print(table)
    if arguments.output:
        arguments.output.write_text(f"{table}\n")
    return int(any("passed" not in r.outcome or "failed" in r.outcome for r in rows))


if __name__ == "__main__":
    sys.exit(main())
