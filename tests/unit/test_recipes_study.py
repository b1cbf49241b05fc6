"""Studies: what is run, what is not run again, and the numbers of the table."""

import dataclasses
import json
import runpy
import shutil
from pathlib import Path

import batch_growth
import command_line
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


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(study_runs, "RECIPES", tmp_path)
    return study_runs.load(fake_study.write(tmp_path))


def _calls(runs):
    return [len((run.folder / "calls").read_text()) for run in runs]


def test_runs_are_configurations_times_seeds(study, tmp_path):
    runs = list(study_runs.runs(study, tmp_path / "runs"))
    names = ["small-batch-seed1", "large-16-seed1", "small-batch-seed2", "large-16-seed2"]
    assert [run.folder.name for run in runs] == names
    assert study_runs.command(runs[1]) == [
        "recipes/fake.py", "--epochs=3", "--noaugment", "--batch_size=16", "--report", "--seed=1",
    ]  # fmt: skip


def test_what_is_finished_is_not_run_again_and_other_flags_are(study, tmp_path):
    runs = list(study_runs.runs(study, tmp_path / "runs"))
    assert all(study_runs.finish(run) for run in runs for _ in range(2))
    assert _calls(runs) == [1, 1, 1, 1]
    (tmp_path / "mine.py").write_text(STUDY.replace("16,", "32,"))
    changed = list(study_runs.runs(study_runs.load(str(tmp_path / "mine.py")), tmp_path / "runs"))
    assert [study_runs.is_finished(run) for run in changed] == [True, False, True, False]
    assert study_runs.finish(changed[1]) and _calls(changed) == [1, 1, 1, 1]


def test_a_failed_run_is_no_outcome_and_is_taken_up_again(study, tmp_path, capsys):
    run, *_ = study_runs.runs(study, tmp_path / "runs")
    (tmp_path / "fail").touch()
    assert not study_runs.finish(run)
    assert "exit code 3" in capsys.readouterr().out
    assert study_runs.outcomes(study, tmp_path / "runs") == []
    (tmp_path / "fail").unlink()
    (run.folder / "kept").touch()  # a backup, say
    assert study_runs.finish(run) and (run.folder / "kept").exists()
    assert len(study_runs.outcomes(study, tmp_path / "runs")) == 1


