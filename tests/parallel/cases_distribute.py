"""`tfscale.distribute`: what plain Keras gives in one process, here it gives on all ranks together.

Each case first trains as one process would, on every rank by itself, then again under distribute.
tests/scripts has programs with other layers, losses, data and methods.
"""

import contextlib
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.ops import gen_random_ops

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, Interruption, float64, require_error, shared_folder
from tfscale.optimizer.saving import alone
from tfscale.testing import require_close, require_identical

SEED = 5
RNG = np.random.default_rng(0)
IMAGES, CLASSES = RNG.normal(size=(53, 6, 6, 2)), RNG.integers(0, 4, 53)
ROWS, TARGETS = RNG.normal(size=(37, 5)), RNG.normal(size=(37, 2))
LENGTHS = RNG.integers(2, 9, (37, 1))
TOKENS = RNG.integers(1, 30, (37, 8)) * (np.arange(8) < LENGTHS)
TAGS = RNG.integers(0, 3, (37, 8))


@contextlib.contextmanager
def distributed(**options):
    """Run a block under `tfscale.distribute`, as a script would from its start."""
    running = tfscale.distribute(seed=SEED, **options)
    try:
        yield
    finally:
        running.undo()


@functools.cache
def in_one_process(train):
    keras.utils.set_random_seed(SEED)
    return train()


def require_equal_runs(train, atol=1e-10, **options):
    """Require the arrays and numbers of one process, to rounding, on every rank alike."""
    expected = in_one_process(train)
    with distributed(**options):
        found = train()
    require_close(found, expected, atol=atol)
    every = tfscale.allgather_object([np.asarray(array) for array in found])
    for of_rank in every:
        require_identical(of_rank, every[0])


def results(model, history):
    arrays = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    return arrays + [np.array(values) for values in history.history.values()]


# Models.


