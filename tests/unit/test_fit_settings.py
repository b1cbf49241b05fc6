"""What a fit with growing batches changes of its data, and puts back."""

import contextlib

import keras
import pytest

from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import Watch, adaptive, make_data, make_model
from tfscale.callbacks import BackupAndRestore, BatchSizeSchedule, Checkpoint
from tfscale.config import ConfigError

SIZES = [6, 6, 12, 12, 24]


def scheduled(data):
    return BatchSizeSchedule({2: 12, 4: 24})


def grown(data, callback, *others, model=None, epochs=5):
    watch = Watch(data)
    with contextlib.suppress(Interruption):
        callbacks = [*others, callback, watch]
        (model or make_model()).fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    return [size for _, size, _ in watch.seen]


@pytest.mark.parametrize("make", [adaptive, scheduled])
def test_a_fresh_callback_begins_with_the_size_of_the_data(make):
    data = make_data()
    for _ in range(2):
        assert grown(data, make(data)) == SIZES
        assert data.batch_size == 6
        assert len(data[0][0]) == 6
        assert len(data) == 8


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("make", [adaptive, scheduled])
def test_a_fit_that_broke_off_counts_for_nothing(make, is_same):
    data = make_data()
    callback = make(data)
    assert grown(data, callback, InterruptAt(3, 1)) == SIZES[:3]
    assert data.batch_size == 12
    callback = callback if is_same else make(data)
    assert grown(data, callback) == SIZES
    assert data.batch_size == 6


def test_what_is_set_after_a_fit_that_broke_off_holds():
    data = make_data()
    grown(data, adaptive(data), InterruptAt(3, 1))
    data.batch_size = 24
    assert grown(data, adaptive(data)) == [24] * 5
    assert data.batch_size == 24


class Parts(keras.Sequential):
    def train_step(self, data):
        self.n_parts = len(data)
        return super().train_step(data)


def parts():
    model = Parts([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_weights_of_surplus_ranks_are_served_within_the_fit_only():
    data = make_data()
    callback = adaptive(data, active_ranks="grow")
    assert len(data[0]) == 2
    for _ in range(2):
        model = parts()
        assert grown(data, callback, model=model) == SIZES
        assert model.n_parts == 3
        assert len(data[0]) == 2
    model = parts()
    model.fit(data, verbose=0)
    assert model.n_parts == 2


def test_a_fit_that_is_refused_changes_nothing():
    data = make_data()
    with pytest.raises(ConfigError, match="max_batch_size=96"):
        grown(data, adaptive(data, 96, active_ranks="grow"))
    assert len(data[0]) == 2


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize("make", [adaptive, scheduled])
@pytest.mark.parametrize("saving", [BackupAndRestore, Checkpoint])
def test_a_run_that_goes_on_has_the_size_of_then(tmp_path, saving, make, is_fresh):
    data = make_data()
    callback = make(data)
    assert grown(data, callback, saving(tmp_path), InterruptAt(3, 1)) == SIZES[:3]
    if is_fresh:
        data = make_data()
        callback = make(data)
    assert grown(data, callback, saving(tmp_path)) == SIZES[3:]
    assert data.batch_size == 6
