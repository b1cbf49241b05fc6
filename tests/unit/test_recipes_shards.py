"""Fixed shares of the data: who has which samples, and their order in each epoch."""

import contextlib

import keras
import numpy as np
import pytest
from datasets.pictures import LabelledPictures
from datasets.shards import FixedShards

import tfscale
from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import BackupAndRestore

SAMPLES, BATCH = 48, 8
LABELS = np.arange(SAMPLES) * 7 % 3


def shards(order="shards", seed=1):
    pictures = np.arange(SAMPLES, dtype="float32")[:, None]
    return FixedShards(LabelledPictures(pictures, LABELS), BATCH, seed, order)


def as_rank(monkeypatch, rank, size):
    monkeypatch.setattr(tfscale, "rank", lambda: rank)
    monkeypatch.setattr(tfscale, "size", lambda: size)


class Recorder(keras.Sequential):
    def train_step(self, data):
        self.seen.append(data[0].numpy().ravel().astype(int).tolist())
        return super().train_step(data)


def epochs_of(data, n=4, seed=1, interrupted_in=None, backup=None):
    keras.utils.set_random_seed(seed)
    model = Recorder([keras.Input((1,)), keras.layers.Dense(1)])
    model.seen, epochs = [], []
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)

    def end(epoch, logs):
        epochs.append(model.seen)
        model.seen = []

    callbacks = [BackupAndRestore(str(backup))] if backup else []
    note = keras.callbacks.LambdaCallback(on_epoch_end=end)
    callbacks += [InterruptAt(interrupted_in, None), note]
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=n, verbose=0, callbacks=callbacks)
    return epochs


@pytest.mark.parametrize("order", ["shards", "sorted_shards"])
def test_ranks_share_the_samples_out(monkeypatch, order):
    whole = np.arange(SAMPLES) if order == "shards" else np.argsort(LABELS, kind="stable")
    firsts = []
    for rank in range(2):
        as_rank(monkeypatch, rank, 2)
        epochs = epochs_of(shards(order))
        share = whole[rank * SAMPLES // 2 : (rank + 1) * SAMPLES // 2]
        for epoch in epochs:
            assert [len(batch) for batch in epoch] == [BATCH // 2] * 6
            assert sorted(np.concatenate(epoch)) == sorted(share)
        assert len({str(epoch) for epoch in epochs}) == 4
        firsts.append([np.searchsorted(np.sort(share), batch).tolist() for batch in epochs[0]])
    assert firsts[0] != firsts[1]


def test_the_order_depends_on_the_seed_of_the_data_only():
    assert epochs_of(shards(), seed=1) == epochs_of(shards(), seed=2)
    assert epochs_of(shards(seed=1)) != epochs_of(shards(seed=2))


def test_a_run_that_goes_on_sees_what_it_would_have_seen(tmp_path):
    whole = epochs_of(shards())
    begun = epochs_of(shards(), interrupted_in=2, backup=tmp_path / "backup")
    rest = epochs_of(shards(), seed=50, backup=tmp_path / "backup")
    assert begun == whole[:2]
    assert rest == whole[2:]


def test_an_evaluation_in_between_changes_nothing():
    data, model = shards(), keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.evaluate(data, verbose=0)
    assert epochs_of(data) == epochs_of(shards())
