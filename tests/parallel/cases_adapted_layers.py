"""Layers adapted to data: all ranks compute with the same numbers, whichever rank adapted them."""

import contextlib
import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, Interruption, float64, require_error
from tfscale.callbacks import BackupAndRestore, BroadcastGlobalVariablesCallback, Checkpoint
from tfscale.callbacks.synchronize import NonTrainableState
from tfscale.testing import require_close

N = 24
X = np.random.default_rng(1).normal(3, 2, (N, 2))
Y = X[:, :1] ** 2


def network(scale=None):
    """Return a compiled model; its Normalization is adapted to X * scale, if there is one."""
    keras.utils.set_random_seed(1)
    norm = keras.layers.Normalization()
    norm.build((None, 2))
    if scale is not None:
        norm.adapt(X * scale)
    layers = [keras.Input((2,)), norm, keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.03)), "mse")
    return model


def train(model, *callbacks, epochs=2):
    data = tfscale.data.GlobalBatches(X, Y, batch_size=N // 2)
    start = BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[*callbacks, start])
    return model


def by_one_process(*scales):
    """Return the weights after a `fit` with each scale."""
    model = network()
    optimizer = keras.optimizers.SGD(0.03)
    model.compile(optimizer, "mse")
    for scale in scales:
        model.layers[0].adapt(X * scale)
        model.compile(optimizer, "mse")  # so that the step is traced again
        for epoch in (0, 1):
            for rows in np.split(tfscale.data.slices.epoch_order(0, epoch, N), 2):
                model.train_on_batch(X[rows], Y[rows])
    return model.get_weights()


@sizes(2, 3)
def case_one_rank_has_adapted():
    first = tfscale.rank() == 0
    with float64():
        expected = by_one_process(1.0)
        model = train(network(1.0 if first else None))
        require_close(model.get_weights(), expected)
        if first:  # steps that were traced hold the numbers of before
            model.layers[0].adapt(X * 0.5)
        model.predict(X, verbose=0)
        train(model)
        require_close(model.get_weights(), by_one_process(1.0, 0.5))
        outputs = tfscale.allgather(model.predict(X, verbose=0)[None]).numpy()
        assert np.ptp(outputs, axis=0).max() == 0
        model = network(1.0 if first else None)
        tfscale.broadcast_variables(model.weights)  # before fit does
        require_close(train(model).get_weights(), expected)


@sizes(2)
def case_a_model_that_is_built_by_its_first_step():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Normalization(), keras.layers.Dense(1)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.03)), "mse")
    train(model)
    norm = model.layers[0]
    if tfscale.rank() == 0:
        norm.adapt(X)
    train(model)  # traced before, with what rank 0 alone had then
    kernel, bias = model.layers[1].get_weights()
    scaled = (X - X.mean(axis=0)) / X.std(axis=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), scaled @ kernel + bias, rtol=1e-3)


@sizes(2)
def case_averages_leave_it_alone():
    """Without a broadcast each rank continues computing with what its file will hold."""
    model = network(1.0 + tfscale.rank())
    norm = model.layers[0]
    for statistic in (norm.adapt_mean, norm.adapt_variance):  # they are to differ
        model.optimizer.register_local_var(statistic)
    united = NonTrainableState()
    data = tfscale.data.GlobalBatches(X, Y, batch_size=N // 2)
    model.fit(data, verbose=0, callbacks=[united])
    np.testing.assert_array_equal(np.ravel(norm.mean), norm.adapt_mean.numpy())
    np.testing.assert_allclose(np.ravel(norm.mean), X.mean(axis=0) * (1 + tfscale.rank()), 1e-4)


@sizes(2)
def case_a_program_that_goes_on_need_not_adapt():
    for make in (BackupAndRestore, lambda folder: Checkpoint(folder, asynchronous=False)):
        folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
        with float64():
            expected = by_one_process(1.0)
            with contextlib.suppress(Interruption):
                train(network(1.0), make(folder), InterruptAt(1))
            tfscale.barrier()
            require_close(train(network(), make(folder)).get_weights(), expected)


@sizes(2)
def case_other_vocabularies_are_refused():
    def fit(words):
        lookup = keras.layers.StringLookup(vocabulary=words, output_mode="one_hot")
        layers = [keras.Input((1,), dtype="string"), lookup, keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.03)), "mse")
        x = np.array([["a"], ["b"]] * 2)
        data = tfscale.data.GlobalBatches(x, np.ones((4, 1)), batch_size=2)
        model.fit(data, verbose=0, callbacks=[BroadcastGlobalVariablesCallback(0)])

    require_error(
        lambda: fit(["a", "b"] if tfscale.rank() == 0 else ["b", "a"]),
        "Vocabularies must be the same on all ranks",
        "StringLookup with 2 entries",
    )
    fit(["a", "b"])
