"""Complete, plain Keras files of sharded ranks: saved by any rank, at any time, and loaded."""

import copy
import dataclasses
import pickle
from unittest import mock

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import StopAt, float64, outcome, require_error, shared_folder
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
from tfscale.testing import require_identical


@sizes(2, timeout_s=80)
def case_older_files_hold_complete_state():
    """Read as they are: Keras does not restore the optimizer of a Sequential from them."""
    model = compiled(sharded(Adam(0.01)))
    fit(model, 0, N_STEPS)
    state = model.optimizer.full_state()
    with shared_folder() as folder:
        for name in ("model.h5", "model.hdf5"):
            model.save(str(folder / name))  # by the rank that has the state, alone
            tfscale.barrier()
            with h5py.File(folder / name) as file:
                written = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file)
                require_identical(written, state)


def weights_file(path, kind=keras.callbacks.ModelCheckpoint, **options):
    return kind(str(path), save_weights_only=True, **options)


@sizes(2, 3, 4, timeout_s=100)
def case_save_points_of_rank_0_alone():
    """At epoch ends and between steps, Keras's callback and ours; other ranks have none."""
    with float64(), shared_folder() as folder:
        plain, states = alone(N_STEPS)
        model = compiled(sharded(Adam(0.01)))
        ours = tfscale.callbacks.ModelCheckpoint
        callbacks = [
            keras.callbacks.ModelCheckpoint(str(folder / "new" / "plain-{epoch}.keras")),
            weights_file(folder / "ours-{batch}.weights.h5", ours, save_freq=2),
            tfscale.callbacks.RankZero(weights_file(folder / "z.weights.h5")),
        ] * (tfscale.rank() == 0)
        fit(model, 0, 3, callbacks)
        fit(model, 3, 6, callbacks, epochs=2, initial_epoch=1)
        require_state(model, states[6])
        tfscale.barrier()
        found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.*"))
        # Batches are counted across epochs: 2, 4 (number 1 of the second fit) and 6.
        batches = [f"ours-{b}.weights.h5" for b in (1, 2, 3)]
        assert found == ["new/plain-1.keras", "new/plain-2.keras", *batches, "z.weights.h5"]
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


@sizes(2, 3, timeout_s=80)
def case_one_rank_stops_where_another_saves():
    """In an epoch, at its last batch and between epochs."""
    with float64(), shared_folder() as folder:
        for batch, n_steps in ((0, 4), (2, 6), (None, 6)):
            model = compiled(sharded(Adam(0.01)))
            files = {freq: folder / f"{freq}.weights.h5" for freq in (1, "epoch")}
            savers = [weights_file(path, save_freq=freq) for freq, path in files.items()]
            fit(model, 0, 3, [StopAt(batch), *savers * (tfscale.rank() == 0)], epochs=4)
            values = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
            assert int(model.optimizer.iterations.numpy()) == n_steps, batch
            if tfscale.rank() == 0:
                for path in files.values():
                    other = compiled(Adam(0.5))
                    other.optimizer.build(other.trainable_variables)
                    other.load_weights(path)
                    require_near(state_of(other), values, (batch, path))


def refused_save(save, rank, timeout_s):
    """Require that a save on one rank is given up."""
    short = dataclasses.replace(settings(), save_timeout_s=timeout_s)
    with mock.patch("tfscale.comm.meeting.settings", lambda: short):
        text = outcome(save) if tfscale.rank() == rank else ""
    assert "Call it on every rank" in tfscale.allgather_object(text)[rank], text


@sizes(2, 3, timeout_s=80)
def case_a_save_on_one_rank_is_refused_in_time():
    """And again on another rank; afterwards all save together."""
    model = compiled(sharded(Adam(0.01)))
    fit(model, 0, 2)
    last = tfscale.size() - 1
    with shared_folder() as folder:
        path = folder / "model.keras"
        checkpoint = tf.train.Checkpoint(optimizer=model.optimizer)
        for rank in (0, last, 0):
            for save in (lambda: model.save(path), lambda: checkpoint.write(str(folder / "c"))):
                refused_save(save, rank, 1.0)
        assert not path.exists()
        tfscale.barrier()
        model.save(path)
        assert path.exists()
        require_error(lambda: model.save(folder / "missing" / "model.keras"), "rank 0: ")


