"""Models and data that cases of `fit` share."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd


def compiled(model, optimizer=None, metrics=()):
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        tfscale.DistributedOptimizer(optimizer), "binary_crossentropy", metrics=list(metrics)
    )
    return model


def data(samples, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 3)).astype("float32")
    y = (x.sum(axis=1, keepdims=True) + rng.normal(size=(samples, 1)) > 0).astype("float32")
    return x, y


def own(samples=8):
    return data(samples, 100 + tfscale.rank())


def metrics():
    return ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]


def callbacks() -> list[keras.callbacks.Callback]:
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


def samples(n: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(n, 4)), generator.normal(size=(n, 1))


def assert_equal_on_all_ranks(values) -> None:
    for other in tfscale.allgather_object(values):
        np.testing.assert_equal(other, values)


def weights(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]
