"""When batch and rate change, and to what, on made-up costs."""

import json
import math

import pytest

from tfscale.config import ConfigError
from tfscale.measure.growth import GrowthControl, GrowthSettings, IntervalRule, Measures, ladder

SIZES = (32, 64, 128)


def measures(cost=1.0, theta=1.0, **others):
    """Numbers that give this theta."""
    return Measures(first_cost=cost + theta, cost=cost, distance=1.0, **others)


def run(epochs, of_epoch=lambda epoch: measures(), first=0, **settings):
    control = GrowthControl(GrowthSettings(**{"sizes": SIZES, "saturation": None, **settings}))
    used = []
    for epoch in range(first, first + epochs):
        used.append((control.batch_size, control.rate_scale))
        control.end_epoch(epoch, of_epoch(epoch))
    return used, control


def sizes_of(*args, **settings):
    return [size for size, _ in run(*args, **settings)[0]]


def test_ladder():
    assert ladder(32, 256, 2) == (32, 64, 128, 256)
    assert ladder(32, 200, 2) == (32, 64, 128, 200)
    assert ladder(64, 1024, 4) == (64, 256, 1024)
    assert ladder(2, 9, 1.5) == (2, 3, 4, 6, 9)
    assert ladder(8, 8, 2) == (8,)
    with pytest.raises(ConfigError, match="Received: factor=1"):
        ladder(8, 16, 1)
    with pytest.raises(ConfigError, match="start_batch_size=16, max_batch_size=8"):
        ladder(16, 8, 2)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"interval": 2}, [32, 32, 64, 64, 128, 128, 128, 128]),
        ({"interval": 2, "first": 11}, [32, 32, 64, 64, 128]),  # epochs from the run's first
        ({"interval": 2, "warmup_epochs": 2}, [32] * 4 + [64] * 2 + [128]),
        ({"rule": IntervalRule(low=5)}, [32] * 5 + [64] * 5 + [128]),  # a smallest interval
    ],
)
def test_the_batch_grows_after_each_interval_and_the_rate_with_it(settings, sizes):
    assert run(len(sizes), **settings)[0] == [(size, size / 32) for size in sizes]


@pytest.mark.parametrize(("rule", "scale"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_rate_rules(rule, scale):
    _, control = run(5, interval=2, learning_rate_rule=rule)
    assert control.batch_size == 128
    assert math.isclose(control.rate_scale, scale)
    _, control = run(5, interval=2, learning_rate_rule=rule, sizes=(32, 64, 96))
    assert math.isclose(control.rate_scale, {1.0: 1.0, 2.0: 3**0.5, 4.0: 3.0}[scale])


@pytest.mark.parametrize(("rule", "first"), [("thesis", 2), ("robust", 3), ("peak", 3)])
def test_growth_begins_when_the_interval_is_found(rule, first):
    """theta is constant: the thesis's rule finds K = 2, the robust one 3, the peak is epoch 1."""
    sizes = sizes_of(9, rule=IntervalRule(rule))
    assert sizes[:first] == [32] * first
    assert sizes[first] == 64
    interval = 1 if rule == "peak" else first
    assert sizes[first + interval] == 128


def test_losses_of_the_warm_up_do_not_count():
    wild = [9.0, 1.0]
    sizes = sizes_of(6, lambda e: measures(theta=wild[e] if e < 2 else 1.0), warmup_epochs=2)
    assert sizes == [32] * 5 + [64]


def test_decays_at_given_epochs():
    used, control = run(8, interval=1, decay_epochs=(4, 6), decay=0.5)
    assert [scale for _, scale in used] == [1, 2, 4, 4, 0.5, 0.5, 0.25, 0.25]
    assert control.batch_size == 128


def test_the_first_decay_ends_growth():
    control = GrowthControl(GrowthSettings(SIZES, interval=2, decay_epochs=(3,)))
    decisions = [control.end_epoch(epoch, measures()) for epoch in range(8)]
    assert [d.batch_size for d in decisions] == [32, 64, 64, 64, 64, 64, 64, 64]
    assert decisions[2].reasons == (
        "learning rate times 0.05: epoch 3 is due; the batch stays at 64",
    )
    assert control.next_size is None


def test_decay_where_the_cost_saturates():
    costs = [9, 8, 7, 1, 1, 1, 1, 1, 1]  # the batch has grown up after the second
    used, _ = run(9, lambda e: measures(costs[e]), interval=1, saturation=0.01, window=2)
    # After the last growth: 7, 1, 1, 1, 1; the first two windows without a fall are the last four.
    assert [scale for _, scale in used] == [1, 2, 4, 4, 4, 4, 4, 0.1, 0.1]
    falling = run(20, lambda e: measures(0.9**e), interval=1, saturation=0.01)[1]
    assert falling.rate_scale == 4
    assert run(20, interval=15, saturation=0.01)[1].rate_scale == 2  # still growing


@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_a_cost_that_is_not_finite_decides_nothing(cost):
    _, control = run(30, lambda e: measures(cost), saturation=0.01)
    assert control.batch_size == 32
    assert control.rate_scale == 1


def test_memory_ends_growth():
    control = GrowthControl(GrowthSettings(SIZES, interval=1))
    assert control.end_epoch(0, measures(fits=True)).batch_size == 64
    decision = control.end_epoch(1, measures(fits=False))
    assert decision.batch_size == 64
    assert "128 is not expected to fit memory" in decision.reasons[0]
    assert control.end_epoch(2, measures(fits=True)).batch_size == 64


def test_noise_scale_grows_when_it_reaches_the_next_size():
    noise = [10, 63, 64, 500, 500, math.nan]
    sizes = sizes_of(6, lambda e: measures(noise_scale=noise[e]), signal="noise_scale")
    assert sizes == [32, 32, 32, 64, 128, 128]
    slow = sizes_of(6, lambda e: measures(noise_scale=math.inf), signal="noise_scale", interval=2)
    assert slow == [32, 32, 64, 64, 128, 128]
    assert sizes_of(4, lambda e: measures(), signal="noise_scale") == [32] * 4


@pytest.mark.parametrize("signal", ["theta", "noise_scale"])
def test_state_goes_on_identically(signal):
    settings = GrowthSettings((2, 4, 8, 16), signal=signal, window=1, decay=0.5)
    series = [measures(1 / (e + 1), 1 + (e < 3), noise_scale=3.0 * e) for e in range(14)]
    whole = GrowthControl(settings)
    expected = [whole.end_epoch(e, m) for e, m in enumerate(series)]
    for cut in range(len(series)):
        first, second = GrowthControl(settings), GrowthControl(settings)
        got = [first.end_epoch(e, series[e]) for e in range(cut)]
        second.restore(json.loads(json.dumps(first.state())))
        assert (second.batch_size, second.rate_scale) == (first.batch_size, first.rate_scale)
        got += [second.end_epoch(e, series[e]) for e in range(cut, len(series))]
        assert got == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate_rule": "root"},
        {"signal": "loss"},
        {"interval": 0},
        {"saturation": -0.1},
        {"window": 0},
        {"decay": 0.0},
        {"decay": 1.5},
        {"decay_epochs": (5, 3)},
        {"warmup_epochs": -1},
    ],
)
def test_settings_out_of_range(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ConfigError) as error:
        GrowthSettings(SIZES, **settings)
    assert f"Received: {name}={value!r}" in str(error.value)