def convolutional(**fit):
    """Normalised over batches of 12, 12, 12 and 6 (of 42) or of 2: uneven, or fewer than ranks."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.SpatialDropout2D(0.2),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    options = {"batch_size": 12, "epochs": 2, "validation_split": 0.2, "verbose": 0, **fit}
    return model, model.fit(IMAGES, CLASSES, **options)


def tagging():
    """Masked positions, sums over batches, weights, repeated indices and positions."""
    inputs = keras.Input((8,))
    embedded = layers.Embedding(30, 6, mask_zero=True)(inputs)
    embedded += layers.Embedding(8, 6)(keras.ops.arange(8))
    hidden = layers.LSTM(5, return_sequences=True)(embedded)
    tags = layers.Dense(3, activation="softmax", name="tags")(hidden)
    total = layers.Dense(2, name="total")(layers.GlobalAveragePooling1D()(hidden))
    model = keras.Model(inputs, {"tags": tags, "total": total})
    model.compile(
        keras.optimizers.Nadam(0.02, clipnorm=1.0),
        loss={
            "tags": "sparse_categorical_crossentropy",
            "total": keras.losses.MeanSquaredError(reduction="sum"),
        },
        loss_weights={"tags": 2.0, "total": 0.1},
        metrics={"tags": "accuracy", "total": [keras.metrics.RootMeanSquaredError()]},
    )
    weights = {"tags": np.linspace(0.1, 2, 37)[:, None], "total": np.linspace(3, 0, 37)}
    targets = {"tags": TAGS, "total": TARGETS}
    fitted = model.fit(TOKENS, targets, sample_weight=weights, batch_size=8, epochs=2, verbose=0)
    return model, fitted


# Equality.


@sizes(2, 3, 4, timeout_s=180)
def case_a_script_trains_as_in_one_process():
    with float64():
        require_equal_runs(lambda: results(*convolutional()))
        require_equal_runs(lambda: results(*convolutional(batch_size=2, epochs=1)))
        require_equal_runs(lambda: results(*tagging()))


@sizes(2, 3, timeout_s=180)
def case_losses_that_divide_sums_over_uneven_batches():
    """And random numbers that are drawn without a generator."""

    def train(loss):
        noise = layers.Lambda(lambda x: x + 0.1 * keras.random.normal(keras.ops.shape(x)))
        model = keras.Sequential([keras.Input((5,)), noise, layers.Dense(2, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.5), loss)
        return results(model, model.fit(ROWS, TARGETS > 0, batch_size=9, epochs=2, verbose=0))

    losses = keras.losses
    with float64():
        for loss in (losses.Dice(), losses.Tversky(alpha=0.3, axis=[0]), losses.Dice(axis=[1])):
            require_equal_runs(lambda loss=loss: train(loss))


@sizes(2, 3, timeout_s=240)
def case_every_exchange_trains_on_uneven_batches():
    def train():
        blocks = [layers.Dense(64, activation="relu"), layers.Dense(64), layers.Dense(2)]
        model = keras.Sequential([keras.Input((5,)), *blocks])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        history = model.fit(ROWS, TARGETS, batch_size=8, epochs=2, verbose=0)
        return [v.numpy() for v in model.variables] + [np.array(history.history["mae"])]

    with float64():
        for exchange in (
            tfscale.Chunked(replicated_dense=2),
            tfscale.Sharded(dense="partial"),
            tfscale.Sharded(dense="weights"),
        ):
            require_equal_runs(train, exchange=exchange)


# What a script writes, and what it may not do.


class Recorder(keras.callbacks.Callback):
    """Records what it is told to call, as callbacks of packages that log do."""

    __module__ = "mlflow.tensorflow"

    def __init__(self, call):
        super().__init__()
        self.call, self.n_calls = call, 0

    def on_epoch_end(self, epoch, logs=None):
        self.n_calls += 1
        self.call(self.model)


@sizes(2, timeout_s=120)
def case_files_and_lines_are_written_once():
    names = [
        "1.weights.h5",
        "2.weights.h5",
        "log.csv",
        "logged.keras",
        "model.keras",
        "other.keras",
    ]
    with shared_folder() as folder, distributed():
        recorder = Recorder(lambda model: model.save(folder / "logged.keras"))
        each = keras.callbacks.ModelCheckpoint(
            folder / "{epoch}.weights.h5", save_weights_only=True
        )
        log = keras.callbacks.CSVLogger(folder / "log.csv")
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        model, _ = convolutional(callbacks=[recorder, each, log, backup])
        model.save(folder / "model.keras")
        keras.saving.save_model(model, folder / "other.keras")
        keras.models.load_model(folder / "other.keras")
        is_first = tfscale.rank() == 0
        assert recorder.n_calls == (2 if is_first else 0)
        assert (os.environ.get("WANDB_MODE") == "disabled") == (not is_first)
        loaded = keras.models.load_model(folder / "model.keras")
        assert type(loaded.layers[1]) is layers.BatchNormalization
        assert sorted(os.listdir(folder)) == names
        assert len((folder / "log.csv").read_text().splitlines()) == 3
        assert os.path.samestat(os.fstat(1), os.stat(os.devnull)) == (not is_first)
    assert not os.path.samestat(os.fstat(1), os.stat(os.devnull))


@sizes(2, timeout_s=120)
def case_a_list_of_callbacks_that_the_script_made():
    def train():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
        model.compile("sgd", "mse")
        own = [keras.callbacks.EarlyStopping("loss", patience=9)]
        made = keras.callbacks.CallbackList(own, add_history=True, model=model)
        return results(model, model.fit(ROWS, TARGETS, 8, 2, verbose=0, callbacks=made))

    with float64():
        require_equal_runs(train)


@sizes(2, timeout_s=120)
def case_the_best_batch_is_that_of_rank_0():
    """The loss of a batch is each rank's own: ranks would not agree on when to save."""
    with shared_folder() as folder, distributed():
        best = keras.callbacks.ModelCheckpoint(
            folder / "best.keras", monitor="loss", save_best_only=True, save_freq=6
        )
        convolutional(callbacks=[best], batch_size=6, epochs=6)
        every = tfscale.allgather_object(best.best)
        assert every[0] != every[1], every
        assert os.listdir(folder) == ["best.keras"]


