"""`tfscale.distribute`: what plain Keras gives in one process, here it gives on all ranks together.

Each case first trains as one process would, on every rank by itself, then again under distribute.
tests/scripts has programs with other layers, losses, data and methods.
"""

import contextlib
import functools
import os
import shutil
import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers

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
            (lambda: model.fit(own, TARGETS, verbose=0), "fit with the same", "other x on rank 1"),
            (lambda: model.predict(own, verbose=0), "predict with", "other x on rank 1"),
            (lambda: model.fit(ROWS, TARGETS, epochs=epochs), "other epochs on rank 1"),
        ):
            require_error(action, *texts)
        require_identical(model.variables, before)
        data = tf.data.Dataset.from_generator(
            batches, output_signature=(tf.TensorSpec((None, 5)), tf.TensorSpec((None, 2)))
        )
        require_error(lambda: model.fit(data, verbose=0), "x in batch 2 of fit", "on rank 1 than")


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
