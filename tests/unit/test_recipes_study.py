"""Studies: what the results say, in numbers, pictures and words."""

import dataclasses
import json
import runpy
import shutil
from pathlib import Path

import batch_growth
import command_line
import momentum  # noqa: F401  as of training, below
import numpy as np
import pytest
import study_picture
import study_report
import study_results
import study_runs
import training  # noqa: F401  its flags are defined once, and outlive those of a recipe
from absl import flags
from absl.testing import flagsaver

from tests.helpers import fake_study
from tests.helpers.fake_study import STUDY
from tfscale.data import GlobalBatches
from tfscale.files import write_json_lines

RECIPES = Path(study_runs.__file__).parent


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs, "RECIPES", tmp_path)
    return study_runs.load(fake_study.write(tmp_path))


@pytest.fixture
def runs(study, tmp_path):
    """Finished runs, the first with records of theta."""
    every = list(study_runs.runs(study, tmp_path / "runs"))
    assert all(study_runs.finish(run) for run in every)
    rows = [{"update": n, "epoch": 0, "theta": t, "loss": 1.0} for n, t in ((2, 0.5), (4, None))]
    write_json_lines(every[0].folder / "theta.jsonl", rows)
    return every


def _outcome(name, seed, values, commit="abc", theta=None, batches=None, loss=1.0):
    """A run with these accuracies after its epochs."""
    run = study_runs.Run(name, seed, 1, "fake", {}, Path())
    epochs = [
        {"val_accuracy": v, "train_seconds": 1.0, "batch_size": b, "val_loss": loss}
        for v, b in zip(values, batches or [4] * len(values), strict=True)
    ]
    return study_runs.Outcome(run, epochs, [], [{"commit": commit}], theta or {})


