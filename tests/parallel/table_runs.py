"""Cases that `test_tables` runs on ranks of their own; the environment names their folder."""

import functools
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.equality import OPTIMIZERS
from tests.helpers.ranks import InterruptAt, Interruption, float64, outcome
from tests.helpers.tables import BATCH, N_ROWS, ids_of, new_model, targets, whole_weights

EPOCHS = 3


def compiled(exchange="allreduce") -> keras.Model:
    model = new_model(tfscale.layers.ShardedEmbedding)
    optimizer = tfscale.DistributedOptimizer(OPTIMIZERS["adam"](), exchange=exchange)
    model.compile(optimizer, "mse")
    return model


def train(*watching: keras.callbacks.Callback) -> None:
    """Train from the last checkpoint; write the results under the number of ranks."""
    folder = Path(os.environ["TABLE_FOLDER"])
    with float64():
        model = compiled("sharded" if tfscale.size() == 3 else "allreduce")
        data = tfscale.data.GlobalBatches(ids_of(), targets(), batch_size=BATCH, seed=4)
        steps = [tfscale.callbacks.Checkpoint(folder / "run", every_n_steps=1)]
        callbacks = [*steps, tfscale.callbacks.Synchronize(), *watching]
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        values = [*whole_weights(model), *model.optimizer.full_state()]
        if tfscale.rank() == 0:
            np.savez(folder / f"{os.environ['TABLE_RUN']}.npz", *values)


def train_until() -> None:
    """Train until the end of an epoch, that of the number of ranks before it."""
    try:
        train(InterruptAt(int(os.environ["TABLE_EPOCH"])))
    except Interruption:
        tfscale.barrier()


def ids_that_are_no_rows() -> None:
    """All ranks fail, and name table, rank and id, in a step or where they learn of it."""
    rank, bad = tfscale.size() - 1, N_ROWS
    model = tfscale.prepare(compiled())
    ids, y = ids_of(8), targets(8)
    if tfscale.rank() == rank:
        ids[0][3, 1] = bad
    action = model.predict if os.environ["TABLE_RUN"] == "predict" else model.fit
    given = (list(ids),) if action == model.predict else (list(ids), y)
    text = outcome(functools.partial(action, *given, verbose=0))
    for part in (f"ids must be 0 to {bad - 1}", "embedding", f"id {bad} on rank {rank}"):
        assert part in text, text


def predict_alone() -> None:
    """A rank that predicts alone gets an error within the time limit of saves."""
    model = tfscale.prepare(compiled())
    if tfscale.rank() == 0:
        text = outcome(functools.partial(model.predict, list(ids_of(4)), verbose=0))
        assert "model.predict must run on all ranks" in text and "embedding" in text, text
    tfscale.barrier()
    assert model.predict(list(ids_of(4)), verbose=0).shape == (4, 3)


class Own(keras.layers.Embedding):
    pass


