"""Behaviour that Horovod's Keras tests and scripts for Horovod rely on."""

import threading

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.equality import densify
from tests.helpers.ranks import require_error, shared_folder, values_of
from tfscale.testing import require_close, require_equal_ranks, require_identical

BATCH, STEPS, WORDS = 4, 4, 12
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


def new_model(seed=1):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((3,), dtype="int32")
    x = keras.layers.Embedding(WORDS, 4, dtype="float64", name="words")(inputs)
    x = keras.layers.Flatten(dtype="float64")(x)
    return keras.Model(inputs, keras.layers.Dense(1, dtype="float64", name="out")(x))


def compiled(optimizer, seed=1):
    model = new_model(seed)
    model.compile(optimizer, keras.losses.MeanSquaredError(dtype="float64"))
    return model


def global_data():
    """Words in the order steps, ranks, batch; each rank has other words."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, size=(STEPS, hvd.size(), BATCH, 3))
    return x, x.sum(axis=-1, keepdims=True).astype("float32") / 8


def own_data():
    return [part[:, hvd.rank()].reshape(STEPS * BATCH, -1) for part in global_data()]


def fit(model, data=None, batch=BATCH, **options):
    options = {"epochs": 2, "shuffle": False, "verbose": 0, **options}
    model.fit(*(data or own_data()), batch_size=batch, **options)
    return model


def fit_as_one_process(optimizer):
    data = [part.reshape(-1, part.shape[-1]) for part in global_data()]
    return fit(compiled(optimizer), data, BATCH * hvd.size())


def check_equal_to_one_process(model, reference):
    require_equal_ranks([*model.variables, *model.optimizer.variables])
    require_close(model.variables, reference.variables, rtol=1e-10, atol=1e-12)


def case_fit_leaves_the_ranks_equal():
    """Equal weights at first, different data, nothing else: Horovod fails this on Keras 3."""
    model = compiled(hvd.DistributedOptimizer(SGD(0.05, momentum=0.9)))
    before = values_of(model.variables)
    fit(model)
    check_equal_to_one_process(model, fit_as_one_process(SGD(0.05, momentum=0.9)))
    assert all((v != b).any() for v, b in zip(values_of(model.variables), before, strict=True))


def case_fit_leaves_ranks_equal_that_begin_differently():
    model = compiled(hvd.DistributedOptimizer(Adam(0.05)), seed=hvd.rank())
    fit(model, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    require_equal_ranks([*model.variables, *model.optimizer.variables])


def case_sparse_as_dense():
    for sparse_as_dense in (True, False):
        optimizer = keras.optimizers.RMSprop(0.05)
        ours = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)
        model = fit(compiled(ours))
        require_equal_ranks([*model.variables, *model.optimizer.variables])
        if sparse_as_dense and hvd.size() > 1:
            alone = keras.optimizers.RMSprop(0.05)
            densify(alone)
            check_equal_to_one_process(model, fit_as_one_process(alone))


class Halved(SGD):
    pass


def gap(wanted, given):
    return keras.ops.mean(keras.ops.abs(wanted - given), axis=-1)


def case_load_model_and_go_on():
    """Saved by one rank, loaded by all, trained on: as if training had not been interrupted."""
    for optimizer, loss in ((Adam(0.05), "mse"), (Halved(0.05, momentum=0.9), gap)):
        model = new_model()
        model.compile(hvd.DistributedOptimizer(optimizer), loss)
        fit(model, epochs=1)
        with shared_folder() as folder:
            if hvd.rank() == 0:
                model.save(folder / "model.keras")
            tfscale.barrier()
            loaded = hvd.load_model(
                folder / "model.keras", custom_optimizers=[Halved], custom_objects={"gap": gap}
            )
        assert loaded.optimizer.__class__ is type(optimizer)
        assert int(loaded.optimizer.iterations) == STEPS
        fit(model, epochs=1)
        fit(loaded, epochs=1)
        require_equal_ranks([*loaded.variables, *loaded.optimizer.variables])
        require_identical(
            [*loaded.variables, *loaded.optimizer.variables],
            [*model.variables, *model.optimizer.variables],
        )


@sizes(2, 3)
def case_loaded_optimizer_weights_are_broadcast():
    """Only the root has the file; the others take weights and optimizer state from it."""
    root = hvd.size() - 1
    with shared_folder() as folder:
        file = folder / "model.keras"
        if hvd.rank() == root:
            plain = fit(compiled(Adam(0.05)), epochs=1)
            plain.save(file)
            model = hvd.load_model(file)
        else:
            model = compiled(hvd.DistributedOptimizer(Adam(0.5)), seed=7)
            model.optimizer.build(model.trainable_variables)
        hvd.broadcast_global_variables(root, model)
    require_equal_ranks([*model.variables, *model.optimizer.variables])
    assert int(model.optimizer.iterations) == STEPS
    assert float(model.optimizer.learning_rate) == np.float32(0.05)
    fit(model)
    require_equal_ranks([*model.variables, *model.optimizer.variables])


@sizes(2)
def case_only_the_root_pickles():
    own = {"rate": 0.5} if tfscale.rank() == 0 else threading.Lock()
    assert tfscale.broadcast_object(own, 0) == {"rate": 0.5}


@sizes(1, 2)
def case_sparse_sums_of_integers():
    rank, size = tfscale.rank(), tfscale.size()
    dense = 2 * np.arange(1, size + 1)[:, np.newaxis]
    dense[0] += 4 * size
    for dtype in (tf.int32, tf.int64):
        values = tf.constant([[2 * (rank + 1)], [4]], dtype)
        slices = tf.IndexedSlices(values, tf.constant([rank, 0]), tf.constant([size, 1]))
        total = tf.convert_to_tensor(tfscale.allreduce(slices, op=tfscale.Sum))
        np.testing.assert_array_equal(total, dense)
        mean = tf.convert_to_tensor(tfscale.allreduce(slices, op=tfscale.Average))
        assert mean.dtype == tf.float64
        np.testing.assert_array_equal(mean, dense / size)


@sizes(2)
def case_rows_that_no_split_names_are_refused():
    """Known when the function runs only: the number of rows was unknown as it was traced."""

    exchange = tf.function(tfscale.alltoall, input_signature=[tf.TensorSpec([None, 4])])
    rows = np.asarray(exchange(tf.fill([6, 4], float(tfscale.rank()))))
    np.testing.assert_array_equal(rows[:, 0], [0, 0, 0, 1, 1, 1])
    require_error(lambda: exchange(tf.zeros([7, 4])), "splits")
