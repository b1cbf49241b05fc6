"""Averaged independent training against NumPy's averages of the ranks' own models."""

import keras
import numpy as np

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64
from tfscale.callbacks import BroadcastGlobalVariablesCallback, ParameterAveraging
from tfscale.comm import runtime
from tfscale.config import ConfigError

N_LOCAL, STEPS, RATE = 4, 3, 0.05


def model_and_data(optimizer=None):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile(optimizer or keras.optimizers.SGD(RATE), loss="mse")
    n = N_LOCAL * STEPS * runtime.size()
    random = np.random.default_rng(3)
    x, y = random.normal(size=(n, 5)), random.normal(size=(n, 2))
    batch = N_LOCAL * runtime.size()
    return model, tfscale.data.GlobalBatches(x, y, batch_size=batch, shuffle=False), (x, y)


def train_alone(weights, x, y, rank):
    """One epoch of plain SGD of a linear model on the batches of one rank."""
    kernel, bias = (w.copy() for w in weights)
    batch = N_LOCAL * runtime.size()
    for begin in range(rank * N_LOCAL, len(x), batch):
        samples, targets = x[begin : begin + N_LOCAL], y[begin : begin + N_LOCAL]
        error = 2 * (samples @ kernel + bias - targets) / targets.size
        kernel -= RATE * samples.T @ error
        bias -= RATE * error.sum(axis=0)
    return [kernel, bias]


def flat(weights):
    return np.concatenate([w.ravel() for w in weights])


def check(callback, averaged_epochs, lam, n_epochs=4):
    """Compare with all ranks' models trained here and averaged after some epochs."""
    start = BroadcastGlobalVariablesCallback(0, consistency_check=False, non_trainable="local")
    with float64():
        model, data, (x, y) = model_and_data()
        common = model.get_weights()
        model.fit(data, epochs=n_epochs, verbose=0, callbacks=[start, callback])
    everyone = [common] * runtime.size()
    for epoch in range(n_epochs):
        everyone = [train_alone(w, x, y, r) for r, w in enumerate(everyone)]
        if epoch in averaged_epochs:
            norm = np.linalg.norm
            distances = [norm(flat(common) - flat(w)) for w in everyone]
            scales = [norm(flat(common)) + norm(flat(w)) for w in everyone]
            gammas = np.exp(-lam * np.array(distances) / scales)
            layers = zip(*everyone, strict=True)
            common = [np.average(parts, axis=0, weights=gammas) for parts in layers]
            everyone = [common] * runtime.size()
    for own, expected in zip(model.get_weights(), everyone[runtime.rank()], strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12)
    assert callback.n_averages == len(averaged_epochs)


@sizes(2, 3, timeout_s=120)
def case_uniform_average():
    check(ParameterAveraging(), range(4), lam=0.0)
    check(ParameterAveraging(2), (1, 3), lam=0.0)
    check(ParameterAveraging("end"), (3,), lam=0.0)


@sizes(2, 3, timeout_s=120)
def case_distance_weights():
    for lam in (1.0, 10.0):
        weights = tfscale.DistanceWeights(lam)
        check(ParameterAveraging(weights=weights), range(4), lam)


@sizes(2, timeout_s=120)
def case_only_when_diverged():
    check(ParameterAveraging(when=tfscale.Divergence(0.0)), range(4), lam=0.0)
    check(ParameterAveraging(when=tfscale.Divergence(1e6)), (), lam=0.0)


@sizes(2)
def case_distributed_optimizer_is_refused():
    wrapped = tfscale.DistributedOptimizer(keras.optimizers.SGD(RATE))
    model, data, _ = model_and_data(wrapped)
    try:
        model.fit(data, verbose=0, callbacks=[ParameterAveraging()])
    except ConfigError as error:
        assert "DistributedOptimizer" in str(error)
    else:
        raise AssertionError("no error")
