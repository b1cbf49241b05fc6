"""Cycles of backward_passes_per_step that end before their last batch."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import require_equal_ranks
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64

PASSES, BATCHES = 4, 12


class Stop(keras.callbacks.Callback):
    """Stops training behind a batch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = self.model.stop_training or batch == self.batch


def prepared(n_layers=1):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(2, use_bias=False) for _ in range(n_layers)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.125), backward_passes_per_step=PASSES
    )
    model.compile(optimizer, loss="mse")
    return model


def fit(model, batches, callbacks=()):
    """Each batch has the same gradient on this rank, and another one on others."""
    x = np.full((batches, 2), 1.0 + tfscale.rank())
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(
        x, np.zeros((batches, 2)), batch_size=1, shuffle=False, verbose=0,
        callbacks=[start, *callbacks],
    )  # fmt: skip


@sizes(2, 3, 4)
def case_a_stop_amid_a_cycle_begins_another():
    """Ranks that stopped at different batches update together again in the next `fit`."""
    with float64():
        for batch in (0, 3, 6, 9, 10):
            stopped, fresh = prepared(), prepared()
            fit(stopped, BATCHES, [Stop(batch)] if tfscale.rank() == 0 else [])
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


def case_other_variables_begin_another_cycle():
    """A layer is frozen amid a cycle: the rest is summed from there on."""
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
