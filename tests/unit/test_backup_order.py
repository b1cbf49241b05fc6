"""The order of samples in a run that goes on from a backup, in a later fit on the same data."""

import contextlib
import logging

import keras
import numpy as np

from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import (
    InterruptAt,
    Interruption,
    make_data,
    make_model,
)
from tfscale.callbacks import BackupAndRestore, BatchSizeSchedule
from tfscale.callbacks.backup_files import Place
from tfscale.callbacks.backup_state import read_state, write_state
from tfscale.data import GlobalBatches


class Orders(keras.callbacks.Callback):
    """Notes number and seed of the order of each epoch."""

    def __init__(self, data):
        super().__init__()
        self.data, self.seen = data, []

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.seen.append((self.data.epoch, self.data.state()["seed"]))


def second_fit(backup, *others, seed=3, is_first_run=True):
    """Run a program that trains twice on its data; return weights and orders of the second fit.

    Started again it does not train a first time, as its first fit is over.
    """
    data, model = make_data(seed=seed), make_model()
    if is_first_run:
        model.fit(data, epochs=2, verbose=0)
    orders = Orders(data)
    callbacks = [*([BackupAndRestore(backup)] if backup else []), *others, orders]
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=4, verbose=0, callbacks=callbacks)
    return model.get_weights(), orders.seen


def test_a_later_fit_goes_on_with_its_order(tmp_path):
    expected, orders = second_fit(None)
    assert orders == [(2, 3), (3, 3), (4, 3), (5, 3)]
    second_fit(tmp_path, InterruptAt(2, 1))
    weights, rest = second_fit(tmp_path, seed=9, is_first_run=False)
    assert rest == orders[2:]
    for own, wanted in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_the_batch_size_is_left_to_callbacks(tmp_path):
    second_fit(tmp_path, BatchSizeSchedule({1: 12}), InterruptAt(2, 1))
    data = make_data(batch_size=8)
    model = make_model()
    model.fit(data, epochs=4, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    assert data.batch_size == 8 and data.epoch == 6


def test_a_backup_that_does_not_tell(tmp_path):
    second_fit(tmp_path, InterruptAt(2, 1))
    (path,) = tmp_path.glob("callbacks-*.npz")
    place = Place(*(int(word) for word in path.stem.split("-")[1:]))
    states = read_state(str(tmp_path), place)
    assert states[0].pop("data") == {"epoch": 4, "batch_size": 6, "seed": 3, "samples": 48}
    write_state(str(tmp_path), place, states)
    _, rest = second_fit(tmp_path, seed=9, is_first_run=False)
    assert rest == [(2, 9), (3, 9)]


def test_other_data_has_an_order_of_its_own(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "tfscale")
    second_fit(tmp_path, InterruptAt(2, 1))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 1))
    data = GlobalBatches(x, y, batch_size=6, seed=9)
    orders = Orders(data)
    make_model().fit(data, epochs=4, verbose=0, callbacks=[BackupAndRestore(tmp_path), orders])
    assert orders.seen == [(2, 9), (3, 9)]
    assert "30 samples, and 48 in the backup" in caplog.text
