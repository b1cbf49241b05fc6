"""The runs of a study: what they are, which are finished, and how one is started."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import study_metadata
import study_subprocess
from tfscale.files import read_json_lines
from tfscale.measure import provenance, theta

RECIPES = Path(__file__).resolve().parent
_OF_THETA = ("update", "theta", "loss", "distance", "gradient_norm", "noise_scale")
Column = Callable[[list[dict[str, float]]], float | None]


@dataclass(frozen=True)
class Study:
    """Fields of a study file; `study.py` explains the fields."""

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
    series: Mapping[str, Mapping[float, str]] = field(default_factory=dict)
    x_label: str = ""
    may_lose: tuple[float, float] | None = None


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
    """Files of a finished run.

    Attributes:
        run: Which one.
        epochs: Lines of `metrics.jsonl`.
        steps: Recorded steps of all ranks, see `CommunicationReport`; none on one process.
        made: Commit, machine, load and versions of each part of it, oldest first: of one, unless
            it was interrupted. See `provenance.describe`.
        theta: With `--theta-every`, columns of `theta.jsonl`: update, theta, loss, distance and
            what else was measured, a number for each record.
    """

    run: Run
    epochs: list[dict[str, float]]
    steps: list[dict[str, Any]]
    made: list[dict[str, str]]
    theta: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


def load(name: str) -> Study:
    """Read a study.

    Args:
        name: Of a file in `recipes/studies/`, or the path of another one.

    Raises:
        SystemExit: There is no such file, it lacks something, or two of its configurations would
            share a folder.
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
        study = Study(name=path.stem, **given)
    except TypeError as error:
        sys.exit(f"A study must define what recipes/study.py lists. Received: {path}: {error}.")
    names_of: dict[str, list[str]] = {}
    for configuration in study.configurations:
        names_of.setdefault(_slug(configuration), []).append(configuration)
    for alike in names_of.values():
        if len(alike) > 1:
            sys.exit(
                "Configurations must have names that differ in letters or digits, since their "
                f"folders are named by those. Received: {path}: {alike}. Rename all but one."
            )
    return study


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
            yield Run(name, seed, ranks, recipe, flags, folder / f"{_slug(name)}-seed{seed}")


def choose(study: Study, every: Sequence[Run], only: str, seeds: Sequence[str]) -> list[Run]:
    """Return some of the runs.

    Args:
        study: Whose they are.
        every: All of them.
        only: What the names of configurations must contain.
        seeds: Seeds; all if it is empty.

    Raises:
        SystemExit: No configuration is called so, or the study has no such seed.
    """
    unknown = sorted(set(seeds) - {str(seed) for seed in study.seeds})
    if unknown:
        sys.exit(
            f"--seeds must be among those of the study. Received: {', '.join(unknown)}. "
            f"Choose from {', '.join(map(str, study.seeds))}."
        )
    names = [name for name in study.configurations if only in name]
    if not names:
        sys.exit(
            f"--only must be part of a configuration's name. Received: {only}. Choose from: "
            f"{'; '.join(study.configurations)}."
        )
    return [
        run for run in every if run.configuration in names and (not seeds or str(run.seed) in seeds)
    ]


def require_commit(may_differ: bool) -> None:
    """Refuse to make results that no commit can make again.

    Args:
        may_differ: Whether files may differ from the commit.

    Raises:
        SystemExit: They do, and may not.
    """
    commit = provenance.describe()["commit"]
    if commit.endswith("+") and not may_differ:
        sys.exit(
            "The files of a study must be those of a commit, so that its results can be made "
            f"again. Received: changes after commit {commit[:-1]}. Commit them, or pass --dirty."
        )


def command(run: Run) -> list[str]:
    """Return the command of a run, without the folders it works in."""
    words = []
    for name, value in run.flags.items():
        is_switch = isinstance(value, bool)
        words.append(f"--{'' if value else 'no'}{name}" if is_switch else f"--{name}={value}")
    return [f"recipes/{run.recipe}.py", *words]


def is_finished(run: Run) -> bool:
    """Whether the run was finished with these flags.

    Raises:
        SystemExit: Its folder does not tell with which flags it was begun.
    """
    is_own = study_metadata.read(run.folder).get("key") == _key(run)
    return is_own and "seconds" in _settings(run.folder)


def finish(run: Run, extra: Sequence[str] = (), lock: IO[str] | None = None) -> bool:
    """Do what is left of a run.

    Args:
        run: Which one.
        extra: More arguments of the recipe.
        lock: See `study_subprocess.call`.

    Returns:
        Whether it is finished now.

    Raises:
        SystemExit: Its folder does not tell with which flags it was begun.
        OSError: Its folder is of other flags and cannot be removed, or it cannot be written.
    """
    if is_finished(run):
        print(f"{run.folder.name}: finished before.", flush=True)
        return True
    if study_metadata.read(run.folder).get("key", _key(run)) != _key(run):
        shutil.rmtree(run.folder)  # of other flags
    run.folder.mkdir(parents=True, exist_ok=True)
    study_metadata.write(run.folder, _key(run), provenance.describe())
    launch = ["-m", "tfscale.launcher.cli", "run", "-np", str(run.ranks), sys.executable]
    words = [sys.executable, *(launch if run.ranks > 1 else []), str(RECIPES / f"{run.recipe}.py")]
    words += [*command(run)[1:], *extra, "--resume", *(["--report"] if run.ranks > 1 else [])]
    words += [f"--run_dir={run.folder.parent}", f"--run_name={run.folder.name}"]
    log = run.folder / "log.txt"
    print(f"{run.folder.name}: {' '.join(command(run))} on {run.ranks} rank(s)", flush=True)
    code = study_subprocess.call(words, log, lock)
    if code:
        print(f"{run.folder.name}: failed with exit code {code}, see {log}.", flush=True)
    return code == 0 and is_finished(run)


def outcomes(study: Study, folder: Path) -> list[Outcome]:
    """Return the files of the finished runs."""
    return [_outcome(run) for run in runs(study, folder) if is_finished(run)]


def _outcome(run: Run) -> Outcome:
    lines = read_json_lines(run.folder / "communication.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    made = study_metadata.parts(study_metadata.read(run.folder))
    epochs = read_json_lines(run.folder / "metrics.jsonl")
    return Outcome(
        run, epochs, steps, made, _columns(read_json_lines(run.folder / theta.FILE_NAME))
    )


def _columns(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    """Return the records of theta by column, without columns that hold nothing."""
    columns = {name: [row.get(name) for row in rows] for name in _OF_THETA}
    return {name: values for name, values in columns.items() if set(values) - {None}}


def _slug(name: str) -> str:
    """Return a configuration's name as its folder has it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _key(run: Run) -> str:
    return f"{run.ranks} {' '.join(command(run))}"


def _settings(folder: Path) -> dict[str, Any]:
    """Return `run.json`; a run is continued where it is missing or damaged."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
