"""Batches of a tf.data.Dataset that grow: ranks train on their rows, as one process on all."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, Interruption, float64, require_error, shared_folder
from tests.parallel.cases_distribute import in_one_process, require_equal_runs
from tfscale.callbacks import AdaptiveBatchSize, BatchSizeSchedule, Checkpoint, Synchronize
from tfscale.testing import pretend_rank, require_close, require_equal_ranks

# The last batch has 2 rows, so the third of three ranks has none.
X, Y = np.random.default_rng(0).normal(size=(2, 98, 4))
PARTS = (slice(0, 60), slice(60, 98))
SIZES = [12, 24, 48, 48]
RATES = [0.01, 0.02, 0.04, 0.04]
computed = []  # rows of each step on this rank


@keras.saving.register_keras_serializable(package="tests")
class Noted(keras.layers.Layer):
    """Notes how many rows each step computes."""

    def call(self, inputs):
        note = tf.py_function(lambda n: computed.append(int(n)), [tf.shape(inputs)[0]], [])
        with tf.control_dependencies([note]):
            return tf.identity(inputs)


def model_of(*before):
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((4,)), *before, *hidden])


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)


def train(data, callback, *others, model=None, **options):
    """Train; return the model and the history, which is empty after an interruption."""
    model = model or model_of(Noted())
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse", metrics=["mae"])
    computed.clear()
    callbacks = [Synchronize(), callback, *others]
    with contextlib.suppress(Interruption):
        options = {"epochs": 4, "verbose": 0, **options}
        return model, model.fit(data, callbacks=callbacks, **options).history
    return model, {}


def by_hand(epochs, rates, model=None, loss=lambda y, z: tf.reduce_mean((z - y) ** 2)):
    """Train in this process alone; return the model and the mean loss of each epoch."""
    model, optimizer, losses = model or model_of(), keras.optimizers.Adam(0.01), []
    for batches, rate in zip(epochs, rates, strict=True):
        optimizer.learning_rate, costs, counts = rate, [], []
        for x, y in batches:
            with tf.GradientTape() as tape:
                cost = loss(y, model(x, training=True))
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(cost, weights), weights)
            costs.append(float(cost))
            counts.append(len(y))
        losses.append(np.average(costs, weights=counts))
    return model, losses


def cut(rows, size):
    """Return rows in batches; the last one may be smaller."""
    return [(X[part], Y[part]) for part in np.split(rows, range(size, len(rows), size))]


def rows_of_this_rank(epochs):
    """Return how many rows this rank computes of each batch; one if it has none."""
    n, rank = tfscale.size(), tfscale.rank()
    counts = [len(y) for batches in epochs for _, y in batches]
    return [max(1, count // n + (rank < count % n)) for count in counts]


def grow(data, **options):
    options = {"momentum_correction": False, "log_path": None, **options}
    return AdaptiveBatchSize(data, 48, interval=1, **options)


@functools.cache
def grown_by_hand():
    epochs = [cut(np.arange(98), size) for size in SIZES]
    return epochs, *by_hand(epochs, RATES)


@sizes(1, 2, 3, timeout_s=180)
def case_batches_of_a_dataset_grow_from_the_next_epoch_on():
    with float64():
        epochs, expected, losses = grown_by_hand()
        data = dataset()
        model, history = train(data, grow(data))
        assert history["batch_size"] == SIZES
        assert computed == rows_of_this_rank(epochs)
        require_close(model.variables, expected.variables, atol=1e-10)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-9)
        require_equal_ranks(model.variables)
        # Full batches stay full, also with an unknown number of them.
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12, drop_remainder=True)
        epochs = [[b for b in cut(np.arange(96), n) if len(b[1]) == n] for n in (12, 36)]
        expected, _ = by_hand(epochs, [0.01] * 2)
        for full in (data, data.filter(lambda x, y: True)):
            model, history = train(full, BatchSizeSchedule({1: 36}), epochs=2)
            if full is data:  # a step that finds no data may run what knows its shapes
                assert computed == rows_of_this_rank(epochs)
            require_close(model.variables, expected.variables, atol=1e-10)


@sizes(1, 2, 3, timeout_s=180)
def case_one_iterator_serves_all_epochs_of_a_dataset_that_repeats():
    """8 batches of 12 rows are an epoch; 98 rows repeat, so the epochs begin at rows 0, 96, ..."""
    stream = np.tile(np.arange(98), 5)
    with float64():
        for kind in ("any", "full"):
            size, data = 36, dataset().repeat()
            rows = [stream[i : i + 96] for i in range(0, 384, 96)]
            epochs = [cut(part, n) for part, n in zip(rows, (12, 24, size, size), strict=True)]
            if kind == "full":  # 24 rows of the third epoch are left over, and come in the fourth
                data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat()
                data = data.batch(12, drop_remainder=True)
                epochs[2:] = [cut(stream[192:264], size), cut(stream[264:372], size)]
            expected, losses = by_hand(epochs, [0.01] * 4)
            schedule = BatchSizeSchedule(data, {1: 24, 2: size})
            model, history = train(data, schedule, steps_per_epoch=8)
            assert history["batch_size"] == [12, 24, 36, 36]
            assert computed == rows_of_this_rank(epochs)
            require_close(model.variables, expected.variables, atol=1e-10)
            np.testing.assert_allclose(history["loss"], losses, rtol=1e-9)


@sizes(1, 2, 3, timeout_s=120)
def case_statistics_and_dropout_are_those_of_whole_batches():
    def layers(is_synchronized):
        norm = keras.layers.BatchNormalization(synchronized=is_synchronized)
        return norm, keras.layers.Dropout(0.3, seed=2)

    with float64():
        epochs = [cut(np.arange(98), size) for size in (12, 36)]
        for is_synchronized in (False, True):
            schedule, model = BatchSizeSchedule({1: 36}), model_of(*layers(is_synchronized))
            _, history = train(dataset(), schedule, model=model, epochs=2)
            expected, losses = by_hand(epochs, [0.01] * 2, model=model_of(*layers(is_synchronized)))
            require_close(model.variables, expected.variables, atol=1e-10)
            np.testing.assert_allclose(history["loss"], losses, rtol=1e-9)


@sizes(2, timeout_s=120)
def case_a_batch_size_that_no_step_tells_is_given():
    with float64():
        parts = [tf.data.Dataset.from_tensor_slices((X[i], Y[i])).batch(12) for i in PARTS]
        data = parts[0].concatenate(parts[1])
        epochs = [cut(np.arange(98), size) for size in (14, 28)]
        expected, _ = by_hand(epochs, [0.01] * 2)
        model, history = train(data, BatchSizeSchedule({0: 14, 1: 28}), epochs=2)
        assert history["batch_size"] == [14, 28] and computed[:7] == rows_of_this_rank(epochs)[:7]
        require_close(model.variables, expected.variables, atol=1e-10)
        adaptive = AdaptiveBatchSize(data, 28, start_batch_size=14, interval=1, log_path=None)
        assert train(data, adaptive, epochs=2)[1]["batch_size"] == [14, 28]


class Mixed(keras.Model):
    """Of dense, ragged and sparse features."""

    def __init__(self):
        super().__init__()
        self.top = keras.layers.Dense(1)

    def build(self, shapes):
        self.top.build((None, 7))
        self.built = True

    def call(self, inputs):
        lengths = tf.cast(inputs["ragged"].row_lengths(), inputs["dense"].dtype)
        total = tf.reduce_sum(inputs["ragged"], 1)
        matrix = tf.sparse.to_dense(inputs["sparse"])
        parts = [inputs["dense"], total[:, None], lengths[:, None], matrix]
        return self.top(tf.concat(parts, 1))


@sizes(1, 2, timeout_s=180)
def case_dict_ragged_and_sparse_elements_grow():
    with float64():
        lengths = np.random.default_rng(1).integers(0, 5, 98)
        ragged = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum()) / 100.0, lengths)
        sparse = tf.sparse.from_dense(np.where(X[:, :3] > 0.5, X[:, :3], 0))
        features = {"dense": X[:, :2], "ragged": ragged, "sparse": sparse}
        rows = tf.data.Dataset.from_tensor_slices((features, Y[:, :1]))
        data, models = rows.batch(12), []
        for _ in range(2):
            keras.utils.set_random_seed(1)
            models.append(Mixed())
            models[-1].build(None)
        epochs = [rows.batch(size) for size in SIZES]
        expected, _ = by_hand(epochs, RATES, model=models[0])
        model, history = train(data, grow(data), model=models[1])
        assert history["batch_size"] == SIZES
        require_close(model.variables, expected.variables, atol=1e-10)


@sizes(1, 2, 3, timeout_s=120)
def case_shards_of_a_dataset_grow():
    n, rank = tfscale.size(), tfscale.rank()
    with float64():
        rows = tf.data.Dataset.from_tensor_slices((X[:96], Y[:96]))
        data = rows.shard(n, rank).batch(12 // n)
        model, history = train(data, grow(data, sharded=True))
        epochs = [cut(np.arange(96), size) for size in SIZES]
        expected, losses = by_hand(epochs, RATES)
        assert history["batch_size"] == SIZES
        assert computed == rows_of_this_rank(epochs)
        require_close(model.variables, expected.variables, atol=1e-10)
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-9)


@sizes(2, timeout_s=120)
def case_ranks_that_read_other_rows_are_named():
    with float64():
        data = dataset().map(lambda x, y: (x + tfscale.rank(), y))
        require_error(lambda: train(data, grow(data)), "x in batch 1 of epoch 1 of fit")


def a_script():
    """Train as a script does that knows nothing of ranks."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(98).batch(12)
    model = model_of(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    callbacks = [grow(data)]
    found = model.fit(data, validation_data=(X, Y), epochs=4, callbacks=callbacks, verbose=0)
    assert found.history["batch_size"] == SIZES
    return [*model.get_weights(), found.history["loss"], found.history["val_loss"]]


@sizes(2, 3, timeout_s=240)
def case_a_dataset_grows_in_an_unchanged_script():
    with float64():
        with pretend_rank():
            in_one_process(a_script)
        require_equal_runs(a_script)


def shuffled():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(98, seed=5).batch(12)


def resumed(make_data, **options):
    """Train in one run and in two, of which the first ends in an epoch; return both models."""
    models = []
    with shared_folder() as folder:
        for where, is_cut in ((None, False), (folder, True), (folder, False)):
            data = make_data()
            others = [] if where is None else [Checkpoint(where, every_n_steps=1, keep=2)]
            others += [InterruptAt(2, 1)] if is_cut else []
            tf.random.set_seed(1)
            model, history = train(data, grow(data), *others, **options)
            models.append(model)
            if is_cut:
                check_that_other_data_is_whole(model)
    assert history["batch_size"] == [48, 48]
    return models[0], models[-1]


def check_that_other_data_is_whole(model):
    """The next `fit` of a model whose `fit` broke off has other data, of this rank."""
    computed.clear()
    weights = model.get_weights()
    model.fit(X[:8], Y[:8], batch_size=8, callbacks=[Synchronize()], verbose=0)
    model.set_weights(weights)
    assert computed == [8]


@sizes(1, 2, timeout_s=300)
def case_training_resumes_within_an_epoch_of_larger_batches():
    """Of the third epoch one step is saved; a dataset that repeats has 2 of them there, not 3."""
    with float64():
        for make_data, options in (
            (shuffled, {}),
            (lambda: shuffled().repeat(), {"steps_per_epoch": 8}),
        ):
            whole, parts = resumed(make_data, **options)
            require_close(parts.variables, whole.variables, atol=1e-12)
