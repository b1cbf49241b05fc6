"""Sharded ranks continue from what they load; copies begin again."""

from __future__ import annotations

import copy
import pickle

import keras
import tensorflow as tf

import tfscale
from tests.helpers.ranks import require_error, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64
from tests.parallel.sharded_model import (
    N_STEPS,
    Adam,
    alone,
    compiled,
    fit,
    require_state,
    sharded,
)


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
    copies = [
        *(copy.copy(optimizer), copy.deepcopy(optimizer)),
        optimizer.from_config(optimizer.get_config()),
    ]
    for other in copies:
        assert type(other) is type(optimizer) and not other.built
        assert isinstance(other.strategy, tfscale.Sharded)
        assert other.get_config() == optimizer.get_config()
        clone = keras.models.clone_model(model)
        clone.compile(other, "mse")
        fit(clone, 0, 1, [tfscale.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert other.parts
    pickled = pickle.loads(pickle.dumps(optimizer))
    assert type(pickled) is Adam and pickled.get_config() == optimizer.get_config()
    fit(model, 2, 4)  # The original continues.
    clone = keras.models.clone_model(model)
    clone.compile(optimizer, "mse")
    require_error(lambda: fit(clone, 0, 1), "variables that it was built for")
