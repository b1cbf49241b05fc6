"""Warnings of ranks that exchange nothing, train on equal samples or from unequal weights, or judge
by metrics of their own samples.
"""

import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import require_error
from tests.parallel.agreement_model import BATCH, SGD, TOLD, N, batches, train, warnings_of_ranks
from tfscale import DistributedOptimizer
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    Callback,
    Checkpoint,
    MetricAverageCallback,
    ParameterAveraging,
)
from tfscale.comm.warnings import watch_first_fit


def warnings_of(action):
    return warnings_of_ranks(action)[0]


class OwnStep(keras.Model):
    """Exchanges gradients itself, or not."""

    def __init__(self, exchanges):
        super().__init__()
        self.dense, self.exchanges = keras.layers.Dense(1), exchanges

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        tape = tf.GradientTape()
        with tfscale.DistributedGradientTape(tape) if self.exchanges else tape as recorded:
            loss = tf.reduce_mean((self(x) - tf.cast(y, tf.float32)) ** 2)
        gradients = recorded.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit_own_step(exchanges):
    model = OwnStep(exchanges)
    model.compile(SGD(0.1))
    x = np.random.default_rng(tfscale.rank()).normal(size=(N, 2))
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[Callback()])


@sizes(2, timeout_s=120)
def case_ranks_that_train_apart_are_told():
    told = "The ranks of this job train the model"
    assert told in warnings_of(lambda: train(SGD(0.1)))
    averaging = {"callbacks": [ParameterAveraging()]}
    assert told not in warnings_of(lambda: train(SGD(0.1), **averaging))
    assert told not in warnings_of(train)
    assert told not in warnings_of(lambda: fit_own_step(True))
    model = one_layer(SGD(0.1))
    assert told in warnings_of(lambda: model.fit(batches(1)["data"], verbose=0))


@sizes(2)
def case_the_first_plain_fit_is_told_by_one_rank():
    """No rank waits for another: only rank 0 trains."""
    told = "The ranks of this job train the model"

    def fit(optimizer, independent=False):
        watch_first_fit(independent)  # as `init` does
        model = one_layer(optimizer)
        for _ in range(2):
            model.fit(np.zeros((8, 2)), np.zeros(8), verbose=0)

    def alone(*arguments):
        if tfscale.rank() == 0:
            fit(*arguments)

    assert warnings_of(lambda: alone(SGD(0.1))).count(told) == 1
    assert tfscale.rank() != 0 or "fit" not in vars(keras.Model)  # Keras's own again
    assert told not in warnings_of(lambda: fit(DistributedOptimizer(SGD(0.1))))
    assert told not in warnings_of(lambda: alone(SGD(0.1), True))
    assert told in warnings_of(lambda: alone(SGD(0.1), False))


@sizes(2)
def case_gradients_of_collectives_are_told():
    def differentiate(collective, **options):
        x = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            y = collective(x, **options)
        tape.gradient(y, x)

    for name, collective in (
        ("allgather", tfscale.allgather),
        ("broadcast", lambda x, **options: tfscale.broadcast(x, 0, **options)),
        ("reducescatter", lambda x, **options: tfscale.reducescatter(tf.tile(x, [2]), **options)),
    ):
        told = f"The gradient of {name} is Horovod's"
        with mock.patch("tfscale.comm.collectives._warned", set()):
            for kind in ("horovod", "adjoint"):
                silent = warnings_of(lambda c=collective, k=kind: differentiate(c, gradient=k))
                assert silent == ""
            assert warnings_of(lambda c=collective: differentiate(c)).count(told) == 1
            assert warnings_of(lambda c=collective: differentiate(c)) == ""  # once


@sizes(2)
def case_an_own_step_that_exchanges_nothing_is_told():
    with mock.patch("tfscale.comm.eager._has_exchanged_gradients", False):
        text = warnings_of(lambda: fit_own_step(False))
    assert "no tfscale.DistributedGradientTape is used" in text


