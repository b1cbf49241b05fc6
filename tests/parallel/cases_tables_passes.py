"""Passes of models with tables: unequal batches, stops, wrong ids, saved and resumed models."""

import functools
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.equality import OPTIMIZERS, densify
from tests.helpers.ranks import StopAt, float64, outcome, require_error, shared_folder, values_of
from tests.helpers.tables import (
    BATCH,
    N_ROWS,
    alone,
    ids_of,
    new_model,
    require_close,
    tables_of,
    targets,
    trained,
    whole_weights,
)
from tests.parallel.agreement_model import warnings_of_ranks
from tfscale.testing import inspect, require_identical

adam = OPTIMIZERS["adam"]


def prepared(optimizer=adam, **options) -> keras.Model:
    model = new_model(tfscale.layers.ShardedEmbedding)
    model.compile(tfscale.DistributedOptimizer(optimizer(), **options), "mse")
    return tfscale.prepare(model)


def plain() -> keras.Model:
    model = new_model(keras.layers.Embedding)
    model.compile("sgd", "mse")
    return model


def own_share() -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Rows of other numbers on each rank; none are shared."""
    begin, n = 9 * tfscale.rank(), 3 + 5 * tfscale.rank()
    ids, y = ids_of(), targets()
    return (ids[0][begin : begin + n], ids[1][begin : begin + n]), y[begin : begin + n]


@sizes(1, 2, 3, 4, timeout_s=120)
@engine_only("ranks that have ended their pass answer from threads")
def case_passes_of_unequal_lengths():
    with float64():
        model, single = prepared(), plain()
        ids, y = own_share()
        for _ in range(2):
            np.testing.assert_allclose(
                model.predict(list(ids), batch_size=2, verbose=0),
                single.predict(list(ids), batch_size=2, verbose=0),
                atol=1e-12,
            )
            ours, theirs = (m.evaluate(list(ids), y, 2, verbose=0) for m in (model, single))
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
        np.testing.assert_allclose(model(list(ids)), single(list(ids)), atol=1e-12)


@sizes(2, 3, timeout_s=120)
@engine_only("ranks that have ended their pass answer from threads")
def case_validation_and_stops():
    """A rank stops within an epoch, or at its end; each validates on other rows."""
    ids, y = ids_of(), targets()
    for place in ({"batch": 1, "epoch": 1}, {"epoch": 0}):
        model, (own_ids, own_y) = prepared(), own_share()
        n = len(y) // tfscale.size()
        own = slice(tfscale.rank() * n, (tfscale.rank() + 1) * n)
        callbacks = [tfscale.callbacks.Synchronize(), StopAt(**place)]
        data = tf.data.Dataset.from_tensor_slices(((ids[0][own], ids[1][own]), y[own])).batch(8)
        valid = (list(own_ids), own_y)
        options = {"validation_data": valid, "validation_batch_size": 2, "verbose": 0}
        model.fit(data, epochs=3, callbacks=callbacks, **options)
        for weights in tfscale.allgather_object(whole_weights(model)):
            require_identical(weights, whole_weights(model))
        model.fit(data, epochs=1, callbacks=[tfscale.callbacks.Synchronize()], **options)


@sizes(1, 2, 3)
def case_few_ids():
    """A batch of one id, and one of none on all ranks but the first."""
    with float64():
        table = tfscale.layers.ShardedEmbedding(N_ROWS, 2)
        same = table(np.full((7, 3), 5)).numpy()
        np.testing.assert_array_equal(same, np.broadcast_to(table.get_rows(5, 6), (7, 3, 2)))
        none = table(np.zeros((0 if tfscale.rank() else 2, 3), "int32"))
        assert none.shape == (0 if tfscale.rank() else 2, 3, 2)


@sizes(2)
def case_bags():
    ids = np.array([[1, 0, 4], [0, 0, 0]])
    rows = keras.layers.Embedding(6, 3, mask_zero=True)
    for combiner in ("sum", "mean"):
        keras.utils.set_random_seed(1)
        table = tfscale.layers.ShardedEmbedding(6, 3, mask_zero=True, combiner=combiner)
        found = table(ids).numpy()
        rows = table.get_rows()
        total = rows[1] + rows[4]
        np.testing.assert_allclose(found[0], total if combiner == "sum" else total / 2, rtol=1e-6)
        assert not found[1].any()


@sizes(1, 2, 3, timeout_s=200)
def case_saved_models_are_plain():
    """A model saved on all ranks continues in one process of Keras as it would have here."""
    for exchange in ("allreduce", "sharded"):
        with float64(), shared_folder() as folder:
            model = trained(adam, exchange=exchange)
            model.save(folder / "model.keras")
            model.save_weights(folder / "model.weights.h5")
            state = model.optimizer.full_state()
            tfscale.barrier()
            loaded = keras.models.load_model(folder / "model.keras")
            kinds = [type(layer) for layer in loaded.layers]
            assert kinds.count(keras.layers.Embedding) == 2
            order = [*loaded.layers[2].weights, *loaded.layers[3].weights]
            order += loaded.layers[-1].weights
            require_close(values_of(order), whole_weights(model))
            require_close(values_of(loaded.optimizer.variables), state)
            again = prepared()
            again.load_weights(folder / "model.weights.h5")
            require_close(whole_weights(again), whole_weights(model))
            single = plain()
            single.load_weights(folder / "model.weights.h5")


@sizes(1, 2, timeout_s=200)
def case_mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with shared_folder() as folder:
            sgd = OPTIMIZERS["sgd"]
            model = trained(sgd)
            weights = whole_weights(model)
            single, _ = alone(sgd, sums=False)
            for ours, theirs in zip(weights, single, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-2)
            model.save(folder / "model.keras")
            tfscale.barrier()
            loaded = keras.models.load_model(folder / "model.keras")
            require_identical(values_of(loaded.layers[2].weights), weights[:1])
    finally:
        keras.config.set_dtype_policy(before)


@sizes(2, 3)
def case_loads_on_one_rank():
    model = prepared()
    if tfscale.rank() == 0:
        tables_of(model)[0].set_rows(np.zeros((N_ROWS, 4), "float32"))
    fit = functools.partial(
        model.fit,
        [part[:8] for part in ids_of()],
        targets(8),
        callbacks=[tfscale.callbacks.Synchronize()],
        verbose=0,
    )
    require_error(fit, "rows of tables", "on rank 0")


@sizes(1, 2, 3)
def case_first_values_are_those_of_keras():
    for initializer in ("uniform", "glorot_normal", keras.initializers.RandomNormal(seed=2)):
        keras.utils.set_random_seed(5)
        whole = keras.layers.Embedding(N_ROWS, 3, embeddings_initializer=initializer)
        whole.build()
        keras.utils.set_random_seed(5)
        table = tfscale.layers.ShardedEmbedding(N_ROWS, 3, embeddings_initializer=initializer)
        table.build()
        np.testing.assert_array_equal(table.get_rows(), whole.embeddings.numpy())
        blocks = tfscale.layers.ShardedEmbedding(N_ROWS, 3, spread=False)
        blocks.set_rows(whole.embeddings.numpy())
        np.testing.assert_array_equal(blocks.get_rows(4, 20), whole.embeddings.numpy()[4:20])


@sizes(1, 2)
def case_refusals():
    """Each names what is refused, and what to use instead."""
    sharded = tfscale.layers.ShardedEmbedding
    for options, text in (
        ({"embeddings_regularizer": "l2"}, "embeddings_regularizer must be None"),
        ({"embeddings_constraint": "non_neg"}, "embeddings_constraint must be None"),
        ({"lora_rank": 2}, "lora_rank must be None"),
        ({"combiner": "max"}, "combiner must be"),
    ):
        require_error(functools.partial(sharded, 5, 2, **options), text)
    table = sharded(5, 2)
    table.build()
    if tfscale.size() > 1:
        model, checkpoint = prepared(), tf.train.Checkpoint(table=table)
        require_error(functools.partial(model.export, "model"), "model.export needs whole tables")
        save = functools.partial(checkpoint.write, "checkpoint")
        require_error(save, "tf.train.Checkpoint cannot save rows")
    require_error(lambda: table.embeddings, "embeddings must be read by ids")
    require_error(table.enable_lora, "enable_lora needs")
    require_error(functools.partial(table.quantize, "int8"), "quantize needs")
    require_error(functools.partial(table.set_rows, np.zeros((4, 2))), "table must be of shape")
    require_error(sharded(5, 2, combiner="sum").get_config, "combiner must be None")
    require_error(functools.partial(sharded, 5, 2, weights=np.zeros((5, 2))), "shape (5, 2)")
    for start, stop in ((-1, 3), (3, 2), (0, 6)):
        require_error(functools.partial(table.get_rows, start, stop), f"'{start} and {stop}'")
    require_error(sharded(5, 2, name="items").get_rows, "items must be")
    for make, text in (
        (lambda: keras.optimizers.Adafactor(0.1), "Adafactor, which needs whole tables"),
        (lambda: keras.optimizers.SGD(0.1, use_ema=True), "use_ema=True"),
    ):
        require_error(functools.partial(prepared, make), text)
    assert isinstance(table, keras.layers.Embedding) and type(table) is sharded


@sizes(1, 2, 3)
def case_weights_of_a_layer_are_its_whole_table():
    """As scripts that export vectors read them; those of a model are this rank's."""
    table = tfscale.layers.ShardedEmbedding(7, 2)
    assert table.get_weights() == []
    rows = np.arange(14.0, dtype="float32").reshape(7, 2)
    table.build()
    table.set_weights([rows])
    np.testing.assert_array_equal(table.get_weights()[0], rows)


