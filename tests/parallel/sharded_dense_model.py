"""Exchanges of dense layers, and a model compiled with one."""

from collections.abc import Callable

import keras

import tfscale
import tfscale.keras as hvd
from tfscale.testing import inspect

DENSE = ("replicated", "partial")


def compiled(build: Callable[[], keras.Model], strategy, rule=None, **options) -> keras.Model:
    keras.utils.set_random_seed(1)
    model = build()
    optimizer = hvd.DistributedOptimizer(
        rule or keras.optimizers.SGD(0.1), exchange=strategy, **options
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


STRATEGIES = (
    *(tfscale.Sharded(dense=route) for route in DENSE),
    tfscale.Chunked(first_chunk_layers=1, replicated_dense=2),
)


def routes(model: keras.Model) -> list[str]:
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.Dense)]
    return [inspect.dense_route(layer) for layer in layers]