def test_table_json_and_picture(study, tmp_path):
    for run in study_runs.runs(study, tmp_path / "runs"):
        assert study_runs.finish(run)
    outcomes = study_runs.outcomes(study, tmp_path / "runs")
    outcomes[1].steps.append({"exposed_s": 0.25, "step_s": 1.0})
    for outcome in outcomes:
        outcome.made[0] |= {"machine": "2 cores", "load": "2.1"}
    assert "No times: 2.1 programs" in study_report.write(study, outcomes, tmp_path / "mine", "")
    for outcome in outcomes:
        outcome.made[0]["load"] = "0.1"
    text = study_report.write(study, outcomes, tmp_path / "mine", "Mind this.")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    # Losses 1/2, 1/4 and 2, 1, 1/2: the threshold after one epoch of 2 s and three of 0.5 s.
    assert rows[2:] == [
        "| small batch | 1 | 2 | 0.65 ± 0.05 | 3 | 4 ± 0 | - | 1 | 2 | - | 1 | 2 | 1 |",
        "| Large: 16 | 1 | 2 | 0.65 ± 0.05 | 3 | 16 ± 0 | 7 ± 0 | 3 | 0.5 | 25 % | 4 | 1.5 |"
        " 1.33 |",
    ]
    assert (tmp_path / "mine.md").read_text() == text
    parts = ("Mind this.", "Commit: ", "Machine: ", "Seeds: 1, 2", "recipes/fake.py --epochs=3")
    assert [part for part in parts if part not in text] == []
    content = json.loads((tmp_path / "mine.json").read_text())
    assert len(content["runs"]) == 4 and len(content["runs"][0]["epochs"]) == 3
    study_picture.draw(study, outcomes, tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def _outcome(name, seed, values, commit="abc", theta=None, batches=None):
    """A run with these accuracies after its epochs."""
    run = study_runs.Run(name, seed, 1, "fake", {}, Path())
    epochs = [
        {"val_accuracy": v, "train_seconds": 1.0, "batch_size": b, "val_loss": 1.0}
        for v, b in zip(values, batches or [4] * len(values), strict=True)
    ]
    return study_runs.Outcome(run, epochs, [], [{"commit": commit}], theta or {})


def test_means_have_their_standard_errors(study, tmp_path):
    """Of 0.1, 0.2 and 0.6: 0.3 and 0.2646 / sqrt(3)."""
    study = dataclasses.replace(
        study, threshold=None, columns={"percent": lambda epochs: 100 * epochs[-1]["val_accuracy"]}
    )
    every = [_outcome("small batch", seed, [v]) for seed, v in enumerate((0.1, 0.2, 0.6), 1)]
    lines = study_report.write(study, every, tmp_path / "mine", "").splitlines()
    (head,) = (line for line in lines if line.startswith("| configuration"))
    titles = "val_accuracy, last epoch (mean ± standard error) | epochs"
    assert f"{titles} | percent (mean ± standard error)" in head
    assert any("| 0.3 ± 0.15 | 1 | 30 ± 15 |" in line for line in lines)
    assert json.loads((tmp_path / "mine.json").read_text())["summary"][0]["more"] == [[10, 20, 60]]


def test_one_seed_has_no_error_and_says_so(study, tmp_path):
    every = [_outcome("small batch", 1, [0.1]), _outcome("Large: 16", 1, [0.2])]
    warning = "Rows of one seed have no error: they prove no difference."
    text = study_report.write(study, every, tmp_path / "mine", "")
    assert warning in text and "±" not in text
    every += [_outcome("small batch", 2, [0.1])]
    assert warning in study_report.write(study, every, tmp_path / "mine", "")
    every += [_outcome("Large: 16", 2, [0.1])]
    assert warning not in study_report.write(study, every, tmp_path / "mine", "")


def test_runs_of_uncommitted_files_are_counted_under_the_table(study, tmp_path):
    every = [_outcome("small batch", 1, [0.1]), _outcome("Large: 16", 1, [0.2], commit="abc+")]
    every[0].made.insert(0, {"commit": "old+"})  # an earlier part of it
    text = study_report.write(study, every, tmp_path / "mine", "")
    assert "**2 of 2 runs were made from a working tree with uncommitted changes**" in text
    text = study_report.write(study, [_outcome("small batch", 1, [0.1])], tmp_path / "mine", "")
    assert "uncommitted" not in text


def test_records_of_theta_are_kept_in_the_results(study, tmp_path):
    every = list(study_runs.runs(study, tmp_path / "runs"))
    assert all(study_runs.finish(run) for run in every)
    rows = [
        {"update": n, "epoch": 0, "theta": t, "loss": 1.0, "distance": 2.0, "noise_scale": None}
        for n, t in ((2, 0.5), (4, None))
    ]
    write_json_lines(every[0].folder / "theta.jsonl", rows)
    outcomes = study_runs.outcomes(study, tmp_path / "runs")
    study_report.write(study, outcomes, tmp_path / "mine", "")
    columns = {"update": [2, 4], "theta": [0.5, None], "loss": [1.0, 1.0], "distance": [2.0, 2.0]}
    assert [outcome.theta for outcome in outcomes] == [columns, {}, {}, {}]
    text = (tmp_path / "mine.json").read_text()
    assert '"theta": [0.5, null],' in text  # not a line for each number
    assert [row.get("theta") for row in json.loads(text)["runs"]] == [columns, None, None, None]
    kept = study_results.read(every, tmp_path / "mine.json")
    assert kept[every[0].folder].theta == columns and kept[every[1].folder].theta == {}


def _lines(figure, label):
    """Points of the lines in the panels whose axis of y has this label."""
    return [
        [(float(x), float(y)) for x, y in line.get_xydata()]
        for axes in figure.axes
        if axes.get_ylabel() == label
        for line in axes.get_lines()
    ]


def test_the_batch_is_drawn_for_each_seed(study):
    """Seeds grow in different epochs: 6 was the batch of no run."""
    sizes = [4, 4, 8], [4, 8, 8]
    every = [_outcome("small batch", i, [0.1] * 3, batches=b) for i, b in enumerate(sizes)]
    figure = study_picture.figure(study, every)
    found = _lines(figure, "Samples of a batch, each seed")
    assert [[y for _, y in points] for points in found] == [*map(list, sizes)]
    (label,) = {text.get_text() for axes in figure.axes for text in _legend(axes, "Samples")}
    assert label == "small batch"  # once for all seeds


def _legend(axes, start):
    return axes.get_legend().get_texts() if axes.get_ylabel().startswith(start) else []


def test_theta_is_drawn_over_updates_where_it_was_recorded(study):
    """The mean over seeds, as far as all of them go."""
    records = (
        {"update": [2, 4, 6], "theta": [1.0, 3.0, 2.0], "distance": [1.0, 2.0, 3.0]},
        {"update": [2, 4], "theta": [2.0, 1.0], "distance": [3.0, 4.0]},
    )
    every = [_outcome("small batch", i, [0.1, 0.2], theta=r) for i, r in enumerate(records)]
    for outcome in every:  # what would be drawn over epochs without records
        for number, line in enumerate(outcome.epochs):
            line["theta"] = float(number)
    figure = study_picture.figure(study, every)
    assert _lines(figure, "theta") == [[(2.0, 1.5), (4.0, 2.0)]]
    assert _lines(figure, "||w_0 - w||") == [[(2.0, 2.0), (4.0, 3.0)]]
    of_epochs = "theta at the end of the epoch"
    assert _lines(figure, of_epochs) == []
    bare = [dataclasses.replace(outcome, theta={}) for outcome in every]
    assert _lines(study_picture.figure(study, bare), of_epochs) == [[(1.0, 0.0), (2.0, 1.0)]]


def test_curves_are_means_over_seeds_with_errors_in_the_last_epoch(study):
    every = [_outcome("small batch", i, v) for i, v in enumerate(([0.1, 0.4], [0.3, 0.6]))]
    figure = study_picture.figure(study, every)
    np.testing.assert_allclose(_lines(figure, "val_accuracy"), [[(1, 0.2), (2, 0.5)]])
    (last,) = (a for a in figure.axes if a.get_xlabel().startswith("val_accuracy, last epoch"))
    ((low, high),) = (c.get_segments()[0][:, 0] for c in last.collections)
    np.testing.assert_allclose((low, high), (0.4, 0.6))  # 0.5 and 0.1414 / sqrt(2)


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


def test_rows_of_earlier_results_stay_where_their_runs_are_gone(study, tmp_path):
    every, path = list(study_runs.runs(study, tmp_path / "runs")), tmp_path / "mine.json"
    assert all(study_runs.finish(run) for run in every)
    outcomes = study_runs.outcomes(study, tmp_path / "runs")
    text = study_report.write(study, outcomes, tmp_path / "mine", "")
    shutil.rmtree(tmp_path / "runs")
    kept = study_results.read(every, path)
    assert list(kept) == [run.folder for run in every]
    again = study_report.write(study, list(kept.values()), tmp_path / "again", "")
    assert again == text.replace("mine", "again", 1)
    (tmp_path / "mine.py").write_text(STUDY.replace("16,", "32,"))  # of other flags nothing stays
    other = study_runs.load(str(tmp_path / "mine.py"))
    left = study_results.read(list(study_runs.runs(other, tmp_path / "runs")), path)
    assert [outcome.run.configuration for outcome in left.values()] == ["small batch"] * 2
    path.write_text('{"runs": 3}')
    with pytest.raises(SystemExit, match="--keep needs results"):
        study_results.read(every, path)
    assert study_results.read(every, tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(("val_loss", 0.3), 2), (("val_loss", 0.1), None), (("psnr", 40.0), 3), (None, None)],
)
def test_a_loss_reaches_a_threshold_from_above_anything_else_from_below(threshold, expected):
    lines = [{"val_loss": loss, "psnr": 10 / loss} for loss in (0.9, 0.3, 0.2)]
    assert study_report.epochs_to(threshold, lines) == expected