@sizes(2)
def case_an_optimizer_that_is_not_wrapped_is_an_error():
    """Ranks cannot train models of their own that share a table."""
    model = new_model(tfscale.layers.ShardedEmbedding)
    model.compile("adam", "mse")
    batches = tfscale.data.GlobalBatches(ids_of(), targets(), batch_size=BATCH, shuffle=False)
    for callbacks in ([], [tfscale.callbacks.Synchronize()]):
        fit = functools.partial(model.fit, batches, verbose=0, callbacks=callbacks)
        require_error(
            fit, "optimizer must be wrapped in tfscale.DistributedOptimizer where ranks share"
        )


@sizes(1, 2)
def case_sums_of_repeated_ids_are_told():
    """Once, and on one rank: Keras alone would give other results."""
    adagrad = functools.partial(keras.optimizers.Adagrad, 0.1)
    with mock.patch("tfscale.optimizer.rules._warned", set()):
        text = warnings_of_ranks(lambda: [trained(adagrad), trained(adagrad)])
    assert "".join(text).count("adds up the gradients of an index") == 1


@sizes(2)
def case_large_tables_are_drawn_in_blocks():
    """On any number of ranks alike: here on all, and on each alone."""
    own = [tfscale.add_process_set([rank]) for rank in range(tfscale.size())][tfscale.rank()]
    for initializer in ("uniform", "zeros"):
        drawn = []
        for process_set in (tfscale.global_process_set, own):
            keras.utils.set_random_seed(2)
            table = tfscale.layers.ShardedEmbedding(
                17_000_001, 4, embeddings_initializer=initializer, process_set=process_set
            )
            table.build()
            drawn.append(table.get_rows(8_000_000, 8_001_000))
        require_identical(*([rows] for rows in drawn))
        assert initializer == "zeros" or len(np.unique(drawn[0])) > 3000
    table = tfscale.layers.ShardedEmbedding(17_000_001, 4, embeddings_initializer="he_normal")
    require_error(table.build, "embeddings_initializer must be")


