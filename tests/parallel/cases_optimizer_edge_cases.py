"""Corners of the optimizer: local layers, groups of nothing, uneven epochs, Horovod's names."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.ranks import in_both_modes, require_error, shared_folder, values_of
from tfscale.callbacks import BackupAndRestore, BroadcastGlobalVariablesCallback
from tfscale.testing import require_equal_ranks, require_identical

SGD = keras.optimizers.SGD


def own_rows(n=8, width=2):
    return np.random.default_rng(tfscale.rank()).normal(size=(n, width)).astype("float32")


def differ(variables):
    """Return for each variable whether the first rank and the last have other values."""
    every = tfscale.allgather_object(values_of(variables))
    return [not np.array_equal(a, b) for a, b in zip(every[0], every[-1], strict=True)]


def local_model(local, **options):
    """Return a model with a layer that all ranks share, and some that each has for itself."""
    keras.utils.set_random_seed(tfscale.rank())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="common"), *local])
    rule = keras.optimizers.Adam(0.1)
    optimizer = tfscale.PartialDistributedOptimizer(rule, local_layers=list(local), **options)
    model.compile(optimizer, "mse")
    return model


def fit(model, *callbacks, rate=None):
    if rate is not None:
        model.optimizer.learning_rate = rate
    x, start = own_rows(), BroadcastGlobalVariablesCallback(0)
    y = x @ np.ones((2, 1), "float32")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[*callbacks, start])


@sizes(2, 3, timeout_s=120)
def case_local_layers_stay_local_when_training_begins():
    """In the first `fit`, in others, and frozen; with their slots."""
    head = keras.layers.Dense(1, name="head")
    model = local_model([head])
    begun = head.kernel.numpy()
    fit(model, rate=0.0)
    np.testing.assert_array_equal(head.kernel.numpy(), begun)
    require_equal_ranks(model.get_layer("common").weights)
    fit(model, rate=0.1)
    slots = model.optimizer._momentums[-2:]
    before = values_of([*head.weights, *slots])
    assert all(differ([head.kernel, *slots]))
    fit(model, rate=0.0)
    require_identical(head.weights, before[:2])
    head.trainable = False
    model.compile(model.optimizer, "mse")
    fit(model)
    np.testing.assert_array_equal(head.kernel.numpy(), before[0])
    tfscale.broadcast_global_variables(0, model)
    np.testing.assert_array_equal(head.kernel.numpy(), before[0])
    assert all(differ(slots)) and not any(differ(model.get_layer("common").weights))


@sizes(1, 2, timeout_s=60)
def case_a_backup_keeps_local_layers():
    """Rank 0 writes those of all ranks."""
    with shared_folder() as folder:
        found = []
        for _ in range(2):
            model = local_model([keras.layers.Dense(1, name="head")])
            fit(model, BackupAndRestore(folder / "backup", delete_checkpoint=False))
            found.append(values_of([*model.variables, *model.optimizer.variables]))
        require_identical(*found)
        if tfscale.size() > 1:
            assert any(differ(model.layers[-1].variables))


@sizes(2, 3, timeout_s=60)
def case_moving_statistics_of_local_layers_stay_local():
    own = keras.layers.BatchNormalization(name="own")
    model = local_model([own, keras.layers.Dense(1)])
    fit(model)
    assert all(differ([own.moving_mean, own.moving_variance]))
    mean, begun = own.moving_mean.numpy(), []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begun.append(own.moving_mean.numpy())
    )
    fit(model, look, rate=0.0)
    np.testing.assert_array_equal(begun[0], mean)


def check_sparse_group(**options):
    table, expected = keras.Variable(np.zeros((64, 2)), dtype="float32"), np.zeros((64, 2))
    optimizer = hvd.DistributedOptimizer(SGD(1.0), op=tfscale.Sum, **options)
    optimizer.build([table])

    def step():
        rows = tf.constant([tfscale.rank()])
        gradient = tf.IndexedSlices(tf.ones([1, 2]), rows, tf.constant([64, 2]))
        optimizer.apply([gradient], [table])

    for n, _ in enumerate(in_both_modes(step), start=1):
        expected[: tfscale.size()] = -n
        np.testing.assert_array_equal(table.numpy(), expected)


@sizes(2, 3, timeout_s=60)
def case_groups_of_sparse_gradients_alone():
    check_sparse_group(num_groups=2)
    check_sparse_group(groups=3)


@sizes(2, 3, timeout_s=60)
def case_data_of_unknown_length_ends_between_two_exchanges():
    """No rank waits for one that has more batches, so all are told at the end of the epoch."""
    signature = (tf.TensorSpec((2, 2)), tf.TensorSpec((2, 1)))
    start = BroadcastGlobalVariablesCallback(0)

    def fit_batches(n_batches):
        def batches():
            yield from [(np.ones((2, 2)), np.ones((2, 1)))] * n_batches

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(SGD(0.1), backward_passes_per_step=4), "mse")
        data = tf.data.Dataset.from_generator(batches, output_signature=signature)
        model.fit(data, epochs=2, verbose=0, callbacks=[start])
        require_equal_ranks(model.weights)

    last = tfscale.size() - 1
    text = f"rank {last} ended its epoch after step 10"
    require_error(lambda: fit_batches(10 if tfscale.rank() == last else 11), text)
    fit_batches(10)


@sizes(1, 2, 3)
def case_tapes_with_local_sources():
    rank, scale = tf.cast(tfscale.rank(), tf.float32), 1 / tfscale.size()
    layer = keras.layers.Dense(1)
    layer.build((2,))
    source = tfscale.DistributedGradientTape(tf.GradientTape())
    source.register_local_source(layer.kernel)
    layers = tfscale.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer)
    for tape, n_local, expected in (
        (source, 1, [rank * scale, 1.0]),
        (layers, 2, [rank * scale, scale]),
    ):
        with tape:
            y = tf.reduce_sum(rank * layer.kernel) + tf.reduce_sum(layer.bias)
        local, common = tape.get_local_and_global_gradients(y, [layer.kernel, layer.bias])
        assert [source is layer.kernel for source, _ in local] == [True, False][:n_local]
        assert len(local) + len(common) == 2
        for (_, gradient), value in zip([*local, *common], expected, strict=True):
            np.testing.assert_allclose(gradient.numpy().ravel(), value, rtol=1e-6)


@sizes(2)
def case_a_tape_knows_the_variables_of_its_local_layers():
    layer = keras.layers.Dense(1, use_bias=False)
    x = tf.constant([[1.0 + tfscale.rank()]])
    with tfscale.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer) as tape:
        y = layer(x)  # built after the tape was wrapped
    (gradient,) = tape.gradient(y, layer.trainable_variables)
    np.testing.assert_allclose(gradient.numpy(), x.numpy() / tfscale.size())
    require_error(
        lambda: tfscale.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1]),
        "must be Keras layers",
    )


@sizes(2, timeout_s=60)
def case_one_variable_stays_local():
    """Given alone, or registered with the callback."""
    for is_given in (True, False):
        keras.utils.set_random_seed(tfscale.rank())
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(SGD(0.1))
        layer = model.layers[0]
        optimizer.build(layer.weights)
        layer.bias.assign([1.0 + tfscale.rank()])
        model.compile(optimizer, "mse")
        local = {"local_variables": layer.bias} if is_given else {}
        start = BroadcastGlobalVariablesCallback(0, **local)
        if not is_given:
            start.register_local_var(layer.bias)
        x = own_rows()
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[start])
        assert differ([layer.kernel, layer.bias]) == [False, True]


@sizes(2, 3)
def case_random_numbers_differ_after_a_broadcast():
    """Weights and the state of all optimizers are equal; each rank draws its own masks."""
    keras.utils.set_random_seed(tfscale.rank())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dropout(0.5)])
    model.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse")
    model.second = keras.optimizers.Adam(0.1 * (1 + tfscale.rank()))
    seeds = model.layers[-1].seed_generator.state
    before = seeds.numpy()
    hvd.broadcast_global_variables(0, model)
    require_equal_ranks([*model.weights, *model.optimizer.variables, *model.second.variables])
    np.testing.assert_array_equal(seeds.numpy(), before)
    assert differ([seeds]) == [True]
