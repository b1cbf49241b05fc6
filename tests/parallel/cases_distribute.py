"""`tfscale.distribute`: what plain Keras gives in one process, here it gives on all ranks together.

Each case first trains as one process would, on every rank by itself, then again under distribute.
"""

import contextlib
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfscale
from tests.helpers.ranks import (
    float64,
    require_close,
    require_error,
    require_identical,
    shared_folder,
)
from tests.helpers.spawn import sizes
from tfscale.comm import runtime
from tfscale.optimizer.saving import alone

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


def in_one_process(train):
    keras.utils.set_random_seed(SEED)
    return train()


def require_equal_runs(train, **options):
    """Require the arrays and numbers of one process, to rounding, on every rank alike."""
    expected = in_one_process(train)
    with distributed(**options):
        found = train()
    require_close(found, expected)
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


def tagging(run_eagerly=False):
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
        run_eagerly=run_eagerly,
    )
    weights = {"tags": np.linspace(0.1, 2, 37)[:, None], "total": np.linspace(3, 0, 37)}
    targets = {"tags": TAGS, "total": TARGETS}
    fitted = model.fit(TOKENS, targets, sample_weight=weights, batch_size=8, epochs=2, verbose=0)
    return model, fitted


class OwnStep(keras.Model):
    """A step of the user's with a loss written by hand and a mean of it, and a second optimizer."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh")])
        self.decoder = keras.Sequential([keras.Input((4,)), layers.Dense(5)])
        self.mean = keras.metrics.Mean(name="mean")

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            code = self.encoder(data) + 0.1 * keras.random.normal(tf.shape(data[:, :4]))
            loss = tf.reduce_mean(tf.square(self.decoder(code) - data))
        for optimizer, part in ((self.first, self.encoder), (self.second, self.decoder)):
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))
        self.mean.update_state(loss)
        return {"average": self.mean.result(), "last": loss}

    @property
    def metrics(self):
        return [self.mean]


# Equality.


@sizes(2, 3, 4, timeout_s=180)
def case_a_script_trains_as_in_one_process():
    with float64():
        require_equal_runs(lambda: results(*convolutional()))
        require_equal_runs(lambda: results(*convolutional(batch_size=2, epochs=1)))
        require_equal_runs(lambda: results(*tagging()))


@sizes(2, 3, timeout_s=180)
def case_a_script_trains_as_in_one_process_step_by_step_too():
    def on_batches():
        model, _ = convolutional(epochs=1, steps_per_epoch=2)
        logs = [
            model.train_on_batch(IMAGES[:5], CLASSES[:5], class_weight={0: 2.0, 1: 1, 2: 1, 3: 0}),
            model.train_on_batch(IMAGES[:7], CLASSES[:7]),
            model.test_on_batch(IMAGES, CLASSES),
            model.evaluate(IMAGES, CLASSES, batch_size=10, verbose=0),
            model.predict_on_batch(IMAGES[:3]),
            model.predict(IMAGES, batch_size=10, verbose=0),
        ]
        return [v.numpy() for v in model.variables] + [np.asarray(values) for values in logs]

    with float64():
        require_equal_runs(on_batches)
        require_equal_runs(lambda: results(*tagging(run_eagerly=True)))


@sizes(2, 3, timeout_s=180)
def case_a_train_step_with_two_optimizers_and_random_numbers():
    def train():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.01))
        fitted = model.fit(ROWS, batch_size=9, epochs=2, verbose=0)  # the last batch has one row
        weights = [v.numpy() for v in model.variables]
        return weights + [np.array(fitted.history[name]) for name in ("average", "last")]

    with float64():
        require_equal_runs(train)


@sizes(2, 3, timeout_s=180)
def case_losses_that_divide_sums_over_the_batch():
    def train(loss):
        model = keras.Sequential([keras.Input((5,)), layers.Dense(2, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.5), loss)
        return results(model, model.fit(ROWS, TARGETS > 0, batch_size=9, epochs=2, verbose=0))

    with float64():
        require_equal_runs(lambda: train(keras.losses.Dice()))
        require_equal_runs(lambda: train(keras.losses.Tversky(alpha=0.3, axis=[0])))
        require_equal_runs(lambda: train(keras.losses.Dice(axis=[1])))


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
    with shared_folder() as folder, distributed():
        path = os.path.join(folder, "model.keras")
        recorder = Recorder(lambda model: model.save(os.path.join(folder, "logged.keras")))
        callbacks = [
            recorder,
            keras.callbacks.ModelCheckpoint(
                os.path.join(folder, "{epoch}.weights.h5"), save_weights_only=True
            ),
            keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
            keras.callbacks.BackupAndRestore(os.path.join(folder, "backup")),
        ]
        model, _ = convolutional(callbacks=callbacks)
        model.save(path)
        keras.saving.save_model(model, os.path.join(folder, "other.keras"))
        keras.models.load_model(os.path.join(folder, "other.keras"))
        assert recorder.n_calls == (2 if tfscale.rank() == 0 else 0)
        assert (os.environ.get("WANDB_MODE") == "disabled") == (tfscale.rank() > 0)
        assert type(keras.models.load_model(path).layers[1]) is layers.BatchNormalization
        assert sorted(os.listdir(folder)) == [
            "1.weights.h5",
            "2.weights.h5",
            "log.csv",
            "logged.keras",
            "model.keras",
            "other.keras",
        ]
        with open(os.path.join(folder, "log.csv")) as file:
            assert len(file.readlines()) == 3
        printed = os.path.join(folder, f"printed-{tfscale.rank()}")
        target = os.fstat(1)
        is_null = os.path.samestat(target, os.stat(os.devnull))
        assert is_null == (tfscale.rank() > 0), printed
    assert not os.path.samestat(os.fstat(1), os.stat(os.devnull))


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
        require_error(
            lambda: model.fit(own, TARGETS, verbose=0), "fit with the same", "other x on rank 1"
        )
        require_error(lambda: model.predict(own, verbose=0), "predict with", "other x on rank 1")
        require_error(
            lambda: model.fit(ROWS, TARGETS, epochs=1 + tfscale.rank() % 2),
            "other epochs on rank 1",
        )
        require_identical(model.variables, before)
        data = tf.data.Dataset.from_generator(
            batches, output_signature=(tf.TensorSpec((None, 5)), tf.TensorSpec((None, 2)))
        )
        require_error(lambda: model.fit(data, verbose=0), "the same batches", "other x on rank 1")


@sizes(2, timeout_s=120)
def case_what_cannot_be_distributed_is_refused():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1)
    with distributed():
        require_error(
            lambda: optimizer.apply([tf.ones((2, 3))], [keras.Variable(np.ones((2, 3)))]),
            "ConfigError",
            "SGD.apply elsewhere, such as in a loop with GradientTape",
        )
        model.compile("sgd", "mse")
        data = tfscale.data.GlobalBatches(ROWS, TARGETS, batch_size=8)
        require_error(lambda: model.fit(data), "ConfigError", "Received: x=GlobalBatches in fit")
        pairs = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
        pairs.compile("sgd", keras.losses.Circle())
        require_error(lambda: pairs.fit(ROWS, np.zeros(37), verbose=0), "ConfigError", "Circle")
        states = keras.Input(batch_shape=(4, 3, 2))
        stateful = keras.Model(states, layers.LSTM(2, stateful=True)(states))
        stateful.compile("sgd", "mse")
        require_error(
            lambda: stateful.fit(np.ones((8, 3, 2)), np.ones((8, 2)), batch_size=4),
            "ConfigError",
            "with stateful=True",
        )
        with alone():  # as callbacks that write
            text = "a callback that writes or logs"
            require_error(lambda: model.predict(ROWS, verbose=0), "ConfigError", text)
    require_error(lambda: tfscale.distribute(batch_norm="sync"), "batch_norm", "'sync'")


@sizes(2, timeout_s=120)
def case_undo_restores_keras():
    places = [(keras.Model, n) for n in ("fit", "evaluate", "predict", "train_on_batch", "save")]
    places += [
        (keras.optimizers.Optimizer, "apply"),
        (keras.metrics.Mean, "update_state"),
        (keras.random, "normal"),
        (keras.losses.Dice, "call"),
        (keras.saving, "save_model"),
        (keras.export.ExportArchive, "write_out"),
        (layers.BatchNormalization, "_moments"),
    ]
    before = [getattr(*place) for place in places] + [os.environ.get("WANDB_MODE")]
    with distributed():
        model, _ = convolutional(epochs=1)
        assert keras.Model.fit is not before[0]
    after = [getattr(*place) for place in places] + [os.environ.get("WANDB_MODE")]
    assert all(a is b for a, b in zip(after, before, strict=True))
    if runtime.rank() == 0:  # alone: nothing is exchanged any more
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(IMAGES[:8], CLASSES[:8], verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            model.save(os.path.join(folder, "model.keras"))