def one_layer(optimizer, seed=1, is_built=True):
    keras.utils.set_random_seed(seed)
    first = [keras.Input((2,))] if is_built else []
    model = keras.Sequential([*first, keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


@sizes(2)
def case_equal_samples_are_told():
    def fit(seed):
        x = np.random.default_rng(seed).normal(size=(N, 2))
        model = one_layer(DistributedOptimizer(SGD(0.1)))
        model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[Callback()])

    assert "Ranks 0, 1 were given the same samples." in warnings_of(lambda: fit(0))
    assert "same samples" not in warnings_of(lambda: fit(tfscale.rank()))


@sizes(2, 3)
def case_unequal_first_weights_are_refused():
    def fit(seed, *callbacks, broadcast=False, steps=0):
        model = one_layer(DistributedOptimizer(SGD(0.1)), seed)
        model.optimizer.iterations.assign(steps)
        if broadcast:
            tfscale.broadcast_variables(model.weights)
        for more in (callbacks, ()):
            model.fit(batches(1)["data"], verbose=0, callbacks=[Callback(), *more])

    own = 1 + tfscale.rank()
    require_error(lambda: fit(own), TOLD)
    fit(1)
    fit(own, broadcast=True)
    fit(own, BroadcastGlobalVariablesCallback(0))
    require_error(lambda: fit(1, steps=3 * (tfscale.rank() != 1)), TOLD)  # the others have trained


@sizes(2)
def case_who_restores_looks_at_first_weights():
    """Where there is nothing to restore yet: else all ranks get what was saved."""

    def fit(callback, is_built=True, epochs=1):
        model = one_layer(DistributedOptimizer(SGD(0.1)), 1 + tfscale.rank(), is_built)
        callbacks = [callback, MetricAverageCallback()]
        model.fit(batches(1)["data"], epochs=epochs, verbose=0, callbacks=callbacks)

    for make in (
        lambda folder: Checkpoint(folder, asynchronous=False),
        lambda folder: BackupAndRestore(folder, delete_checkpoint=False),
    ):
        folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
        require_error(lambda make=make, folder=folder: fit(make(folder)), TOLD)
        with mock.patch("tfscale.optimizer.first_step.require_equal_weights"):
            fit(make(folder))
        tfscale.barrier()
        fit(make(folder), epochs=2)
    require_error(lambda: fit(Callback(), is_built=False), TOLD)


def told_anew(action):
    with mock.patch("tfscale.comm.warnings._told", set()):
        return warnings_of(action)


@sizes(2)
def case_judges_by_own_metrics_are_told():
    def fit(*callbacks):
        start = BroadcastGlobalVariablesCallback(0)
        model.fit(batches(1)["data"], verbose=0, callbacks=[start, *callbacks])

    model = one_layer(DistributedOptimizer(SGD(0.1)))

    def judge():
        return keras.callbacks.EarlyStopping("loss", restore_best_weights=True)

    told = "EarlyStopping sees the metrics of each rank's own samples"
    assert told in told_anew(lambda: fit(judge()))
    for callbacks in ([judge(), MetricAverageCallback()], [MetricAverageCallback(), judge()]):
        assert "own samples" not in told_anew(lambda c=callbacks: fit(*c))
    assert "own samples" not in told_anew(fit)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=5)
    assert "ReduceLROnPlateau sees" in told_anew(lambda: fit(plateau))


@sizes(2)
def case_an_evaluation_of_own_slices_is_told():
    model, x = one_layer(DistributedOptimizer(SGD(0.1))), np.ones((24, 2))
    whole = {"batch_size": 12, "shuffle": False, "drop_remainder": False}
    valid = tfscale.data.GlobalBatches(x, x[:, :1], **whole)
    told = "evaluate() returns the metrics of this rank's slices"
    assert told in told_anew(lambda: model.evaluate(valid, verbose=0))
    averaged = {"callbacks": [MetricAverageCallback()]}
    assert told not in told_anew(lambda: model.evaluate(valid, verbose=0, **averaged))
    assert told not in told_anew(lambda: model.evaluate(x, x[:, :1], verbose=0))
    start = BroadcastGlobalVariablesCallback(0)
    assert told not in told_anew(
        lambda: model.fit(batches(1)["data"], validation_data=valid, verbose=0, callbacks=[start])
    )

    def one_rank_alone():
        if tfscale.rank() == 0:
            model.evaluate(valid, verbose=0)

    assert told in told_anew(one_rank_alone)
