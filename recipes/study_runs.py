"""The runs of a study: what they are, which are finished, and how one is started."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

RECIPES = Path(__file__).resolve().parent
Column = Callable[[list[dict[str, float]]], float | None]


@dataclass(frozen=True)
class Study:
    """What a study file says; `study.py` explains the fields."""

    name: str
    title: str
    shows: str
    recipe: str
    configurations: Mapping[str, Mapping[str, Any]]
    metric: str
    ranks: int = 1
    flags: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (1,)
    threshold: tuple[str, float] | None = None
    columns: Mapping[str, "Column"] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One configuration with one seed."""

    configuration: str
    seed: int
    ranks: int
    recipe: str
    flags: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Outcome:
    """What a finished run left behind.

    Attributes:
        run: Which one.
        epochs: Lines of `metrics.jsonl`.
        steps: Recorded steps of all ranks, see `CommunicationReport`; none on one process.
        made: Commit, machine and versions, see `machine.describe`.
    """

    run: Run
    epochs: list[dict[str, float]]
    steps: list[dict[str, Any]]
    made: dict[str, str]


def load(name: str) -> Study:
    """Read a study.

    Args:
        name: Of a file in `recipes/studies/`, or the path of another one.

    Raises:
        SystemExit: There is no such file, or it lacks something.
    """
    path = Path(name) if name.endswith(".py") else RECIPES / "studies" / f"{name}.py"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in (RECIPES / "studies").glob("*.py")))
        sys.exit(f"A study must be one of {known}, or a Python file. Received: {name}.")
    names = Study.__dataclass_fields__
    content = runpy.run_path(str(path))
    given = {key.lower(): value for key, value in content.items() if key.isupper()}
    unknown = sorted(key.upper() for key in given if key not in names)
    try:
        if unknown:
            raise TypeError(f"it defines {', '.join(unknown)}")
        return Study(name=path.stem, **given)
    except TypeError as error:
        sys.exit(f"A study must define what recipes/study.py lists. Received: {path}: {error}.")


def runs(study: Study, folder: Path) -> Iterator[Run]:
    """Return all runs, configuration by configuration of each seed.

    Args:
        study: The study.
        folder: Where its runs have their folders.
    """
    for seed in study.seeds:
        for name, own in study.configurations.items():
            flags = {**study.flags, **own, "seed": seed}
            ranks = flags.pop("ranks", study.ranks)
            recipe = flags.pop("recipe", study.recipe)
            slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            yield Run(name, seed, ranks, recipe, flags, folder / f"{slug}-seed{seed}")


def command(run: Run) -> list[str]:
    """Return the command of a run, without the folders it works in."""
    words = []
    for name, value in run.flags.items():
        is_switch = isinstance(value, bool)
        words.append(f"--{'' if value else 'no'}{name}" if is_switch else f"--{name}={value}")
    return [f"recipes/{run.recipe}.py", *words]


def is_finished(run: Run) -> bool:
    """Whether the run was finished with these flags."""
    settings = _read(run.folder / "run.json")
    return "seconds" in settings and _read(run.folder / "study.json").get("key") == _key(run)


def finish(run: Run, extra: Sequence[str] = ()) -> bool:
    """Do what is left of a run.

    Args:
        run: Which one.
        extra: More arguments of the recipe.

    Returns:
        Whether it is finished now.
    """
    if is_finished(run):
        print(f"{run.folder.name}: finished before.", flush=True)
        return True
    if _read(run.folder / "study.json").get("key") != _key(run):
        shutil.rmtree(run.folder, ignore_errors=True)  # of other flags
    run.folder.mkdir(parents=True, exist_ok=True)
    note = {"key": _key(run), **machine.describe()}
    (run.folder / "study.json").write_text(json.dumps(note, indent=2) + "\n")
    launch = ["-m", "tfscale.cli", "run", "-np", str(run.ranks), sys.executable]
    words = [sys.executable, *(launch if run.ranks > 1 else []), str(RECIPES / f"{run.recipe}.py")]
    words += [*command(run)[1:], *extra, "--resume", *(["--report"] if run.ranks > 1 else [])]
    words += [f"--run_dir={run.folder.parent}", f"--run_name={run.folder.name}"]
    log = run.folder / "log.txt"
    print(f"{run.folder.name}: {' '.join(command(run))} on {run.ranks} rank(s)", flush=True)
    with open(log, "a", encoding="utf-8") as file:
        code = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        print(f"{run.folder.name}: failed with exit code {code}, see {log}.", flush=True)
    return code == 0 and is_finished(run)


def outcomes(study: Study, folder: Path) -> list[Outcome]:
    """Return what the finished runs left behind."""
    return [_outcome(run) for run in runs(study, folder) if is_finished(run)]


def _outcome(run: Run) -> Outcome:
    def lines(name: str) -> list[dict[str, Any]]:
        path = run.folder / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    steps = [line for line in lines("communication.jsonl") if line["kind"] == "step"]
    note = _read(run.folder / "study.json")
    made = {name: str(value) for name, value in note.items() if name != "key"}
    return Outcome(run, lines("metrics.jsonl"), steps, made)


def _key(run: Run) -> str:
    return f"{run.ranks} {' '.join(command(run))}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
