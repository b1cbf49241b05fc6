"""Local SGD's options and its adaptive interval."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tfscale.callbacks.local_models import LocalModels
from tfscale.config import ConfigError
from tfscale.measure.groups import draw_distances

GUARD = tfscale.DistanceGuard(1.0, every=4)
SHRINKING = tfscale.AdaptiveInterval(8, minimum=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": 0}, "groups must be 1 or more, or 'host'. Received: groups=0."),
        ({"interval": 0}, "interval must be 1 or more"),
        ({"average": "weights"}, "average must be 'parameters' or 'gradients'"),
        ({"start": "later"}, "start must be 'immediately', 'after_first_decay'"),
        ({"outer": "sgd"}, "outer must be a Keras optimizer or None"),
        ({"within": tfscale.LocalSGD(2)}, "within must be an exchange inside"),
        ({"average": "gradients", "outer": keras.optimizers.SGD(0.7)}, "Leave one out"),
        ({"interval": 4, "overlap": 4}, "interval, 4. Received: overlap=4"),
        ({"interval": 4, "fragments": 5}, "Received: fragments=5"),
        (
            {"interval": tfscale.AdaptiveInterval(8, minimum=2), "overlap": 2},
            "the smallest interval",
        ),
        ({"merge": 0.5}, "together with overlap. Received: merge=0.5"),
        ({"overlap": 1, "average": "gradients"}, "average='gradients'"),
        ({"overlap": 1, "average_state": True}, "average_state=True"),
        ({"overlap": 1, "interval": GUARD}, "need an interval that is counted in steps"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ConfigError, match=text):
        tfscale.LocalSGD(**{"groups": 2, **options})


def test_bad_intervals():
    for rule, options, text in (
        (tfscale.AdaptiveInterval, {"initial": 1, "minimum": 2}, "initial >= minimum >= 1"),
        (tfscale.AdaptiveInterval, {"shrink": 0.0}, "0 < shrink < 1. Received: initial=64"),
        (tfscale.AdaptiveInterval, {"shrink": 1.0}, "0 < shrink < 1. Received: initial=64"),
        (tfscale.GrowingInterval, {"initial": 8, "maximum": 4}, "maximum >= initial >= 1"),
        (tfscale.QuadraticInterval, {"alpha": 0.0}, "alpha > 0 and minimum >= 1"),
        (tfscale.QuadraticInterval, {"alpha": float("nan")}, "Received: alpha=nan"),
        (tfscale.QuadraticInterval, {"alpha": 0.1, "minimum": 0}, "minimum=0"),
        (tfscale.DistanceGuard, {"limit": 0.0}, "limit > 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            rule(**options)


def test_an_interval_grows_with_the_square_of_the_inverse_rate():
    rule = tfscale.QuadraticInterval(alpha=0.25, minimum=4)
    assert [rule.at(rate) for rate in (0.5, 0.125, 0.0625, 0.0)] == [4, 4, 16, 1 << 40]
    exchange = tfscale.LocalSGD(2, rule, overlap=3, fragments=4)
    assert (exchange.first_interval, exchange.least_interval) == (4, 4)


def test_groups_are_consecutive_ranks():
    one_host = [0, 1, 2, 3, 4, 5]
    assert tfscale.LocalSGD(2).members(one_host) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="groups must divide the number of ranks, 6"):
        tfscale.LocalSGD(4).members(one_host)
    by_host = tfscale.LocalSGD("host")
    assert by_host.members([0, 1, 0, 1, 0, 1]) == [[0, 1], [2, 3], [4, 5]]
    for uneven in ([0, 1, 0], [0, 0, 1, 1]):  # two hosts of three ranks; ranks placed in turn
        with pytest.raises(ConfigError, match="as many ranks on each"):
            by_host.members(uneven)


@pytest.mark.parametrize(
    ("options", "before", "losses", "after"),
    [
        ({}, 64, (0.25, 1.0), 32),  # the root of their ratio
        ({}, 32, (0.01, 1.0), 7),
        ({"shrink": 0.5, "minimum": 3}, 64, (1.0, 1.0), 32),  # where the loss does not shrink
        ({"shrink": 0.5, "minimum": 3}, 4, (1.0, 1.0), 3),
        ({"shrink": 0.5, "minimum": 3}, 16, (float("nan"), 1.0), 16),
    ],
)
def test_the_interval_follows_the_loss(options, before, losses, after):
    rule = tfscale.AdaptiveInterval(initial=64, **options)
    assert rule.after(before, loss=losses[0], first_loss=losses[1]) == after


def test_one_process_trains_as_plain_keras():
    tfscale.init()
    results = []
    for wrap in (
        lambda rule: rule,
        lambda rule: hvd.DistributedOptimizer(rule, exchange=tfscale.LocalSGD(1, 3)),
    ):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(wrap(keras.optimizers.SGD(0.1)), loss="mse")
        model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


class Apart(LocalModels):
    """Believes that groups train apart."""

    _strategy = tfscale.LocalSGD(2, tfscale.AdaptiveInterval(initial=64))

    def act(self):
        pass


def test_a_loss_that_is_not_finite_is_no_first_loss(monkeypatch):
    tfscale.init()
    average = types.SimpleNamespace(interval=tf.Variable(64, dtype=tf.int64))
    callback, model = Apart(), keras.Sequential()
    model.optimizer = types.SimpleNamespace(learning_rate=0.1)
    monkeypatch.setattr("tfscale.fit.session.FitSession.group_average", average)
    callback.set_model(model)
    intervals = []
    for loss in (float("nan"), 4.0, 1.0):
        callback.on_epoch_end(0, {"loss": loss})
        intervals.append(int(average.interval.numpy()))
    assert callback._first_loss == 4.0 and intervals == [64, 32, 16]


def test_distances_are_drawn(tmp_path, monkeypatch):
    """Of all layers but the one of 41 with the least; lines of an earlier version have none."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn, save = [], figure.savefig
    monkeypatch.setattr(
        figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k)
    )
    of_layers = [{f"layer_{i}": times * (41.0 - i) for i in range(41)} for times in (1, 3)]
    rows = [{"step": 2, "distance": 7.0}]
    rows += [{"step": 4, "distance": 9.0 - i, "layers": own} for i, own in enumerate(of_layers)]
    draw_distances(rows, tmp_path / "distance.png")
    assert (tmp_path / "distance.png").stat().st_size > 0
    upper, lower, _ = drawn[0].axes
    np.testing.assert_array_equal(upper.lines[0].get_xydata(), [[2, 7], [4, 9], [4, 8]])
    names = [label.get_text() for label in lower.get_yticklabels()]
    assert names == [f"layer_{i}" for i in range(40)]
    shown = [[layers[name] for layers in of_layers] for name in names]
    np.testing.assert_array_equal(lower.collections[0].get_array(), shown)
    draw_distances(rows[:1], tmp_path / "distance.png")
    assert len(drawn[1].axes) == 1
