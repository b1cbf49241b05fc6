"""Whole runs to an accuracy: what is trained and what is written."""

import json

import pytest
import study_metadata
import whole_runs
from absl import flags
from absl.testing import flagsaver


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
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(**own):
        for row, (batch, train_s) in zip(
            whole_runs.ROWS, ((128, 120.5), (128, 150.0), (256, 120.0), (512, 118.0)), strict=True
        ):
            folder = tmp_path / f"{row.replace(', ', '-').replace(' ', '-')}-seed1"
            folder.mkdir()
            made = {"commit": "0123abc", "machine": "any", "versions": "1"}
            study_metadata.write(folder, whole_runs.key_of(row, "1"), made)
            line = {"epoch": 1, "train_seconds": train_s / 2, "batch_size": batch}
            lines = [{**line, "seconds": 70, "val_accuracy": 0.8}]
            lines += [{**line, "seconds": 140, "val_accuracy": 0.9, "epoch": 2}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        whole_runs.main(["", str(tmp_path / "steps.json")])
        (folder / "metrics.jsonl").write_text(json.dumps({"val_accuracy": 0.89}) + "\n")
        with pytest.raises(SystemExit, match="must reach --target"):
            whole_runs.seconds_to_target(folder)
        (tmp_path / "steps.json").write_text(json.dumps({"runs": steps[1:]}))
        with pytest.raises(SystemExit, match="steps of vgg_small_128 with horovod at 1gbit"):
            whole_runs.main(["", str(tmp_path / "steps.json")])
    shown = capsys.readouterr().out
    # 936 steps of 0.128 s are 119.8 s.
    assert "| Horovod | 1 | 2 | 936 | 2.01 | 2.33 | 2.00 | 1.01 |" in shown
    assert "| auto | 1 | 2 | 936 | 2.50 | 2.33 | 2.00 | 1.25 |" in shown
    runs = json.loads((tmp_path / "whole.json").read_text())["runs"]
    assert [run["n_steps"] for run in runs] == [936, 936, 468, 234]
    assert (tmp_path / "whole.png").stat().st_size > 10_000
