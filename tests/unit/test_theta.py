"""The interval that is read off a curve of theta, on made-up curves and on recorded ones."""

import itertools
import json
import math
from pathlib import Path

import pytest

from tfscale.config import ConfigError
from tfscale.measure.growth import IntervalRule, find_interval, theta_of

NAN = math.nan
RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"


def found(thetas, **settings):
    """Return (epoch of the decision, interval), None without one."""
    for n in range(1, len(thetas) + 1):
        finding = find_interval(thetas[:n], IntervalRule(**settings))
        if finding is not None:
            return n, finding.interval
    return None


def hill(peak, n, width=3.0):
    """A curve that rises to `peak` and falls off slowly, as in [T] figures 5.2 and 5.6."""
    return [1.0 / (1.0 + abs(i - peak) / (width * peak)) for i in range(1, n + 1)]


def test_theta():
    assert theta_of(3.0, 1.0, 4.0) == 0.5
    assert theta_of(1.0, 3.0, 4.0) == -0.5
    nowhere = ((1.0, 0.5, 0.0), (NAN, 0.5, 1.0), (1.0, NAN, 1.0), (math.inf, 1.0, 1.0))
    assert all(math.isnan(theta_of(*values)) for values in (*nowhere, (1.0, 0.5, NAN)))


@pytest.mark.parametrize("published", [5, 10, 60])
def test_published_intervals_are_peaks(published):
    """ResNet-20/CIFAR-10: 5; EDSR/DIV2K: 10; EDSR-16/Phantom: 60 ([T] 5.4)."""
    curve = hill(published, 200)
    # A peak is known as one two epochs later.
    assert found(curve, rule="peak") == (published + 2, published)
    assert published == 5 or found(curve, rule="thesis")[1] < published  # its 10 percent test


def recorded(study, configuration):
    """Return the epochs of a configuration's runs, seed by seed."""
    content = json.loads((RESULTS / f"{study}.json").read_text())
    return [r["epochs"] for r in content["runs"] if r["configuration"] == configuration]


RESNET8 = ("adaptive_batch", "AdaptiveBatchSize")
EDSR = ("adaptive_batch_edsr", "AdaptiveBatchSize")
LENET5 = ("growth_rules_small", "every 8 epochs")


@pytest.mark.parametrize(
    ("source", "rule", "expected"),
    [
        (RESNET8, "robust", [(5, 5), (5, 5), (5, 5)]),
        (RESNET8, "thesis", [(2, 2), (4, 4), (2, 2)]),
        (RESNET8, "peak", [(3, 1), (3, 1), (3, 1)]),
        (EDSR, "robust", [(6, 6)]),
        (EDSR, "thesis", [(5, 5)]),
        (EDSR, "peak", [(3, 1)]),
        (LENET5, "robust", [(3, 3), (3, 3), (3, 3)]),
        (LENET5, "thesis", [(2, 2), (2, 2), (2, 2)]),
        (LENET5, "peak", [(4, 2), (3, 1), (3, 1)]),
    ],
)
def test_intervals_of_recorded_runs(source, rule, expected):
    """Each is (epoch of the decision, K)."""
    runs = [[line["theta"] for line in epochs] for epochs in recorded(*source)]
    assert [found(thetas, rule=rule) for thetas in runs] == expected


@pytest.mark.parametrize(
    ("configuration", "rule"),
    [("theta, 10 % twice", "robust"), ("theta, 10 % once", "thesis"), ("theta, peak", "peak")],
)
def test_recorded_batches_grew_where_the_rules_say(configuration, rule):
    for epochs in recorded("growth_rules_small", configuration):
        decided, interval = found([line["theta"] for line in epochs], rule=rule)
        sizes = [line["batch_size"] for line in epochs]
        grown = [n for n, (a, b) in enumerate(itertools.pairwise(sizes), 1) if b > a]
        first = max(decided, interval)
        assert grown == [first, first + interval, first + 2 * interval]  # 64 to 512


DECAY = [n**-0.42 for n in range(1, 20)]


@pytest.mark.parametrize(
    ("rule", "thetas", "limits", "expected"),
    [
        # The letter of algorithm 3: no guard against a rising cost, nor limits.
        ("thesis", [1.0, 0.95], {}, (2, 2)),
        ("thesis", [1.0, 0.5, 0.45], {}, (3, 3)),
        ("thesis", [1.0, 1.1000000001, 2.0], {}, None),
        ("thesis", [-1.0, -1.05], {}, (2, 2)),
        ("thesis", [NAN, 1.0, NAN, 1.0], {}, None),
        ("thesis", [0.0, 1.0, 0.5], {}, None),
        ("thesis", [1.0] * 5, {"low": 4, "high": 9}, (2, 2)),
        ("thesis", DECAY, {}, (5, 5)),
        # Two small changes in a row.
        ("robust", DECAY, {}, (6, 6)),
        ("robust", [1.0, 0.95, 0.91], {}, (3, 3)),
        ("robust", [1.0, 0.95, 0.7, 0.68, 0.66], {}, (5, 5)),
        ("robust", [1.0, 0.5, 0.48], {}, None),
        ("robust", [1.0] * 3, {"low": 5}, (3, 5)),
        ("robust", [NAN] * 9, {"high": 4}, (4, 4)),
        ("robust", [1.0] * 9, {"high": 2}, (2, 2)),
        ("peak", [1.0, 2.0, 1.5, 3.0, 2.9], {}, None),  # it rises: there is no peak yet
        ("peak", [1.0, 2.0, 1.5, 3.0, 2.9, 2.8], {}, (6, 4)),
        ("peak", hill(5, 20), {"high": 3}, (3, 3)),  # taken although nothing was found
    ],
)
def test_rules(rule, thetas, limits, expected):
    assert found(thetas, rule=rule, **limits) == expected


@pytest.mark.parametrize("bad", [NAN, 0.0, -1.0])
def test_a_theta_without_meaning(bad):
    assert found([1.0, 1.0, bad, 1.0, 1.0], rule="robust", high=9) is None
    assert found([bad, 1.0, 1.0, 1.0], rule="robust") == (4, 4)
    assert found([bad, 1.0, bad, bad], rule="peak") == (4, 2)
    assert {found([bad] * 8, rule=rule) for rule in ("robust", "peak")} == {None}


def test_settings_out_of_range():
    for settings in ({"rule": "best"}, {"tolerance": 0.0}, {"low": 0}, {"high": 3, "low": 4}):
        name, value = next(iter(settings.items()))
        with pytest.raises(ConfigError, match=f"Received: {name}={value!r}"):
            IntervalRule(**settings)
