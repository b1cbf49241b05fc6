"""The gradient noise scale from norms over two batch sizes."""

import json
import math

import pytest

from tfscale.measure.batch_size import SizeMeasures, Stage, write_report
from tfscale.measure.growth import noise_scale


def test_exact_expectations_give_the_exact_scale():
    signal, noise = 3.0, 96.0  # |G|^2 and tr(Sigma)
    squares = [signal + noise / batch for batch in (8, 32)]
    assert noise_scale(squares[0], 8, squares[1], 32) == pytest.approx(noise / signal)


def test_ends_of_the_scale():
    assert noise_scale(1.0, 8, 1.0, 32) == 0.0
    assert noise_scale(1.0, 8, 1.1, 32) == 0.0
    assert noise_scale(1.0, 8, 0.25, 32) == math.inf
    assert math.isnan(noise_scale(math.inf, 8, 1.0, 32))


def test_what_is_infinite_is_null_in_json(tmp_path):
    measures = tuple(SizeMeasures(size, 4, 1.0, 1.0, 0.5, 1.0) for size in (8, 32))
    stages = [Stage(0, 1.0, math.inf, measures)]
    write_report(stages, tmp_path)
    text = (tmp_path / "batch_size.json").read_text()
    assert "Infinity" not in text and json.loads(text)["stages"][0]["noise_scale"] is None