@sizes(2, timeout_s=120)
def case_an_interrupted_script_resumes():
    with shared_folder() as folder, distributed():

        def train(*callbacks):
            keras.utils.set_random_seed(SEED)
            with contextlib.suppress(Interruption):
                return results(*convolutional(callbacks=list(callbacks)))

        whole = train()
        train(checkpoint := tfscale.callbacks.Checkpoint(folder, 1), InterruptAt(1, 1))
        checkpoint._saver.wait()
        resumed = train(tfscale.callbacks.Checkpoint(folder, 1))
        n_variables = len(resumed) - 4  # logs of the last epoch, and of both
        require_identical(resumed[:n_variables], whole[:n_variables])


def choose(variable):
    return RULES["kernel" if "kernel" in variable.path else "bias"]


RULES = {}


def two_rules():
    RULES.update(kernel=keras.optimizers.Adam(0.01), bias=keras.optimizers.SGD(0.1))
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(2)])
    model.compile(keras.optimizers.MultiOptimizer(choose), "mse")
    history = model.fit(ROWS, TARGETS, batch_size=8, epochs=2, verbose=0)
    return results(model, history)


@sizes(2, 3, timeout_s=120)
def case_a_rule_for_each_parameter():
    if hasattr(keras.optimizers, "MultiOptimizer"):
        with float64():
            require_equal_runs(two_rules)


@sizes(2, 3, timeout_s=180)
def case_different_data_are_named_before_training():
    own = ROWS + (tfscale.rank() == 1)
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])

    def batches():
        yield ROWS[:8], TARGETS[:8]
        yield own[:8], TARGETS[:8]

    with distributed():
        model.compile("sgd", "mse")
        before = [v.numpy() for v in model.variables]
        epochs = 1 + tfscale.rank() % 2
        for action, *texts in (
            (lambda: model.fit(own, TARGETS, verbose=0), "Arguments of fit", "and x=(37, 5)"),
            (lambda: model.predict(own, verbose=0), "Arguments of predict", "and x=(37, 5)"),
            (lambda: model.fit(ROWS, TARGETS, epochs=epochs), "and epochs=2 on rank 1"),
        ):
            require_error(action, *texts)
        require_identical(model.variables, before)
        data = tf.data.Dataset.from_generator(
            batches, output_signature=(tf.TensorSpec((None, 5)), tf.TensorSpec((None, 2)))
        )
        require_error(
            lambda: model.fit(data, verbose=0), "x in batch 2 of epoch 1 of fit", "on rank 1 than"
        )


@sizes(2, timeout_s=120)
def case_what_cannot_be_distributed_is_refused():
    def dense(loss):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
        model.compile("sgd", loss)
        return model

    optimizer, data = (
        keras.optimizers.SGD(0.1),
        tfscale.data.GlobalBatches(ROWS, TARGETS, batch_size=8),
    )
    with distributed():
        model, pairs = dense("mse"), dense(keras.losses.Circle())
        states = keras.Input(batch_shape=(4, 3, 2))
        stateful = keras.Model(states, layers.LSTM(2, stateful=True)(states))
        stateful.compile("sgd", "mse")
        for action, text in (
            (
                lambda: optimizer.apply([tf.ones((2, 3))], [keras.Variable(np.ones((2, 3)))]),
                "SGD.apply elsewhere, such as in a loop with GradientTape",
            ),
            (lambda: model.fit(data), "Received: x=GlobalBatches in fit"),
            (lambda: pairs.fit(ROWS, np.zeros(37), verbose=0), "Circle"),
            (
                lambda: stateful.fit(np.ones((8, 3, 2)), np.ones((8, 2)), batch_size=4),
                "with stateful=True",
            ),
        ):
            require_error(action, "ConfigError", text)
        with alone():  # as callbacks that write
            text = "a callback that writes or logs"
            require_error(lambda: model.predict(ROWS, verbose=0), "ConfigError", text)
    require_error(lambda: tfscale.distribute(batch_norm="sync"), "batch_norm", "'sync'")


