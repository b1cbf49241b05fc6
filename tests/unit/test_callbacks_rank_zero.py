"""Callbacks of which one rank acts: RankZero and the checkpoints."""

import threading

import keras
import numpy as np
import pytest

from tests.helpers.models import LINE, line_model
from tests.helpers.single_job import single_job  # noqa: F401
from tfscale.callbacks import BestModelCheckpoint, ModelCheckpoint
from tfscale.callbacks.model_checkpoint import make_checkpoints_safe
from tfscale.optimizer.saving import make_saves_safe
from tfscale.testing import FakeRanks, pretend_rank


@pytest.mark.parametrize("save_freq", ["epoch", 2])
def test_checkpoint_writes_on_rank_zero_only(tmp_path, save_freq):
    models = [line_model() for _ in range(3)]

    def body(rank):
        path = str(tmp_path / f"rank{rank}-{{epoch}}.keras")
        callback = ModelCheckpoint(path, save_freq=save_freq)
        models[rank].fit(LINE, LINE, batch_size=4, epochs=2, verbose=0, callbacks=[callback])

    assert FakeRanks(3).run(body) == [None] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0-1.keras", "rank0-2.keras"]
    keras.models.load_model(tmp_path / "rank0-2.keras").evaluate(LINE, LINE, verbose=0)


def test_best_model_checkpoint_keeps_the_best(tmp_path):
    path, weights = tmp_path / "best.keras", []

    def score(epoch, logs):
        logs["score"] = [3.0, 1.0, 2.0][epoch]
        weights.append(scores.model.get_weights()[0])

    scores = keras.callbacks.LambdaCallback(on_epoch_end=score)
    for rank in (0, 1):
        best = BestModelCheckpoint("score", mode="min", filepath=str(path))
        with pretend_rank(rank):
            line_model().fit(LINE, LINE + 1.0, epochs=3, verbose=0, callbacks=[scores, best])
        assert best.best == 1.0
    saved = keras.models.load_model(path).get_weights()[0]
    np.testing.assert_array_equal(saved, weights[1])


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_plain_checkpoints_of_all_ranks_write_one_whole_file(tmp_path, suffix):
    path = tmp_path / "new" / "folder" / f"model{suffix}"
    models = [line_model() for _ in range(4)]
    for model in models:
        model.set_weights(models[0].get_weights())
        make_saves_safe(model)
        make_saves_safe(model)
        make_checkpoints_safe()
    together = threading.Barrier(4)

    def body(rank):
        plain = keras.callbacks.ModelCheckpoint(str(path), save_weights_only=suffix != ".keras")
        plain.set_model(models[rank])
        for epoch in range(3):
            together.wait()
            plain.on_epoch_end(epoch, {})

    assert FakeRanks(4).run(body) == [None] * 4
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    other = line_model()
    other.load_weights(path)
    np.testing.assert_array_equal(other.get_weights()[0], models[0].get_weights()[0])


def test_atomic_saves_keep_the_rules_of_keras(tmp_path):
    model = line_model()
    make_saves_safe(model)
    with pytest.raises(ValueError):
        model.save(tmp_path / "model.unknown")
    model.save_weights(str(tmp_path / "sharded.weights.json"), max_shard_size=1.0)
    model.save(tmp_path / "model.keras", zipped=True)
    model.fit(LINE, LINE, verbose=0)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".rank")]
    with pytest.raises(OSError):
        model.save(tmp_path / "missing" / "model.keras")