def script(path: Path) -> list:
    """Train a script without tfscale's names, with its tables spread by the launcher's option."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,), dtype="int64")
    rows = [keras.layers.Embedding(N_ROWS, 4)(inputs), Own(N_ROWS, 4)(inputs)]
    rows = keras.layers.Flatten()(keras.layers.add(rows))
    model = keras.Model(inputs, keras.layers.Dense(3)(rows))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    x, y = ids_of(102)[0], targets(102)  # the last batch of 81 has one row
    history = model.fit(x, y, epochs=2, batch_size=16, validation_split=0.2, verbose=0).history
    table = model.layers[1].get_weights()[0]  # as scripts that export vectors read it
    model.save(path)
    again = keras.models.load_model(path, custom_objects={"Own": Own})
    results = [
        table,
        *history.values(),
        model.evaluate(x, y, verbose=0),
        again.predict(x, verbose=0),
    ]
    kinds = [type(layer).__name__ for layer in (model.layers[1], again.layers[1], model.layers[2])]
    return [kinds, *results, again.train_on_batch(x[:7], y[:7])]


def unchanged_script() -> None:
    """Rows of an Embedding of a script are spread; all numbers are those of one process."""
    folder = Path(os.environ["TABLE_FOLDER"])
    with float64():
        plain, *expected = script(folder / f"plain-{tfscale.rank()}.keras")
        job = tfscale.distribute(seed=4, shard_embeddings="1KB")
        kinds, *ours = script(folder / "sharded.keras")
        job.undo()
    assert plain == ["Embedding", "Embedding", "Own"]
    assert kinds == ["ScriptEmbedding", "ScriptEmbedding", "Own"]
    for mine, single in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, single, rtol=0, atol=1e-10)


@keras.saving.register_keras_serializable()
class Scores(keras.layers.Layer):
    """Scores of all rows of a table: tied output weights."""

    def __init__(self, table: keras.layers.Embedding, **options) -> None:
        super().__init__(**options)
        self.table = table

    def get_config(self):
        # Keras keeps shared layers shared in a file: the table stays that of the other layer.
        return {**super().get_config(), "table": keras.saving.serialize_keras_object(self.table)}

    @classmethod
    def from_config(cls, config):
        table = keras.saving.deserialize_keras_object(config.pop("table"))
        return cls(table, **config)

    def call(self, x):
        return tf.matmul(x, self.table.embeddings, transpose_b=True)


@keras.saving.register_keras_serializable()
class Tied(keras.Model):
    """A model of two tables, of which it reads one; `call` is not told of training."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.read, self.other = (keras.layers.Embedding(N_ROWS, 4) for _ in range(2))
        self.dense = keras.layers.Dense(4)

    def call(self, ids):
        x = self.dense(keras.ops.mean(self.read(ids) + self.other(ids), axis=1))
        return tf.matmul(x, self.read.embeddings, transpose_b=True)


def functional() -> keras.Model:
    inputs = keras.Input((3,), dtype="int64")
    read, other = (keras.layers.Embedding(N_ROWS, 4) for _ in range(2))
    x = keras.layers.Dense(4)(keras.ops.mean(read(inputs) + other(inputs), axis=1))
    return keras.Model(inputs, Scores(read)(x))


def tied_script(make, path: Path) -> list:
    keras.utils.set_random_seed(4)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    x = ids_of(40)[0]
    history = model.fit(x, x[:, 0], epochs=2, batch_size=16, verbose=0).history
    results = [*history.values(), model.evaluate(x, x[:, 0], verbose=0)]
    results.append(model.predict(x, verbose=0))
    for layer in model.layers:
        results += layer.get_weights() if not isinstance(layer, Scores) else []
    model.save_weights(path)
    n_sharded = sum(type(v).__name__ == "TableRows" for v in model.weights)
    keras.utils.set_random_seed(5)
    again = make()
    again(x[:1])
    again.load_weights(path)
    np.testing.assert_allclose(again.predict(x, verbose=0), results[2], rtol=0, atol=1e-10)
    model.save(path.with_suffix(".keras"))
    loaded = keras.models.load_model(path.with_suffix(".keras"))
    results.append(loaded.predict(x, verbose=0))
    np.testing.assert_allclose(results[-1], results[2], rtol=0, atol=1e-10)
    history = loaded.fit(x, x[:, 0], epochs=1, batch_size=16, verbose=0).history
    return [n_sharded, *results, *history.values(), loaded.predict(x, verbose=0)]


def tied_tables() -> None:
    """A table that a script reads is plain; the other one stays spread; numbers are equal."""
    folder = Path(os.environ["TABLE_FOLDER"])
    for make in (functional, Tied):
        with float64():
            _, *expected = tied_script(make, folder / f"plain-{tfscale.rank()}.weights.h5")
            job = tfscale.distribute(seed=4, shard_embeddings="1KB")
            n_sharded, *ours = tied_script(make, folder / "sharded.weights.h5")
            job.undo()
        assert n_sharded == 1
        for mine, single in zip(ours, expected, strict=True):
            np.testing.assert_allclose(mine, single, rtol=0, atol=1e-10)
