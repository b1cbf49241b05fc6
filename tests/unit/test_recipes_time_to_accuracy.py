"""Minutes until an accuracy: trajectories of a study times measured steps."""

import copy
import json
from pathlib import Path

import pytest
import study_metadata
import time_to_accuracy
import whole_runs
from absl import flags
from absl.testing import flagsaver
from time_to_accuracy import Measured

RESULTS = {
    "study": "mine",
    "metric": "val_accuracy",
    "runs": [
        {
            "configuration": "growing",
            "command": f"recipes/resnet.py --images=1280 --seed={seed}",
            "commit": "abc",
            "epochs": [
                {"batch_size": float(batch), "val_accuracy": value}
                for batch, value in zip((64, 64, 128), accuracies, strict=True)
            ],
        }
        for seed, accuracies in enumerate([(0.5, 0.8, 0.9), (0.5, 0.9, 0.91)], 1)
    ],
}
# Medians of 60 and 180 s a step.
BENCHMARKS = {
    "sessions": {"s": {"machine": {"n_cores": 2, "cpu": "any"}}},
    "runs": [
        {
            "suite": "step", "group": f"{case} 1gbit", "system": system, "n_ranks": 4,
            "session": "s", "commit": "0123456789", "round": number,
            "arguments": ["--block", "8"],
            "samples": {case: [own * slower - 1, own * slower + 1]},
        }
        for case, own in (("small", 60.0), ("large", 180.0))
        for system, slower in (("auto", 1.0), ("horovod", 2.0))
        for number in range(2)
    ],
}  # fmt: skip


def test_a_batch_lies_between_measured_ones_and_what_is_missing_is_named():
    steps = Measured({64: 0.1, 128: 0.2, 512: 0.8}, {})
    expected = pytest.approx([0.1, 0.15, 0.5, 0.8])
    assert [time_to_accuracy.step_seconds(n, steps) for n in (64, 96, 320, 512)] == expected
    for outside in (32, 1024):
        with pytest.raises(SystemExit, match=f"Received: {outside}, measured"):
            time_to_accuracy.step_seconds(outside, steps)
    assert time_to_accuracy.shown([None, 3.0]) == "reached by 1 of 2"
    with pytest.raises(SystemExit, match="no steps of small with mwms at 1gbit"):
        time_to_accuracy.measured(BENCHMARKS["runs"], "mwms", "1gbit", {64: "small"})
    with pytest.raises(SystemExit, match="Choose from: growing"):
        time_to_accuracy.trajectories(RESULTS, "fixed", 60000)


def test_table_json_and_picture(tmp_path, capsys):
    paths = []
    for name, content in (("results", RESULTS), ("benchmarks", BENCHMARKS)):
        paths.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    own = ["--pairs=growing=auto,horovod", "--cases=64=small,192=large", "--targets=0.90,0.92"]
    with flagsaver.flagsaver():
        rest = flags.FLAGS(["name", *paths, *own, f"--output={tmp_path / 'mine'}"])
        time_to_accuracy.main(rest)
        with pytest.raises(SystemExit, match="must be given"):
            time_to_accuracy.main(rest[:2])
    text = (tmp_path / "mine.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 1gbit")]
    tail = "reached by 0 of 2 |"
    steps = "6e+04 (64), 1.8e+05 (192)"  # 120 s for the batch of 128 between them
    assert rows[0] == f"| 1gbit | growing | auto | {steps} | 32 | 50 ± 10 | {tail}"
    assert rows[1].endswith(f"| 100 ± 20 | {tail}")
    assert "python recipes/study.py mine" in text and "commit 0123456, 4 ranks, 2 cores" in text
    content = json.loads((tmp_path / "mine.json").read_text())
    assert content["rows"][0]["minutes"] == {"0.90": [60.0, 40.0], "0.92": [None, None]}
    assert (tmp_path / "mine.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_seeds_may_have_ended_earlier_than_others(tmp_path):
    results = copy.deepcopy(RESULTS)
    results["runs"][0]["epochs"].pop()
    paths = [str(tmp_path / "results.json"), str(tmp_path / "benchmarks.json")]
    for path, content in zip(paths, (results, BENCHMARKS), strict=True):
        Path(path).write_text(json.dumps(content))
    own = ["--pairs=growing=auto", "--cases=64=small,192=large", "--targets=0.90"]
    with flagsaver.flagsaver():
        rest = flags.FLAGS(["name", *paths, *own, f"--output={tmp_path / 'mine'}"])
        time_to_accuracy.main(rest)
    content = json.loads((tmp_path / "mine.json").read_text())
    assert content["rows"][0]["minutes"] == {"0.90": [None, 40.0]}


def test_whole_runs_stand_beside_their_products(tmp_path, capsys):
    steps = [
        {
            "suite": "step", "group": f"vgg_small_{batch} 1gbit", "system": system,
            "arguments": [], "samples": {f"vgg_small_{batch}": [batch / 1000]},
        }
        for batch in (128, 256, 512)
        for system in ("horovod", "tfscale-auto")
    ]  # fmt: skip
    (tmp_path / "steps.json").write_text(json.dumps({"runs": steps}))
    own = {"seeds": ["1"], "runs": str(tmp_path), "output": str(tmp_path / "whole")}
    with flagsaver.flagsaver(**own):
        for row, (batch, train_s) in zip(
            whole_runs.ROWS, ((128, 120.5), (128, 150.0), (256, 120.0), (512, 118.0)), strict=True
        ):
            folder = tmp_path / f"{row.replace(', ', '-').replace(' ', '-')}-seed1"
            folder.mkdir()
            made = {"commit": "0123abc", "machine": "any"}
            key = " ".join(whole_runs.command(row, "1", folder)[1:])
            study_metadata.write(folder, key, made)
            line = {"epoch": 1, "train_seconds": train_s / 2, "batch_size": batch}
            lines = [{**line, "seconds": 70, "val_accuracy": 0.8}]
            lines += [{**line, "seconds": 140, "val_accuracy": 0.9, "epoch": 2}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        whole_runs.main(["", str(tmp_path / "steps.json")])
        (folder / "metrics.jsonl").write_text(json.dumps({"val_accuracy": 0.89}) + "\n")
        with pytest.raises(SystemExit, match="must reach --target"):
            whole_runs.seconds_to_target(folder)
    shown = capsys.readouterr().out
    # 936 steps of 0.128 s are 119.8 s; 150 s are not within 5 % of it.
    assert "| Horovod | 1 | 2 | 936 | 2.01 | 2.33 | 2.00 | 1.01 |" in shown
    assert "| auto | 1 | 2 | 936 | 2.50 | 2.33 | (2.00) | 1.25 |" in shown
    runs = json.loads((tmp_path / "whole.json").read_text())["runs"]
    assert [run["n_steps"] for run in runs] == [936, 936, 468, 234]
    assert (tmp_path / "whole.png").stat().st_size > 10_000
