"""Runs that are interrupted and resume from `BackupAndRestore`, compared with whole ones."""

import contextlib
import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import InterruptAt, Interruption, float64
from tfscale.callbacks import BackupAndRestore, BroadcastGlobalVariablesCallback
from tfscale.testing import require_identical

BATCH = 12


def network():
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.Dropout(0.4), layers.Dense(1)]
    )


def train(callbacks, seed, exchange="allreduce", earlier_epochs=0, order=4, **options):
    """Train for four epochs, in a first `fit` for some others."""
    keras.utils.set_random_seed(seed)
    model, adam = network(), keras.optimizers.Adam(0.01)
    optimizer = tfscale.DistributedOptimizer(adam, exchange=exchange, **options)
    model.compile(optimizer=optimizer, loss="mse")
    random = np.random.default_rng(1)
    x, y = random.normal(size=(5 * BATCH, 4)), random.normal(size=(5 * BATCH, 1))
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, seed=order)
    start = BroadcastGlobalVariablesCallback(0)
    if earlier_epochs:
        model.fit(data, epochs=earlier_epochs, verbose=0, callbacks=[start])
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=4, verbose=0, callbacks=[*callbacks, start])
    return [*(v.numpy() for v in model.variables), *optimizer.full_state()]


def interrupt_and_go_on(exchange=lambda: "allreduce", more=list, earlier=0, **options):
    """Compare bit by bit, dropout included; other seeds and orders, so all comes from rank 0.

    A program that is started again leaves out its first `fit`, which is over.
    """

    def run(seed, *callbacks, **place):
        callbacks = [*callbacks, *more()]
        return train(callbacks, seed + tfscale.rank(), exchange(), **place, **options)

    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    own_folder = folder if tfscale.rank() == 0 else f"{folder}-not-there-{tfscale.rank()}"
    with float64():
        expected = run(1, earlier_epochs=earlier)
        run(1, BackupAndRestore(own_folder), InterruptAt(2), earlier_epochs=earlier)
        restored = run(50, BackupAndRestore(own_folder), order=9)
    require_identical(restored, expected)