def test_a_configuration_of_which_one_seed_misses_the_threshold_has_no_total_speedup(study):
    run = study_runs.Run("small batch", 1, 1, "fake", {}, Path())
    line = {"val_accuracy": 0.5, "train_seconds": 1.0, "batch_size": 1}
    hit, miss = ([{**line, "val_loss": loss}] for loss in (0.1, 0.9))
    outcomes = [study_runs.Outcome(run, epochs, [], []) for epochs in (hit, miss)]
    (summary,) = study_report.summaries(study, outcomes)
    assert summary.epochs_to_threshold is None and summary.seconds_to_threshold is None


@pytest.mark.parametrize(
    "path", sorted((Path(study_runs.__file__).parent / "studies").glob("*.py"))
)
def test_committed_studies_load_and_their_recipes_know_what_they_ask_for(path):
    study = study_runs.load(str(path))
    runs = list(study_runs.runs(study, Path("runs")))
    for recipe in {run.recipe for run in runs}:
        with flagsaver.flagsaver():  # which forgets the recipe's own flags afterwards
            runpy.run_path(str(Path(study_runs.__file__).parent / f"{recipe}.py"))
            for run in runs:
                if run.recipe == recipe:
                    _require_flags(study_runs.command(run))


@flagsaver.flagsaver
def _require_flags(command):
    rest = flags.FLAGS(command)  # an error where there is no such flag, or no such value
    assert rest == command[:1]
    command_line.check_flags()
    batch_growth.callbacks(GlobalBatches(np.zeros((4096, 1)), batch_size=8), 8, Path("runs"))


