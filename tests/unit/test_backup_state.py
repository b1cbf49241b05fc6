"""What backups hold beside weights: files per epoch, errors that say what to do."""

import contextlib
import errno
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.test_adaptive_batch_size import (
    InterruptAt,
    Interruption,
    adaptive,
    make_data,
    make_model,
)
from tfscale.callbacks import BackupAndRestore, RankZero, backup_state
from tfscale.callbacks.backup_files import Place
from tfscale.callbacks.backup_state import read_state, remove_other_states, write_state
from tfscale.config import ConfigError


def test_states_come_back(tmp_path):
    arrays = [np.arange(3.0), np.ones((2, 2), np.float32)]
    states = [{"a": 1, "arrays": arrays}, {}, {"b": [None, "x"], "arrays": [np.zeros(0)]}]
    write_state(str(tmp_path / "new" / "folder"), Place(4, 12), states)
    got = read_state(str(tmp_path / "new" / "folder"), Place(4, 12))
    assert [{k: v for k, v in s.items() if k != "arrays"} for s in got] == [
        {"a": 1}, {}, {"b": [None, "x"]}
    ]  # fmt: skip
    for state, other in zip(got, states, strict=True):
        for array, wanted in zip(state.get("arrays", []), other.get("arrays", []), strict=True):
            np.testing.assert_array_equal(array, wanted)
            assert array.dtype == wanted.dtype


def test_only_the_places_that_count_are_kept(tmp_path):
    places = [Place(epoch, 5 * epoch) for epoch in (1, 2, 3)]
    for place in places:
        write_state(str(tmp_path), place, [{"epoch": place.epoch}])
    remove_other_states(str(tmp_path), {places[1]})
    assert [path.name for path in tmp_path.iterdir()] == ["callbacks-2-10.npz"]
    assert read_state(str(tmp_path), places[1]) == [{"epoch": 2}]


