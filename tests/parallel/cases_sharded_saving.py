"""Sharded ranks save complete, plain Keras files, whichever rank has the saving callback."""

from __future__ import annotations

import dataclasses
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import dtype_policy, outcome, require_error, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64
from tests.parallel.cases_saving import load_without_tfscale, new_model, train
from tests.parallel.sharded_model import (
    N_STEPS,
    Adam,
    alone,
    compiled,
    fit,
    require_near,
    require_state,
    sharded,
    state_of,
)
from tfscale.config import settings
from tfscale.optimizer import saving

LSO = keras.optimizers.LossScaleOptimizer


def complete_values(model):
    """Return all weights, then the complete state. Collective."""
    arrays = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    return [np.asarray(a, "float64").ravel().tolist() for a in arrays]


@sizes(2, 3, 4, timeout_s=100)
def case_files_load_where_tfscale_is_not():
    """All ranks save; each file is written once."""
    model = train(tfscale.prepare(new_model(sharded(Adam(0.01)))))
    with dtype_policy("mixed_float16"):
        scaled = tfscale.prepare(new_model(sharded(LSO(Adam(0.01))), auto_scale_loss=False))
        train(scaled)
    assert model.optimizer.parts and scaled.optimizer.parts
    with shared_folder() as folder:
        new_model(tfscale.DistributedOptimizer(Adam(0.01))).save(folder / f"{tfscale.rank()}.keras")
        if tfscale.rank() == 0:
            (folder / "0.keras").rename(folder / "fresh.keras")
        with mock.patch.object(saving, "save_beside", wraps=saving.save_beside) as written:
            model.save(folder / "model.keras")
            model.save(folder / "model.h5")
            model.save_weights(folder / "model.weights.h5")
            scaled.save(folder / "scaled.keras")
        assert written.call_count == (4 if tfscale.rank() == 0 else 0)
        expected = {id(m): complete_values(m) for m in (model, scaled)}
        if tfscale.rank() == 0:  # full_state was called by all ranks just before
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            checkpoint.write(str(folder / "checkpoint"))
            found = load_without_tfscale(folder)
            for name, content in found.items():
                values = expected[id(scaled if name == "scaled.keras" else model)]
                n_values = len(model.variables) if name == "model.h5" else None
                pairs = zip(values[:n_values], content["values"][:n_values], strict=True)
                for mine, loaded in pairs:
                    np.testing.assert_array_equal(mine, loaded, name)


@sizes(2, 3, 4, timeout_s=100)
def case_save_points_of_rank_0_alone():
    """At epoch ends and between steps, Keras's callback and ours; other ranks have none."""
    with float64(), shared_folder() as folder:
        plain, states = alone(N_STEPS)
        model = compiled(sharded(Adam(0.01)))
        callbacks = []
        if tfscale.rank() == 0:
            name = str(folder / "new" / "plain-{epoch}.keras")
            ours = str(folder / "ours-{batch}.weights.h5")
            callbacks = [
                keras.callbacks.ModelCheckpoint(name),
                tfscale.callbacks.ModelCheckpoint(ours, save_weights_only=True, save_freq=2),
                tfscale.callbacks.RankZero(
                    keras.callbacks.ModelCheckpoint(
                        str(folder / "z.weights.h5"), save_weights_only=True
                    )
                ),
            ]
        fit(model, 0, 3, callbacks)
        fit(model, 3, 6, callbacks, epochs=2, initial_epoch=1)
        require_state(model, states[6])
        tfscale.barrier()
        found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))
        # Batches are counted across epochs: 2, 4 (number 1 of the second fit) and 6.
        batches = [f"ours-{b}.weights.h5" for b in (1, 2, 3)]
        assert found == [*("new/plain-1.keras", "new/plain-2.keras"), *batches, "z.weights.h5"], (
            found
        )
        if tfscale.rank() == 0:
            for epoch, step in ((1, 3), (2, 6)):
                loaded = keras.models.load_model(folder / "new" / f"plain-{epoch}.keras")
                require_near(state_of(loaded), states[step], (epoch, step))
            for batch, step in ((2, 2), (1, 4), (3, 6)):
                plain.load_weights(folder / f"ours-{batch}.weights.h5")
                require_near(state_of(plain), states[step], (batch, step))


@sizes(2, 3, timeout_s=80)
def case_the_best_model_follows_rank_0():
    """Every rank has Keras's callback and sees its own loss; rank 0 decides and writes."""
    with float64(), shared_folder() as folder:
        model = compiled(sharded(Adam(0.2)))
        best = keras.callbacks.ModelCheckpoint(
            str(folder / "best.keras"), monitor="loss", save_best_only=True
        )
        with mock.patch.object(saving, "save_beside", wraps=saving.save_beside) as written:
            losses = fit(model, 0, 2, [best], epochs=5).history["loss"]
        n_better = sum(loss < min(losses[:i], default=np.inf) for i, loss in enumerate(losses))
        assert n_better > 0
        assert written.call_count == (n_better if tfscale.rank() == 0 else 0), losses
        assert tfscale.allgather_object((folder / "best.keras").exists())[0]


class StopAt(keras.callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at, self.epoch = (epoch, batch), 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= (self.epoch, batch) == self.at

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= (epoch, "end") == self.at


@sizes(2, 3, timeout_s=80)
def case_one_rank_stops_where_another_saves():
    """In an epoch, at its last batch and between epochs."""
    with float64(), shared_folder() as folder:
        for at, n_steps in (((1, 0), 4), ((1, 2), 6), ((1, "end"), 6)):
            model = compiled(sharded(Adam(0.01)))
            callbacks = [StopAt(*at)] if tfscale.rank() == tfscale.size() - 1 else []
            if tfscale.rank() == 0:
                for freq in (1, "epoch"):
                    path = str(folder / f"{freq}.weights.h5")
                    callbacks.append(
                        keras.callbacks.ModelCheckpoint(
                            path, save_weights_only=True, save_freq=freq
                        )
                    )
            fit(model, 0, 3, callbacks, epochs=4)
            values = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
            assert int(model.optimizer.iterations.numpy()) == n_steps, at
            if tfscale.rank() == 0:
                for freq in (1, "epoch"):
                    other = compiled(Adam(0.5))
                    other.optimizer.build(other.trainable_variables)
                    other.load_weights(folder / f"{freq}.weights.h5")
                    require_near(state_of(other), values, (at, freq))


@sizes(2, 3, timeout_s=80)
def case_a_save_on_one_rank_is_refused_in_time():
    """And again on another rank; afterwards all save together."""
    model = compiled(sharded(Adam(0.01)))
    fit(model, 0, 2)
    short = dataclasses.replace(settings(), save_timeout_s=1.0)
    last = tfscale.size() - 1
    with (
        shared_folder() as folder,
        mock.patch("tfscale.optimizer.state.settings", lambda: short),
    ):
        path = folder / "model.keras"
        checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
        for rank in (0, last, 0):
            for save in (lambda: model.save(path), lambda: checkpoint.write(str(folder / "c"))):
                text = outcome(save) if tfscale.rank() == rank else ""
                assert "Call it on every rank" in tfscale.allgather_object(text)[rank], text
        assert not path.exists()
        tfscale.barrier()
        model.save(path)
        assert path.exists()
        require_error(lambda: model.save(folder / "missing" / "model.keras"), "rank 0: ")
