"""The gradient noise scale from norms over two batch sizes."""

import json
import math

import numpy as np
import pytest

from tfscale.measure.batch_size import SizeMeasures, Stage, write_report
from tfscale.measure.growth import noise_scale


def test_exact_expectations_give_the_exact_scale():
    signal, noise = 3.0, 96.0  # |G|^2 and tr(Sigma)
    squares = [signal + noise / batch for batch in (8, 32)]
    assert noise_scale(squares[0], 8, squares[1], 32) == pytest.approx(noise / signal)


def test_drawn_gradients():
    """Gradients with a known mean and covariance; 4 ranks of 16 samples."""
    rng = np.random.default_rng(0)
    mean, deviation = np.full(50, 0.1), 1.0
    draws = mean + deviation / 4 * rng.normal(size=(4000, 4, 50))  # means over 16 samples
    small = float(np.mean(np.sum(draws**2, axis=-1)))
    large = float(np.mean(np.sum(draws.mean(axis=1) ** 2, axis=-1)))
    expected = 50 * deviation**2 / float(mean @ mean)
    assert noise_scale(small, 16, large, 64) == pytest.approx(expected, rel=0.1)


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