def test_table_json_and_picture(study, runs, tmp_path):
    outcomes = study_runs.outcomes(study, tmp_path / "runs")
    outcomes[1].steps.append({"exposed_s": 0.125, "forward_wait_s": 0.125, "step_s": 1.0})
    for outcome in outcomes:
        outcome.made[0] |= {"machine": "2 cores", "load": "2.1"}
    assert "No times: 2.1 programs" in study_report.write(study, outcomes, tmp_path / "mine", "")
    for outcome in outcomes:
        outcome.made[0]["load"] = "0.1"
    text = study_report.write(study, outcomes, tmp_path / "mine", "Mind this.")
    head, _, *rows = [line for line in text.splitlines() if line.startswith("| ")]
    error = "(mean ± standard error)"
    assert f"| val_accuracy, last epoch {error} | epochs | largest batch {error} |" in head
    # Losses 1/2, 1/4 and 2, 1, 1/2: the threshold after one epoch of 2 s and three of 0.5 s.
    assert rows == [
        "| small batch | 1 | 2 | 0.65 ± 0.05 | 3 | 4 ± 0 | - | 1 | 2 | - | 1 | 2 | 1 |",
        "| Large: 16 | 1 | 2 | 0.65 ± 0.05 | 3 | 16 ± 0 | 7 ± 0 | 3 | 0.5 | 25 % | 4 | 1.5 |"
        " 1.33 |",
    ]
    assert (tmp_path / "mine.md").read_text() == text
    parts = ("Mind this.", "Commit: ", "Machine: ", "Seeds: 1, 2", "recipes/fake.py --epochs=3")
    assert [part for part in parts if part not in text] == []
    content = (tmp_path / "mine.json").read_text()
    assert '"theta": [0.5, null],' in content  # not a line for each number
    first, *others = json.loads(content)["runs"]
    columns = {"update": [2, 4], "theta": [0.5, None], "loss": [1.0, 1.0]}
    assert first["theta"] == columns and not any("theta" in row for row in others)
    assert len(others) == 3 and len(first["epochs"]) == 3
    study_picture.draw(study, outcomes, tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_rows_of_earlier_results_stay_where_their_runs_are_gone(study, runs, tmp_path):
    path = tmp_path / "mine.json"
    text = study_report.write(
        study, study_runs.outcomes(study, tmp_path / "runs"), tmp_path / "mine", ""
    )
    shutil.rmtree(tmp_path / "runs")
    kept = study_results.read(runs, path)
    assert list(kept) == [run.folder for run in runs]
    assert [list(outcome.theta) for outcome in kept.values()][:2] == [
        ["update", "theta", "loss"],
        [],
    ]
    again = study_report.write(study, list(kept.values()), tmp_path / "again", "")
    assert again == text.replace("mine", "again", 1)
    (tmp_path / "mine.py").write_text(STUDY.replace("16,", "32,"))  # of other flags nothing stays
    other = study_runs.load(str(tmp_path / "mine.py"))
    left = study_results.read(list(study_runs.runs(other, tmp_path / "runs")), path)
    assert [outcome.run.configuration for outcome in left.values()] == ["small batch"] * 2
    path.write_text('{"runs": 3}')
    with pytest.raises(SystemExit, match="--keep"):
        study_results.read(runs, path)
    assert study_results.read(runs, tmp_path / "none.json") == {}


def test_single_seeds_and_uncommitted_files_are_named_under_the_table(study, tmp_path):
    one_seed, uncommitted = "Rows of one seed", "**2 of 3 runs were made from a working tree"
    every = [_outcome("small batch", 1, [0.1]), _outcome("Large: 16", 1, [0.2])]
    text = study_report.write(study, every, tmp_path / "mine", "")
    assert one_seed in text and "±" not in text and "uncommitted" not in text
    every += [_outcome("small batch", 2, [0.1], commit="abc+")]
    every[0].made.insert(0, {"commit": "old+"})  # an earlier part of it
    text = study_report.write(study, every, tmp_path / "mine", "")
    assert one_seed in text and uncommitted in text
    every += [_outcome("Large: 16", 2, [0.1])]
    assert one_seed not in study_report.write(study, every, tmp_path / "mine", "")


def test_losses_are_paired_by_seed_and_compared_with_limits(study, tmp_path):
    """Seeds differ by more than configurations; of seed 5 there is no base."""
    study = dataclasses.replace(study, may_lose=(0.2, 0.5))
    for points, verdict, bound in (
        ([0.1, 0.2, 0.3, 0.2], "passed", 0.2 + 2.353 * 0.0816497 / 2),
        ([0.3, 0.3, 0.3, 0.3], "failed", 0.3),
        ([0.0, 0.0, 0.0, 0.7], "failed", 0.175 + 2.353 * 0.35 / 2),
        ([2.0, -2.0, 2.0, -1.0], "undecided", 0.25 + 2.353 * 2.0616 / 2),
    ):
        every = [_outcome("Large: 16", 5, [0.1])]
        for seed, lost in enumerate(points, 1):
            every.append(_outcome("Large: 16", seed, [0.2 * seed - lost / 100]))
            every.append(_outcome("small batch", seed, [0.2 * seed]))
        (loss,) = study_report.losses(study, every)
        assert loss.verdict == verdict and loss.bound == pytest.approx(bound, abs=1e-4)
        np.testing.assert_allclose(loss.points, points, atol=1e-9)
    text = study_report.write(study, every, tmp_path / "mine", "")
    assert "| Large: 16 | 4 | 0.25 | 1.03 | 2.68 | undecided |" in text.splitlines()
    assert json.loads((tmp_path / "mine.json").read_text())["losses"][0]["verdict"] == "undecided"
    study_picture.draw(study, every, tmp_path / "mine.png")
    assert study_report.losses(dataclasses.replace(study, may_lose=None), every) == []


def test_a_loss_reaches_a_threshold_from_above_anything_else_from_below(study):
    lines = [{"val_loss": loss, "psnr": 10 / loss} for loss in (0.9, 0.3, 0.2)]
    thresholds = [("val_loss", 0.3), ("val_loss", 0.1), ("psnr", 40.0), None]
    assert [study_report.epochs_to(t, lines) for t in thresholds] == [2, None, 3, None]
    one_missed = [_outcome("small batch", 1, [0.5], loss=loss) for loss in (0.1, 0.9)]
    (summary,) = study_report.summaries(study, one_missed)
    assert summary.epochs_to_threshold is None and summary.seconds_to_threshold is None


def _lines(figure, label):
    """Points of the lines in the panels whose axis of y has this label."""
    return [
        [(float(x), float(y)) for x, y in line.get_xydata()]
        for axes in figure.axes
        if axes.get_ylabel() == label
        for line in axes.get_lines()
    ]


def test_curves_are_means_over_seeds_and_batches_are_drawn_for_each(study):
    """Batches grow in different epochs: 6 was the batch of no run."""
    seeds = (([0.1, 0.4], [4, 4]), ([0.3, 0.6], [4, 8]))
    every = [_outcome("small batch", i, v, batches=b) for i, (v, b) in enumerate(seeds)]
    figure = study_picture.figure(study, every)
    np.testing.assert_allclose(_lines(figure, "val_accuracy"), [[(1, 0.2), (2, 0.5)]])
    (last,) = (a for a in figure.axes if a.get_xlabel().startswith("val_accuracy, last epoch"))
    ((low, high),) = (c.get_segments()[0][:, 0] for c in last.collections)
    np.testing.assert_allclose((low, high), (0.4, 0.6))  # 0.5 and 0.1414 / sqrt(2)
    label = "Samples of a batch, each seed"
    assert _lines(figure, label) == [[(1, 4), (2, 4)], [(1, 4), (2, 8)]]
    (batches,) = (a for a in figure.axes if a.get_ylabel() == label)
    assert [text.get_text() for text in batches.get_legend().get_texts()] == ["small batch"]


def test_theta_is_drawn_over_epochs_and_where_it_was_recorded_over_updates(study):
    """The mean over seeds, as far as all of them go."""
    long = {"update": [2, 4, 6], "theta": [1.0, 3.0, 2.0]}
    short = {"update": [2, 4], "theta": [2.0, 1.0]}
    every = [_outcome("small batch", 1, [0.1, 0.2], theta=theta) for theta in (long, short)]
    for outcome in every:
        for number, line in enumerate(outcome.epochs):
            line["theta"] = float(number)
    figure, of_epochs = study_picture.figure(study, every), "theta at the end of the epoch"
    assert _lines(figure, "theta") == [[(2.0, 1.5), (4.0, 2.0)]]
    assert _lines(figure, of_epochs) == [[(1.0, 0.0), (2.0, 1.0)]]
    bare = [dataclasses.replace(outcome, theta={}) for outcome in every]
    assert _lines(study_picture.figure(study, bare), of_epochs) == [[(1.0, 0.0), (2.0, 1.0)]]
    assert _lines(study_picture.figure(study, bare), "theta") == []


@pytest.mark.parametrize("path", sorted(RECIPES.glob("studies/*.py")), ids=lambda path: path.stem)
def test_committed_studies_load_and_their_recipes_know_what_they_ask_for(path):
    runs = list(study_runs.runs(study_runs.load(str(path)), Path("runs")))
    for recipe in {run.recipe for run in runs}:
        with flagsaver.flagsaver():  # which forgets the recipe's own flags afterwards
            runpy.run_path(str(RECIPES / f"{recipe}.py"))
            for run in runs:
                if run.recipe == recipe:
                    _require_flags(study_runs.command(run))


@flagsaver.flagsaver
def _require_flags(command):
    rest = flags.FLAGS(command)  # an error where there is no such flag, or no such value
    assert rest == command[:1]
    command_line.check_flags()
    batch_growth.callbacks(GlobalBatches(np.zeros((4096, 1)), batch_size=8), 8, Path("runs"))


def test_results_are_quoted_with_what_makes_them_weak():
    """Runs of uncommitted files and single seeds are named below the table, and where quoted."""
    index = (RECIPES / "README.md").read_text().splitlines()
    documents = [path.read_text() for path in sorted(RECIPES.parent.glob("docs/**/*.md"))]
    for path in RECIPES.glob("results/*.json"):
        content = json.loads(path.read_text())
        if "runs" not in content or "study" not in content:
            continue
        quoted, page = f"results/{path.stem}.md", path.with_suffix(".md").read_text()
        parts = [run.get("parts") or [run] for run in content["runs"]]
        n_dirty = sum(any(p.get("commit", "").endswith("+") for p in of) for of in parts)
        has_one_seed = any(row["seeds"] == 1 for row in content["summary"])
        assert ("with uncommitted changes" in page) == bool(n_dirty), quoted
        assert ("Rows of one seed have no error" in page) == has_one_seed, quoted
        (row,) = (line for line in index if line.count("|") == 4 and quoted in line)
        assert (f"uncommitted: {n_dirty} of {len(parts)} runs" in row) == bool(n_dirty), quoted
        for text in [row, *(text for text in documents if quoted in text)]:
            assert not n_dirty or "uncommitted" in text, quoted
            assert not has_one_seed or "one seed" in text, quoted
