"""A run that begins on three ranks continues with two, then with one, and ends as any other."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.launching import launch_script

SCRIPT = str(Path(__file__).with_name("adaptive_resume.py"))


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(400)
def test_another_number_of_ranks(tmp_path):
    runs = [(1, ["whole"]), (3, ["cut-1", "3"]), (2, ["cut-2", "6"]), (1, ["cut-3"])]
    for size, words in runs:
        result = launch_script(size, [SCRIPT, str(tmp_path), *words], timeout_s=90)
        assert result.exit_code == 0, result.output
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "cut-3.npz") as cut:
        assert whole.files == cut.files
        for name in whole.files:
            np.testing.assert_allclose(cut[name], whole[name], rtol=0, atol=1e-10)
    whole_lines, cut_lines = lines_of(tmp_path / "whole.jsonl"), lines_of(tmp_path / "cut.jsonl")
    for key in ("epoch", "batch_size", "interval", "next_rate_scale", "next_batch_size"):
        assert [line[key] for line in cut_lines] == [line[key] for line in whole_lines]
    thetas = [[line["theta"] for line in lines] for lines in (cut_lines, whole_lines)]
    np.testing.assert_allclose(*thetas, rtol=1e-9)
    assert [line["active_ranks"] for line in cut_lines] == [3, 3, 3, 2, 2, 2, 1, 1, 1]
    assert len({line["batch_size"] for line in cut_lines}) > 1
