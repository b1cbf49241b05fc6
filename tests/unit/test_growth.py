"""When batch and rate change, and to what, on made-up costs."""

import json
import math
import re

import pytest

from tfscale.config import ConfigError
from tfscale.measure.batch_size import SizeMeasures, Stage, write_report
from tfscale.measure.growth import (
    GrowthControl,
    GrowthSettings,
    IntervalRule,
    Measures,
    ladder,
    noise_scale,
)

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


@pytest.mark.parametrize("first", [0, 10])
def test_reasons_count_epochs_as_keras_prints_them(first):
    """Also after a warm-up, and in a run that does not begin with the first epoch."""
    rule = IntervalRule("thesis")
    settings = GrowthSettings(SIZES, rule=rule, warmup_epochs=3, decay_epochs=(first + 9,))
    control = GrowthControl(settings)
    reasons = {}
    for epoch in range(first, first + 9):
        decision = control.end_epoch(epoch, measures())
        reasons |= {epoch - first + 1: decision.reasons} if decision.reasons else {}
    printed = first + 5  # theta is the same in the first two epochs after the warm-up
    assert reasons[5] == (
        f"the batch grows every 2 epochs: theta changed by 0.0% in epoch {printed}",
        "batch 32 -> 64, learning rate times 2: the interval is 2 epochs",
    )
    assert reasons[9] == (
        f"learning rate times 0.025: decay_epochs has {first + 9}, which Keras prints as epoch "
        f"{first + 10}",
    )


def test_decays_at_given_epochs_and_the_first_one_ends_growth():
    used, control = run(8, interval=1, decay_epochs=(4, 6), decay=0.5)
    assert [scale for _, scale in used] == [1, 2, 4, 4, 0.5, 0.5, 0.25, 0.25]
    assert control.batch_size == 128
    used, control = run(8, interval=2, decay_epochs=(3,))
    assert [size for size, _ in used] == [32, 32] + [64] * 6 and control.next_size is None


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
    assert (control.batch_size, control.rate_scale) == (32, 1)


def test_memory_ends_growth():
    assert sizes_of(4, lambda e: measures(fits=e != 1), interval=1) == [32, 64, 64, 64]


def test_seesaw_grows_where_a_schedule_would_halve_the_rate():
    """Batch times 2 and rate / sqrt(2), until the batch is largest: then the rate is halved."""
    settings = {"rule": IntervalRule("seesaw"), "decay_epochs": (2, 3, 5, 6)}
    used, control = run(8, **settings)
    assert [size for size, _ in used] == [32, 32, 64, 128, 128, 128, 128, 128]
    halves = [0, 0, 1, 2, 2, 4, 6, 6]  # of the exponent of 1/2
    for (_, scale), n in zip(used, halves, strict=True):
        assert math.isclose(scale, 0.5 ** (n / 2))
    assert control.interval is None and control.n_decays == 4
    # The last growth is smaller: 2 / sqrt(1.5) less. Memory that does not suffice ends growth.
    _, control = run(4, **settings, sizes=(32, 48))
    assert math.isclose(control.rate_scale, 1.5**0.5 / 4)
    used, control = run(4, lambda epoch: measures(fits=False), **settings)
    assert (control.batch_size, control.rate_scale) == (32, 0.25)
    for wrong in ({"decay_epochs": ()}, {"interval": 2}, {"signal": "noise_scale"}):
        with pytest.raises(ConfigError, match="rule='seesaw' needs decay_epochs"):
            GrowthSettings(SIZES, **{**settings, **wrong})


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


BAD_SETTINGS = {
    "learning_rate_rule": ("root",),
    "signal": ("loss",),
    "interval": (0,),
    "saturation": (-0.1,),
    "window": (0,),
    "decay": (0.0, 1.5),
    "decay_epochs": ((5, 3),),
    "warmup_epochs": (-1,),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_out_of_range(name):
    for value in BAD_SETTINGS[name]:
        with pytest.raises(ConfigError, match=re.escape(f"Received: {name}={value!r}")):
            GrowthSettings(SIZES, **{name: value})


def test_the_noise_scale_of_norms_over_two_batch_sizes(tmp_path):
    signal, noise = 3.0, 96.0  # |G|^2 and tr(Sigma)
    squares = [signal + noise / batch for batch in (8, 32)]
    assert noise_scale(squares[0], 8, squares[1], 32) == pytest.approx(noise / signal)
    assert noise_scale(1.0, 8, 1.0, 32) == noise_scale(1.0, 8, 1.1, 32) == 0.0
    assert noise_scale(1.0, 8, 0.25, 32) == math.inf
    assert math.isnan(noise_scale(math.inf, 8, 1.0, 32))
    # JSON has no infinity.
    measured = tuple(SizeMeasures(size, 4, 1.0, 1.0, 0.5, 1.0) for size in (8, 32))
    write_report([Stage(0, 1.0, math.inf, measured)], tmp_path)
    text = (tmp_path / "batch_size.json").read_text()
    assert "Infinity" not in text and json.loads(text)["stages"][0]["noise_scale"] is None