@sizes(2, 3)
def case_lazy_updates_and_frozen_tables():
    """A lazy table changes where rows were looked up; a frozen one does not."""
    model = new_model(tfscale.layers.ShardedEmbedding, lazy=True)
    few = tables_of(model)[1]
    few.trainable = False
    model.compile(tfscale.DistributedOptimizer(adam()), "mse")
    tfscale.prepare(model)
    before, kept = tables_of(model)[0].get_rows(), few.get_rows()
    first, second = ids_of(4)
    for ids in (first % 5, first % 5 + 5):
        model.train_on_batch([ids, second], targets(4))
    after = tables_of(model)[0].get_rows()
    looked_up = np.unique(np.concatenate([first % 5, first % 5 + 5]))
    changed = np.flatnonzero((before != after).any(axis=1))
    np.testing.assert_array_equal(changed, looked_up)
    require_identical([few.get_rows()], [kept])
    single = new_model(keras.layers.Embedding)
    assert sum(table.count_params() for table in tables_of(model)) < single.count_params()


@sizes(2)
def case_other_steps():
    """Several steps per execution, eager steps, int8 for other gradients, a layer called twice."""
    ids, y = ids_of(), targets()
    batches = tfscale.data.GlobalBatches(ids, y, batch_size=24, shuffle=False)
    for compiled, options in (
        ({"steps_per_execution": 2}, {}),
        ({"run_eagerly": True}, {}),
        ({}, {"compression": tfscale.Compression.int8}),
        ({}, {"backward_passes_per_step": 2, "average_aggregated_gradients": True}),
    ):
        model = trained(OPTIMIZERS["momentum"], compiled=compiled, **options)
        for weights in tfscale.allgather_object(whole_weights(model)):
            require_identical(weights, whole_weights(model))
        assert np.isfinite(model.evaluate(batches, verbose=0))
    inputs = keras.Input((3,), dtype="int64")
    table = tfscale.layers.ShardedEmbedding(N_ROWS, 4)
    rows = keras.layers.add([table(inputs), table((inputs + 1) % N_ROWS)])
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(rows)))
    model.compile(tfscale.DistributedOptimizer(adam()), "mse")
    data = tfscale.data.GlobalBatches(ids[0], y, batch_size=24)
    model.fit(data, callbacks=[tfscale.callbacks.Synchronize()], verbose=0)
    model.predict(ids[0][: 4 + tfscale.rank()], verbose=0)