RECIPES = Path(study_runs.__file__).parent
QUOTING = [RECIPES / "README.md", *sorted((RECIPES.parent / "docs").glob("*.md"))]
RESULTS = {path.stem: json.loads(path.read_text()) for path in RECIPES.glob("results/*.json")}
STUDIES = [
    name for name, content in sorted(RESULTS.items()) if "runs" in content and "study" in content
]


@pytest.mark.parametrize("name", STUDIES)
def test_results_are_quoted_with_what_makes_them_weak(name):
    """Runs of uncommitted files and single seeds are named below the table, and where quoted."""
    runs, page = RESULTS[name]["runs"], (RECIPES / "results" / f"{name}.md").read_text()
    parts = [run.get("parts") or [run] for run in runs]
    n_dirty = sum(any(p.get("commit", "").endswith("+") for p in of) for of in parts)
    has_one_seed = any(row["seeds"] == 1 for row in RESULTS[name]["summary"])
    assert ("with uncommitted changes" in page) == bool(n_dirty)
    assert ("Rows of one seed have no error" in page) == has_one_seed
    rows = [line for line in QUOTING[0].read_text().splitlines() if line.count("|") == 4]
    (row,) = (line for line in rows if f"results/{name}.md" in line)
    assert (f"uncommitted: {n_dirty} of {len(runs)} runs" in row) == bool(n_dirty)
    assert not has_one_seed or "one seed" in row
    for document in QUOTING[1:]:
        text = document.read_text()
        if f"results/{name}.md" in text:
            assert not n_dirty or "uncommitted" in text, document
            assert not has_one_seed or "one seed" in text, document
