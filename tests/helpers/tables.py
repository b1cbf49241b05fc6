"""Models with tables, trained by tfscale on all ranks and by Keras alone, float64 to 1e-10."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfscale
from tests.helpers.equality import TOLERANCE, densify
from tests.helpers.ranks import float64

BATCH, STEPS = 24, 5
N_ROWS, N_FEW, WIDTH = 37, 2, 4  # with fewer rows than ranks, too
MANY = 600_001  # rows of a table that is updated in slices


def ids_of(n: int = BATCH * STEPS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    return random.integers(0, N_ROWS, (n, 3)), random.integers(0, N_FEW, (n, 1))


def targets(n: int = BATCH * STEPS) -> np.ndarray:
    return np.random.default_rng(8).normal(size=(n, 3))


def new_model(embedding: Any, n_rows: int = N_ROWS, **options: Any) -> keras.Model:
    """A model of two tables and a dense layer."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,), dtype="int64"), keras.Input((1,), dtype="int64")
    tables = embedding(n_rows, WIDTH, **options), embedding(N_FEW, WIDTH, **options)
    rows = [keras.layers.Flatten()(table(ids)) for table, ids in zip(tables, inputs, strict=True)]
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.concatenate(rows)))


def tables_of(model: keras.Model) -> list[Any]:
    return [layer for layer in model.layers if type(layer) is tfscale.layers.ShardedEmbedding]


def whole_weights(model: keras.Model) -> list[np.ndarray]:
    """Weights as those of a model with plain embeddings. Collective."""
    tables = [table.get_rows() for table in tables_of(model)]
    return [*tables, *(v.numpy() for v in model.layers[-1].weights)]


def alone(
    make_optimizer: Callable[[], Any], sums: bool = True, n_rows: int = N_ROWS, **options: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights, and the optimizer's variables, of Keras alone."""
    model, optimizer = new_model(keras.layers.Embedding, n_rows), make_optimizer()
    if sums:
        densify(optimizer)
    model.compile(optimizer, "mse", **options)
    ids, y = ids_of(), targets()
    for i in range(0, len(y), BATCH):
        model.train_on_batch([part[i : i + BATCH] for part in ids], y[i : i + BATCH])
    order = [*model.layers[2].weights, *model.layers[3].weights, *model.layers[-1].weights]
    return [v.numpy() for v in order], [v.numpy() for v in optimizer.variables]


def trained(
    make_optimizer: Callable[[], Any], n_rows: int = N_ROWS, compiled: Any = None, **options: Any
) -> keras.Model:
    """A model trained on all ranks; options are those of DistributedOptimizer."""
    model = new_model(tfscale.layers.ShardedEmbedding, n_rows)
    optimizer = tfscale.DistributedOptimizer(make_optimizer(), **options)
    model.compile(optimizer, "mse", **(compiled or {}))
    arrays = ids_of(), targets()
    batches = tfscale.data.GlobalBatches(*arrays, batch_size=BATCH, shuffle=False)
    callbacks = [tfscale.callbacks.Synchronize()]
    model.fit(batches, verbose=0, callbacks=callbacks)
    return model


def require_close(ours: list[np.ndarray], single: list[np.ndarray]) -> None:
    for i, (mine, other) in enumerate(zip(ours, single, strict=True)):
        np.testing.assert_allclose(mine, other, rtol=0, atol=TOLERANCE, err_msg=f"variable {i}")


def check(make_optimizer: Callable[[], Any], n_rows: int = N_ROWS, **options: Any) -> None:
    """Train with and without tfscale; compare weights and the optimizer's complete state."""
    with float64():
        sums = options.get("repeated_indices", "sum") == "sum"
        weights, state = alone(make_optimizer, sums, n_rows)
        model = trained(make_optimizer, n_rows, **options)
        require_close(whole_weights(model), weights)
        require_close(model.optimizer.full_state(), state)
