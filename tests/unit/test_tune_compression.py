"""The table of `tfscale tune compression`, and its options."""

import json
import math

import pytest

from tfscale import tune
from tfscale.config import ConfigError
from tfscale.files import write_json_lines
from tfscale.launcher import cli
from tfscale.measure.compression import read_steps, write_report


def probe(name, seed, value, metric="val_accuracy"):
    numbers = {"ms per step": 100.0 * seed, "MB per step": 2 / seed}
    numbers |= {"metric": metric, "value": value}
    return {"compression": name, "seed": seed, **numbers}


REFUSED = {"compression": "low_rank", "seed": 1, "refused": "Factors: a sentence."}
PROBES = [
    *(probe("none", 1, 0.5), probe("int8", 1, 0.4), REFUSED),
    *(probe("none", 2, 0.9), probe("int8", 2, 0.9)),
]


def cells(text):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()[2:]]


def test_losses_are_paired_and_refusals_are_rows(tmp_path):
    text = write_report(PROBES, str(tmp_path), {"command": "mine"})
    none, int8, low_rank, *_ = cells(text)
    assert none == ["none", "2", "150", "1.5", "0.7", "0.0000", "0.0000"]
    assert int8 == ["int8", "2", "150", "1.5", "0.65", "0.0500", "0.0500"]  # 0.1 and 0
    assert low_rank == ["low_rank", "refused", *[""] * 5]
    assert "low_rank: Factors: a sentence." in text.splitlines()
    content = json.loads((tmp_path / "compression.json").read_text())
    assert content["made"] == {"command": "mine"} and content["probes"] == PROBES
    assert (tmp_path / "compression.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_higher_loss_is_lost_and_one_seed_has_no_error(tmp_path):
    probes = [probe("none", 1, 0.5, "val_loss"), probe("bf16", 1, 0.6, "val_loss")]
    rows = cells(write_report(probes, str(tmp_path), {}))
    assert rows[1][-2:] == ["0.1000", "nan"]
    for metric, lost in (("mae", "0.1000"), ("val_psnr", "-0.1000")):
        probes = [probe("none", 1, 0.5, metric), probe("bf16", 1, 0.6, metric)]
        assert cells(write_report(probes, str(tmp_path), {}))[1][-2] == lost
    # Nothing was trained, or nothing to compare with.
    assert cells(write_report([REFUSED], str(tmp_path), {}))[0][1] == "refused"
    alone = [REFUSED, probe("none", 1, 0.5), probe("none", 2, math.nan)]
    assert cells(write_report(alone, str(tmp_path), {}))[1][-2:] == ["nan", "nan"]


def test_steps_are_those_of_the_second_half(tmp_path):
    def row(rank, step_s, n_bytes):
        return {"kind": "step", "rank": rank, "step_s": step_s, "bytes": n_bytes, "n_steps": 2}

    rows = [{"kind": "run"}, row(0, 9.0, 800), row(0, 9.0, 800), row(1, 5.0, 7)]
    write_json_lines(tmp_path / "communication.jsonl", [*rows, row(0, 3.0, 80), row(0, 5.0, 80)])
    assert read_steps(tmp_path) == pytest.approx({"ms per step": 2000.0, "MB per step": 4e-5})
    write_json_lines(tmp_path / "communication.jsonl", rows[:1])
    assert math.isnan(read_steps(tmp_path)["ms per step"])


def test_each_seed_trains_with_each_compression_that_is_not_refused(tmp_path, monkeypatch, capsys):
    calls = []

    def run_probe(ranks, settings, options):
        calls.append((ranks, settings["compression"], settings["seed"], settings["start_step"]))
        name, seed = settings["compression"], settings["seed"]
        return {**REFUSED, "seed": seed} if name == "low_rank" else probe(name, seed, 0.5)

    monkeypatch.setattr(tune, "_run_probe", run_probe)
    script = tmp_path / "train.py"
    script.touch()
    words = ["tune", "compression", "-np", "3", "--compressions", "none,low_rank,int8"]
    words += ["--seeds", "2", "--start-step", "9", "--output", str(tmp_path), str(script), "--own"]
    assert cli.main(words) == 0
    names = ["none", "low_rank", "int8", "none", "int8"]
    assert calls == [(3, name, 1 + (i > 2), 9) for i, name in enumerate(names)]
    assert "| low_rank    | refused |" in capsys.readouterr().out
    made = json.loads((tmp_path / "compression.json").read_text())["made"]
    assert made["command"].endswith(f"--seeds=2 --start-step=9 {script} --own")


def test_what_was_trained_is_kept_if_a_later_training_fails(tmp_path, monkeypatch, capsys):
    def run_probe(ranks, settings, options):
        if settings["compression"] == "int8":
            raise ConfigError("The script must train. Received: exit code 1.")
        return probe(settings["compression"], settings["seed"], 0.5)

    monkeypatch.setattr(tune, "_run_probe", run_probe)
    words = ["tune", "compression", "--compressions=none,bf16,int8", f"--output={tmp_path / 'new'}"]
    assert cli.main([*words, "train.py"]) == 2
    assert "| bf16 " in capsys.readouterr().out and (tmp_path / "new/compression.json").exists()


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    options = ("--compressions=none,int9", "--compressions=none,none", "--seeds=0")
    assert cli.main(["tune", "compression", "-H", "elsewhere:2", "train.py"]) != 0
    assert "Start tfscale tune on elsewhere" in capsys.readouterr().err
    for words in (*options, f"--output={tmp_path / 'file'}"):
        assert cli.main(["tune", "compression", words, "train.py"]) != 0
        name, _, value = words.partition("=")
        told = capsys.readouterr().err
        assert f"{name} must" in told and value in told