@sizes(2, 3)
def case_steps_that_are_not_finite_are_skipped():
    """On all ranks, though one has the NaN, and another the rows."""
    for exchange in ("allreduce", "sharded"):
        model = prepared(nonfinite="skip", exchange=exchange)
        ids, y = ids_of(8), targets(8)
        model.train_on_batch(list(ids), y)
        before = whole_weights(model), model.optimizer.full_state()
        if tfscale.rank() == 0:
            y[2] = np.nan
        model.train_on_batch(list(ids), y)
        require_identical(whole_weights(model), before[0])
        require_identical(model.optimizer.full_state(), before[1])
        assert model.optimizer.n_skipped_steps == 1


@sizes(3)
def case_process_sets():
    """Two of three ranks share a table; the other has none."""
    members = tfscale.add_process_set([0, 2])
    if members.included():
        keras.utils.set_random_seed(1)
        table = tfscale.layers.ShardedEmbedding(N_ROWS, 4, process_set=members)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), table, keras.layers.Flatten()])
        optimizer = tfscale.DistributedOptimizer(adam(), process_set=members)
        model.compile(optimizer, "mse")
        own = slice(4 * members.rank(), 4 * members.rank() + 4)
        ids, y = ids_of(8)[0], np.zeros((8, 12), "float32")
        model.train_on_batch(ids[own], y[own])
        keras.utils.set_random_seed(1)
        whole = keras.layers.Embedding(N_ROWS, 4)
        single = keras.Sequential([keras.Input((3,), dtype="int64"), whole, keras.layers.Flatten()])
        inner = adam()
        densify(inner)
        single.compile(inner, "mse")
        single.train_on_batch(ids, y)
        np.testing.assert_allclose(table.get_rows(), whole.embeddings.numpy(), atol=1e-6)
    tfscale.barrier()
    table = tfscale.layers.ShardedEmbedding(N_ROWS, 4, process_set=members)
    if not members.included():
        assert "process_set must have every rank" in outcome(table.build)
    table = tfscale.layers.ShardedEmbedding(N_ROWS, 4)
    table.build()
    if members.included():
        mixed = keras.Sequential([keras.Input((3,), dtype="int64"), table])
        mixed.compile(tfscale.DistributedOptimizer(adam(), process_set=members), "mse")
        assert "Give both the same process_set" in outcome(lambda: tfscale.prepare(mixed))


@sizes(2, 3)
@engine_only("it records bytes")
def case_messages_of_a_step():
    """The bytes of a step are those of the formula in docs/embeddings.md, with each rank's own."""
    table = tfscale.layers.ShardedEmbedding(N_ROWS, 4)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), table])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    tfscale.prepare(model)
    n = 4 + tfscale.rank()
    ids, y = ids_of(n)[0], np.zeros((n, 3, 4), "float32")
    model.train_on_batch(ids, y)
    tfscale.barrier()
    inspect.take_collectives()
    model.train_on_batch(ids, y)
    sent = [c.bytes for c in inspect.take_collectives() if "embedding" in c.name]
    assert len(sent) == 3
    n_distinct = len(np.unique(ids))
    pairs = tfscale.allgather_object((sum(sent), n_distinct))
    expected = sum(u * (8 + 2 * 16) + 8 * tfscale.size() for _, u in pairs)
    assert sum(n_bytes for n_bytes, _ in pairs) == expected