def save_and_compare(model, path):
    """Save on all ranks; rank 0 compares the file with what all ranks hold. Collective."""
    model.save(path)
    values = [*(v.numpy() for v in model.variables), *model.optimizer.full_state()]
    if tfscale.rank() == 0:
        require_near(state_of(keras.models.load_model(path)), values, path.name)
    tfscale.barrier()


@sizes(2, timeout_s=120)
def case_a_refused_save_stays_open_through_training():
    """Whole training, and training that one rank stops; then all save."""
    with float64(), shared_folder() as folder:
        model = compiled(sharded(Adam(0.01)))
        for number, stops in enumerate((False, True, False)):
            fit(model, 0, 2)
            refused_save(lambda: model.save(folder / "refused.keras"), number % 2, 0.5)
            fit(model, 2, 4, [StopAt(rank=0)] if stops else [], epochs=3)
            save_and_compare(model, folder / f"stopped-{number}.keras")
            fit(model, 4, 6)
            save_and_compare(model, folder / f"{number}.keras")


@sizes(2, 3, 4, timeout_s=100)
def case_loading_into_a_live_model():
    """Training continues from what was loaded: weights and the parts of the state."""
    with float64(), shared_folder() as folder:
        plain, states = alone(3)
        if tfscale.rank() == 0:
            plain.save_weights(folder / "plain.weights.h5")
            tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).write(str(folder / "c"))
        tfscale.barrier()
        n_weights = len(plain.variables)
        stored = {str(i): value for i, value in enumerate(states[3][n_weights:])}

        def read(model):
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            checkpoint.read(str(folder / "c")).assert_consumed()

        def assign(model):
            for variable, value in zip(model.variables, states[3], strict=False):
                variable.assign(value)
            model.optimizer.load_own_variables(stored)

        def set_weights(model):
            model.set_weights(states[3][:n_weights])
            model.optimizer.load_own_variables(stored)

        unbuilt = compiled(sharded(Adam(0.03)))
        require_error(lambda: read(unbuilt), "tfscale.prepare(model)")
        expected = alone(N_STEPS)[1][N_STEPS]
        for load in (
            lambda model: model.load_weights(folder / "plain.weights.h5"),
            *(read, assign, set_weights),
        ):
            model = compiled(sharded(Adam(0.03)), seed=9)
            fit(model, 1, 3)
            load(model)
            fit(model, 3, N_STEPS)
            require_state(model, expected, load)


@sizes(2, 3, timeout_s=80)
def case_what_rank_0_loads_is_broadcast():
    """As scripts for Horovod do it: rank 0 loads, the callback tells the others."""
    with float64(), shared_folder() as folder:
        plain, _ = alone(3)
        if tfscale.rank() == 0:
            plain.save(folder / "plain.keras")
            model = tfscale.load_model(folder / "plain.keras", exchange=tfscale.Sharded())
        else:
            model = compiled(sharded(Adam(0.5)), seed=tfscale.rank())
        broadcast = tfscale.callbacks.BroadcastGlobalVariablesCallback(0)
        fit(model, 3, N_STEPS, [broadcast])
        require_state(model, alone(N_STEPS)[1][N_STEPS])


@sizes(2, 3, timeout_s=80)
def case_copies_begin_anew():
    model = compiled(sharded(Adam(0.01, clipnorm=0.5)))
    fit(model, 0, 2)
    optimizer = model.optimizer
    optimizer.learning_rate = 0.25
    again = optimizer.from_config(optimizer.get_config())
    for other in (copy.copy(optimizer), copy.deepcopy(optimizer), again):
        assert isinstance(other.strategy, tfscale.Sharded) and not other.built
        assert other.get_config() == optimizer.get_config()
        clone = keras.models.clone_model(model)
        clone.compile(other, "mse")
        fit(clone, 0, 1, [tfscale.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert other.bound.kept
    pickled = pickle.loads(pickle.dumps(optimizer))
    assert type(pickled) is Adam and pickled.get_config() == optimizer.get_config()
    fit(model, 2, 4)  # The original continues.
    clone.compile(optimizer, "mse")
    require_error(
        lambda: fit(clone, 0, 1), "variables must be those that the optimizer was built for"
    )