def perceptron(optimizer, width=64):
    model = keras.Sequential([keras.Input((5,)), layers.Dense(width, "tanh"), layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


class FallingRate(keras.callbacks.Callback):
    """Sets the rate of the script's own optimizer."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def on_epoch_begin(self, epoch, logs=None):
        self.optimizer.learning_rate = 0.02 / (1 + epoch)


def train_in_parts(folder):
    """A first `fit`, another rate, compiled again, loaded: one state serves all of them."""
    optimizer = keras.optimizers.Adam(0.01)
    model = perceptron(optimizer)
    model.fit(ROWS, TARGETS, batch_size=16, verbose=0, callbacks=[FallingRate(optimizer)])
    optimizer.learning_rate = 0.03
    model.compile(optimizer, "mae")
    model.fit(ROWS, TARGETS, batch_size=16, verbose=0)
    model.save(folder / "model.keras")
    loaded = keras.models.load_model(folder / "model.keras")
    loaded.fit(ROWS, TARGETS, batch_size=16, verbose=0)
    own = [np.array(optimizer.iterations), np.array(optimizer.learning_rate)]
    full = getattr(loaded.optimizer, "full_state", lambda: loaded.optimizer.variables)
    return own + [np.array(v) for v in (*model.get_weights(), *loaded.get_weights(), *full())]


@sizes(2, 3, timeout_s=240)
def case_an_optimizer_that_was_built_before():
    with float64():
        with tempfile.TemporaryDirectory() as folder:
            keras.utils.set_random_seed(SEED)
            expected = train_in_parts(Path(folder))
        with shared_folder() as folder, distributed(exchange="sharded"):
            found = train_in_parts(folder)
        require_close(found, expected)


class Slow(keras.callbacks.CSVLogger):
    """Writes its last line late."""

    def on_train_end(self, logs=None):
        time.sleep(0.3)  # as a slow disk: the others have long left `fit`, unless they wait
        self.csv_file.write("end")
        super().on_train_end(logs)


@sizes(2, 3, timeout_s=120)
def case_files_are_complete_when_fit_returns():
    with shared_folder() as folder, distributed():
        model = perceptron("sgd", width=3)
        model.fit(ROWS, TARGETS, epochs=2, verbose=0, callbacks=[Slow(folder / "log.csv")])
        lines = (folder / "log.csv").read_text().splitlines()
        assert len(lines) == 4 and lines[-1] == "end", lines

        class Fails(Slow):
            def on_train_end(self, logs=None):
                raise OSError("disk full")

        def fit():
            model.fit(ROWS, TARGETS, verbose=0, callbacks=[Fails(folder / "log.csv")])

        require_error(fit, "OSError: disk full")


# Batches that are no rows of samples alone.


class Parts(keras.Model):
    """Its step takes unlabelled and labelled samples, with noise on both."""

    def __init__(self):
        super().__init__()
        self.net, self.mean_square = layers.Dense(2), keras.losses.MeanSquaredError()
        self.net.build((None, 5))
        self.compile(keras.optimizers.SGD(0.1))

    def train_step(self, data):
        plain, (x, y) = data
        plain += 0.1 * keras.random.normal(tf.shape(plain))
        x += 0.1 * keras.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = self.mean_square(y, self.net(x)) + 0.1 * tf.reduce_mean(self.net(plain) ** 2)
        weights = self.net.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def train_on_parts(n_plain, n_labelled, is_static):
    slices = tf.data.Dataset.from_tensor_slices
    plain = slices(np.repeat(ROWS, 4, 0)).batch(n_plain, is_static)
    labelled = slices((ROWS, TARGETS)).batch(n_labelled, is_static)
    model = Parts()
    history = model.fit(tf.data.Dataset.zip(plain, labelled).take(2), epochs=2, verbose=0)
    return [*model.net.get_weights(), np.array(history.history["loss"])]


@sizes(2, 3, timeout_s=240)
def case_parts_with_other_numbers_of_rows():
    with float64():
        for is_static in (True, False):
            require_equal_runs(lambda is_static=is_static: train_on_parts(18, 6, is_static))
            with distributed():
                require_error(
                    lambda is_static=is_static: train_on_parts(13, 6, is_static),
                    "rows must be equal in all parts of a batch",
                )


def failing(step_of, data):
    """Return a `fit` of a model with some step."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = layers.Dense(5)
            self.net.build((None, 5))
            self.compile(keras.optimizers.SGD(0.1))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = step_of(self, data)
            weights = self.net.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = Model()
    before = model.net.get_weights()

    def fit():
        try:
            model.fit(data, verbose=0)
        finally:
            require_identical(model.net.get_weights(), before)

    return fit


@sizes(2, 3, timeout_s=240)
def case_steps_that_need_the_whole_batch_name_its_rows():
    x = ROWS.astype("float32")
    rows = tf.data.Dataset.from_tensor_slices(x)
    views = tf.data.Dataset.from_tensors(x[:24].reshape(2, 12, 5)).repeat(2)
    with distributed():
        for step, data in (
            (
                lambda m, x: tf.reduce_mean(m.net(x + tf.ones((12, 5), x.dtype))),
                rows.batch(12, True),
            ),
            (
                lambda m, x: tf.reduce_mean(m.net(x) * tf.ones((12, 1), x.dtype)),
                rows.batch(12, True),
            ),
            (lambda m, x: tf.reduce_mean(m.net(x[0]) * m.net(x[1])), views),
            (lambda m, x: tf.reduce_mean(tf.reshape(m.net(x), (12, 5))), rows.batch(12, True)),
        ):
            require_error(
                failing(step, data),
                "failed in a step on its rows of the batch",
                "tf.shape(x)[0]",
            )


@sizes(2, timeout_s=240)
def case_strategies_of_tensorflow():
    """One replica changes nothing; several, or a cluster, are refused."""
    kinds = tf.distribute

    def train(strategy):
        with strategy().scope():
            model = perceptron("sgd", width=3)
        return results(model, model.fit(ROWS, TARGETS, batch_size=8, verbose=0))

    with float64():
        expected = in_one_process(lambda: train(kinds.get_strategy))
        for strategy in (kinds.MirroredStrategy, lambda: kinds.OneDeviceStrategy("/cpu:0")):
            with distributed():
                require_close(train(strategy), expected)
    cluster = {"worker": ["localhost:1", "localhost:2"]}
    resolver = kinds.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster))
    with distributed():
        two = kinds.MirroredStrategy(["/cpu:0", "/cpu:1"])
        require_error(two.scope, "MirroredStrategy with 2 replicas")
        require_error(lambda: kinds.MultiWorkerMirroredStrategy(resolver), "cluster of 2 tasks")