@pytest.mark.parametrize("content", [None, b"", b"no zip file"])
def test_a_file_that_is_missing_or_damaged(tmp_path, content):
    if content is not None:
        (tmp_path / "callbacks-1-5.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="Remove the folder to start afresh"):
        read_state(str(tmp_path), Place(1, 5))


def interrupted(backup, at=(2, 0)):
    data = make_data()
    with contextlib.suppress(Interruption):
        make_model().fit(
            data,
            epochs=4,
            verbose=0,
            callbacks=[BackupAndRestore(backup), adaptive(data), InterruptAt(*at)],
        )


def test_other_callbacks_than_before_are_refused(tmp_path):
    backup = str(tmp_path / "backup")
    interrupted(backup)
    with pytest.raises(ConfigError, match="Pass the same callbacks, or remove the backup"):
        make_model().fit(make_data(), epochs=4, verbose=0, callbacks=[BackupAndRestore(backup)])


def test_another_ladder_is_refused(tmp_path):
    backup = str(tmp_path / "backup")
    interrupted(backup)
    data = make_data()
    with pytest.raises(ConfigError, match=r"the backup has \[6, 12, 24\]"):
        make_model().fit(
            data, epochs=4, verbose=0, callbacks=[BackupAndRestore(backup), adaptive(data, 48)]
        )


def test_an_interruption_before_the_first_backup(tmp_path):
    backup = str(tmp_path / "backup")
    interrupted(backup, at=(0, 3))
    data = make_data()
    history = make_model().fit(
        data, epochs=3, verbose=0, callbacks=[BackupAndRestore(backup), adaptive(data)]
    ).history  # fmt: skip
    assert history["batch_size"] == [6, 6, 12]


def test_backups_amid_epochs(tmp_path):
    """As Keras has it: the epoch begins anew, with weights from its middle."""
    backup = str(tmp_path / "backup")
    data = make_data()
    with contextlib.suppress(Interruption):
        make_model().fit(
            data,
            epochs=4,
            verbose=0,
            callbacks=[BackupAndRestore(backup, save_freq=2), adaptive(data), InterruptAt(2, 3)],
        )
    fresh = make_data()
    again = BackupAndRestore(backup, save_freq=2)
    history = make_model().fit(
        fresh, epochs=4, verbose=0, callbacks=[again, adaptive(fresh)]
    ).history  # fmt: skip
    assert history["batch_size"] == [12, 12]
    assert all(np.isfinite(history["theta"]))


class Count(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.n, self.restored_at = 0, None

    def on_epoch_end(self, epoch, logs=None):
        self.n += 1

    def backup_state(self):
        return {"n": self.n}

    def restore_state(self, state, epoch):
        self.n, self.restored_at = state["n"], epoch


def given(count):
    return count


@pytest.mark.parametrize("wrap", [given, RankZero])
def test_a_callback_of_ones_own_goes_on(tmp_path, wrap):
    backup = str(tmp_path / "backup")
    with contextlib.suppress(Interruption):
        callbacks = [BackupAndRestore(backup), wrap(Count()), InterruptAt(2, 0)]
        make_model().fit(make_data(), epochs=4, verbose=0, callbacks=callbacks)
    count = Count()
    callbacks = [BackupAndRestore(backup), wrap(count)]
    make_model().fit(make_data(), epochs=4, verbose=0, callbacks=callbacks)
    assert (count.n, count.restored_at) == (4, 2)


def test_inside_of_rank_zero_other_ranks_have_no_state(monkeypatch):
    """Their callback learned of nothing, and must not be asked."""
    count = Count()
    callbacks = [RankZero(count), RankZero(keras.callbacks.History()), Count()]
    monkeypatch.setattr(backup_state, "callbacks_of_fit", lambda: callbacks)
    inside, other = backup_state.resumable_callbacks()
    assert [backup_state.kind_of(c) for c in (inside, other)] == ["RankZero(Count)", "Count"]
    count.n = 3
    assert inside.backup_state() == {"n": 3}
    monkeypatch.setattr(backup_state.runtime, "rank", lambda: 1)
    assert inside.backup_state() == {}
    inside.restore_state({}, 2)
    assert (count.n, count.restored_at) == (3, None)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_backup_that_the_system_hides_is_not_missing(tmp_path, monkeypatch, number):
    interrupted(str(tmp_path))
    (tmp_path / "latest.weights.h5").write_bytes(b"")  # no more than this is read of it
    look = os.stat

    def refuse(path, *arguments, **options):
        if str(path).endswith("latest.weights.h5"):
            raise OSError(number, os.strerror(number))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    data = make_data()
    with pytest.raises(ConfigError, match="A backup must be readable"):
        make_model().fit(
            data, epochs=4, verbose=0, callbacks=[BackupAndRestore(tmp_path), adaptive(data)]
        )


def test_a_backup_that_is_kept_has_the_last_epoch(tmp_path):
    def train(epochs, **options):
        model, begun = make_model(), []
        note = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: begun.append(epoch)
        )
        backup = BackupAndRestore(tmp_path / "backup", **options)
        model.fit(make_data(), epochs=epochs, verbose=0, callbacks=[backup, note])
        return model, begun

    first, _ = train(2, delete_checkpoint=False)
    second, begun = train(3)
    assert begun == [2]
    # What follows in the same program begins where it is told to.
    history = second.fit(make_data(), epochs=2, verbose=0)
    assert history.epoch == [0, 1]
    assert int(second.optimizer.iterations) > int(first.optimizer.iterations)


class TwoOptimizers(keras.Model):
    """Trains its halves by optimizers of their own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.layers.Dense(1), keras.layers.Dense(1)
        self.build((None, 2))

    def build(self, shape):
        self.one.build(shape)
        self.other.build(shape)
        self.built = True

    def compile(self):
        super().compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        self.own = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.other(data) ** 2)
        self.own.apply(tape.gradient(loss, self.other.weights), self.other.weights)
        return {"loss": loss}


@pytest.mark.parametrize("is_built", [False, True])
def test_the_state_of_a_second_optimizer_needs_its_variables(tmp_path, is_built):
    """Keras would leave it out with a warning: moments would begin anew."""

    def fit(epochs, is_built=True):
        model = TwoOptimizers()
        model.compile()
        if is_built:
            model.own.build(model.other.weights)
        backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(np.ones((4, 2)), epochs=epochs, batch_size=2, verbose=0, callbacks=[backup])
        return model

    fit(1, is_built=False)  # there is nothing to read yet
    if is_built:
        assert int(fit(2).own.iterations) == 4
    else:
        with pytest.raises(ConfigError, match=r"optimizers .'adam.* that are not built"):
            fit(2, is_built=False)
