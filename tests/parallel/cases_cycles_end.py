"""Cycles of backward_passes_per_step that end before their last batch."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.ranks import StopAt, float64, require_error, shared_folder
from tfscale.callbacks.synchronize import ConsistencyCheck
from tfscale.testing import require_equal_ranks, require_identical

PASSES, BATCHES = 4, 12


def prepared(n_layers=1, has_statistics=False):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(2, use_bias=False) for _ in range(n_layers)]
    statistics = [keras.layers.BatchNormalization()] if has_statistics else []
    model = keras.Sequential([keras.Input((2,)), *layers, *statistics])
    rule = keras.optimizers.SGD(0.125)
    model.compile(hvd.DistributedOptimizer(rule, backward_passes_per_step=PASSES), loss="mse")
    return model


def fit(model, batches, callbacks=(), first=()):
    """Each batch has the same gradient on this rank, and another one on others."""
    x = np.full((batches, 2), 1.0 + tfscale.rank())
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(
        x, np.zeros((batches, 2)), batch_size=1, shuffle=False, verbose=0,
        callbacks=[*first, start, *callbacks],
    )  # fmt: skip


@sizes(2, 3, 4)
def case_a_stop_amid_a_cycle_begins_another():
    """Ranks that stopped at different batches update together again in the next `fit`."""
    with float64():
        for batch in (0, 3, 6, 9, 10):
            stopped, fresh = prepared(), prepared()
            fit(stopped, BATCHES, [StopAt(batch, 0, rank=0)])
            last = min(batch + 1, BATCHES) // PASSES * PASSES
            assert int(stopped.optimizer.iterations) == last
            fresh.set_weights(stopped.get_weights())
            for model in (stopped, fresh):
                before = model.get_weights()[0]
                fit(model, PASSES - 1)
                np.testing.assert_array_equal(model.get_weights()[0], before)
                fit(model, PASSES + 1)
                require_equal_ranks(model.trainable_variables)
            np.testing.assert_array_equal(stopped.get_weights()[0], fresh.get_weights()[0])


@sizes(2, 3)
def case_a_stop_in_the_first_cycle_although_weights_are_not_yet_compared():
    for inner, passes in (
        (keras.optimizers.SGD(0.1, gradient_accumulation_steps=PASSES), 1),
        (keras.optimizers.SGD(0.1), PASSES),
    ):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
        model.compile(tfscale.DistributedOptimizer(inner, backward_passes_per_step=passes), "mse")
        for batch in (0, PASSES - 2, PASSES - 1):
            check = ConsistencyCheck()
            fit(model, BATCHES, [check, *([StopAt(batch, 0, rank=0)])])
            require_equal_ranks(model.trainable_variables)


def case_other_variables_begin_another_cycle():
    """A layer is frozen within a cycle: the rest is summed from there on."""
    with float64():
        model = prepared(2)
        optimizer = model.optimizer
        fit(model, PASSES + 1)
        model.layers[0].trainable = False
        model.compile(optimizer, loss="mse")
        frozen, free = (layer.kernel.numpy() for layer in model.layers)
        fit(model, PASSES - 1)
        np.testing.assert_array_equal(model.layers[1].kernel.numpy(), free)
        fit(model, 1)
        np.testing.assert_array_equal(model.layers[0].kernel.numpy(), frozen)
        assert not np.array_equal(model.layers[1].kernel.numpy(), free)
        require_equal_ranks(model.trainable_variables)


@sizes(2, 3)
def case_a_stop_in_the_last_cycle_of_an_epoch():
    """The others reach the last batch, or give it up, while one rank has stopped."""
    with float64(), shared_folder() as folder:
        for batches, batch in ((12, 8), (12, 9), (12, 10), (10, 8), (10, 9)):
            model = prepared(has_statistics=True)
            save = tfscale.callbacks.Checkpoint(folder / f"{batches} {batch}", every_n_steps=1)
            fit(model, batches, [StopAt(batch, 0)], first=[save])
            require_equal_ranks(model.variables)
            # Where no exchange was due, nothing was given up: the cycle continues.
            assert int(model.optimizer.iterations) == (8 if batches == 12 else 10)
            fit(model, batches)
            require_equal_ranks(model.variables)


def case_sets_of_variables_have_cycles_of_their_own():
    """Of a set each batch has gradients of the same ones."""
    with float64():
        first, second = ([keras.Variable(np.ones(2), name=n)] for n in ("first", "second"))
        one = tf.ones([2], tf.float64)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), backward_passes_per_step=2)
        both = [*first, *second]
        optimizer.build(both)
        for variables in (first, second, first, second):
            optimizer.apply([one], variables)
        require_identical(both, np.zeros([2, 2]))
        optimizer.apply([one, one], both)
        texts = "gradients of the same variables", "no gradient of second"
        require_error(lambda: optimizer.apply([one, None], both), *texts)