@sizes(2, timeout_s=120)
def case_undo_restores_keras():
    places = [(keras.Model, n) for n in ("fit", "evaluate", "predict", "train_on_batch", "save")]
    places += [
        (keras.optimizers.Optimizer, "apply"),
        (keras.metrics.Mean, "update_state"),
        (keras.random, "normal"),
        (keras.losses.Dice, "call"),
        (keras.Variable, "assign"),
        (tf.GradientTape, "gradient"),
        (tf, "shape"),
        (gen_random_ops, "random_uniform"),
        (keras.saving, "save_model"),
        (keras.export.ExportArchive, "write_out"),
        (layers.BatchNormalization, "_moments"),
        (tf.distribute.Strategy, "scope"),
        (tf.distribute.MultiWorkerMirroredStrategy, "__init__"),
        (tf.data.Dataset, "__iter__"),
        (tf.data.Dataset, "cache"),
        (tf.saved_model, "save"),
        (tf.train.Checkpoint, "_write"),
        (keras.utils, "get_file"),
        (os, "makedirs"),
        (shutil, "rmtree"),
    ]

    def found():
        return [getattr(*place) for place in places] + [os.environ.get("WANDB_MODE")]

    first = keras.Sequential([layers.Dense(1)])
    first.compile("sgd", "mse")
    first.fit(np.zeros((1, 1)), np.zeros((1, 1)), verbose=0)  # tfscale watches a job's first `fit`
    before = found()
    with distributed():
        model, _ = convolutional(epochs=1)
        assert keras.Model.fit is not before[0]
    assert all(a is b for a, b in zip(found(), before, strict=True))
    if tfscale.rank() == 0:  # alone: nothing is exchanged any more
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(IMAGES[:8], CLASSES[:8], verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(os.path.join(folder, "model.keras"))
