"""`distribute(verify=...)`: a step that differs from one process is an error before it runs.

The layers, losses and metrics here combine the rows of a batch in ways that no patch sees.
"""

import contextlib
from functools import partial
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64, outcome, require_error
from tests.parallel.agreement_model import warnings_of_ranks
from tfscale.callbacks.epoch_measures import MemoryGuard
from tfscale.testing import require_identical
from tfscale.transparent import verify as verification

RNG = np.random.default_rng(0)
ROWS, TARGETS = RNG.normal(size=(24, 4)) + np.arange(24)[:, None] / 8, RNG.normal(size=(24, 1))
MASK = RNG.integers(0, 2, (24, 1)).astype(float)


@contextlib.contextmanager
def distributed(**options):
    running = tfscale.distribute(seed=3, **options)
    try:
        yield
    finally:
        running.undo()


def of_layers(*inner):
    model = keras.Sequential([keras.Input((4,)), *inner, layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


class Layer(layers.Layer):
    """A layer of one function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Trained(keras.Model):
    """A model whose `train_step` has a loss of its own."""

    def __init__(self, loss_of):
        super().__init__()
        self.net, self.loss_of = layers.Dense(1), loss_of

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.net, *data)
        weights = self.net.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Codebook(layers.Layer):
    """A moving mean of its inputs, of which each rank sees its rows only."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(x, axis=0))
        return x


def negatives(net, x, y):
    scores = ops.matmul(net(x), ops.transpose(y))
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(x)[0]), scores, True)
    )


def hardest(net, x, y):
    worst, _ = ops.top_k(ops.reshape((net(x) - y) ** 2, (-1,)), 2)
    return ops.mean(worst)


def masked(net, x, y, mask):
    return ops.sum((net(x) - y) ** 2 * mask) / ops.sum(mask)


COUPLED = {
    "mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "norm": lambda x: x / (1 + ops.std(x, axis=0, keepdims=True)),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "others": lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x)) / 10), x),
    "roll": lambda x: x + ops.roll(x, 1, axis=0),
    "graph": lambda x: x + ops.tensordot(ops.ones_like(x[:, :1]), x[:1] * 0.1, 1),
    "largest": lambda x: x / ops.max(ops.abs(x)),
    "sorted": lambda x: ops.sort(x, axis=0),
    "first": lambda x: x - x[:1],
    "cumulative": lambda x: ops.cumsum(x, axis=0),
    "shuffled": lambda x: tf.random.shuffle(x),
}
LOSSES = {
    "negatives": (negatives, (ROWS, TARGETS)),
    "hardest": (hardest, (ROWS, TARGETS)),
    "masked": (masked, (ROWS, TARGETS, MASK)),
    "sum": (lambda net, x, y, *_: ops.sum((net(x) - y) ** 2), (ROWS, TARGETS)),
    "root": (lambda net, x, y: ops.sqrt(ops.mean((net(x) - y) ** 2)), (ROWS, TARGETS)),
    "variance": (lambda net, x, y: ops.var(net(x) - y), (ROWS, TARGETS)),
    "largest": (lambda net, x, y: ops.max((net(x) - y) ** 2), (ROWS, TARGETS)),
    "scaled": (lambda net, x, y: ops.mean((net(x) / ops.mean(y) - y) ** 2), (ROWS, TARGETS)),
    "correlation": (lambda net, x, y: ops.mean(net(x)) * ops.mean(y), (ROWS, TARGETS)),
    "pairs": (lambda net, x, y: ops.mean(ops.abs(net(x) - ops.transpose(net(x)))), (ROWS, TARGETS)),
}


@sizes(2, 3, timeout_s=150)
def case_layers_that_combine_rows_are_refused():
    texts = {}
    with float64(), distributed():
        for name, function in COUPLED.items():
            model = of_layers(Layer(function))
            before = model.get_weights()
            predict, fit = partial(model.predict, ROWS, 8), partial(model.fit, ROWS, TARGETS, 8)
            texts[f"predict {name}"] = outcome(partial(predict, verbose=0))
            texts[f"fit {name}"] = outcome(partial(fit, verbose=0))
            require_identical(model.get_weights(), before)
            assert int(model.optimizer.iterations) == 0, name
        texts["evaluate"] = outcome(lambda: model.evaluate(ROWS, TARGETS, 8, verbose=0))
    require_refusals(texts, "differs from a step of one process; no weight was changed", "axis 0")


@sizes(2, 3, timeout_s=150)
def case_losses_over_a_batch_are_refused():
    texts = {}
    with float64(), distributed():
        for name, (loss_of, data) in LOSSES.items():
            model = Trained(loss_of)
            model.compile(keras.optimizers.SGD(0.1))
            batches = tf.data.Dataset.from_tensor_slices(data).batch(8, drop_remainder=True)
            texts[name] = outcome(partial(model.fit, batches, shuffle=False, verbose=0))
        require_refusals(texts, "differs from a step of one process", "gradient", "--verify off")
        text = f"is {1 / tfscale.size():.4g} times that of one process"
        model = Trained(LOSSES["sum"][0])
        model.compile("sgd")
        require_error(lambda: model.train_on_batch(ROWS, TARGETS), text, "(1) a sum over the batch")


def require_refusals(texts, *parts):
    """Require on all ranks that each of several errors has all parts."""
    for of_rank in tfscale.allgather_object(texts):
        wrong = {name: text for name, text in of_rank.items() if any(p not in text for p in parts)}
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


@sizes(2, 3)
def case_a_difference_is_compared_with_what_rounding_errors_change():
    """Rank 0 computes the step again with other last bits of the weights, and puts them back."""
    loss_of, data = LOSSES["variance"]
    spy = mock.Mock(wraps=verification.find_differences)
    with float64(), distributed(), mock.patch.object(verification, "find_differences", spy):
        model = Trained(loss_of)
        model.compile("sgd")
        before = (model(data[0]), model.get_weights())[1]
        batches = tf.data.Dataset.from_tensor_slices(data).batch(8, drop_remainder=True)
        require_error(lambda: model.fit(batches, shuffle=False, verbose=0), "gradient")
    require_identical(model.get_weights(), before)
    if tfscale.rank() > 0:
        spy.assert_not_called()
        return
    assert [len(call.args) for call in spy.call_args_list] == [3, 4]
    alone, _, _, nudged = spy.call_args.args
    assert len(nudged) == 3
    array = alone["gradient", model.net.kernel.path].array
    for run in nudged:
        change = np.abs(run["gradient", model.net.kernel.path].array - array).max()
        assert 0 < change < 1e-12 * np.abs(array).max()


@sizes(2, 3)
def case_states_of_single_ranks_are_refused():
    with float64(), distributed():
        model = of_layers(Codebook(name="codes"))
        require_error(lambda: model.fit(ROWS, TARGETS, 8, verbose=0), "variable", "codes")
        model = of_layers()
        model.compile("sgd", "mse", metrics=[Peak()])
        require_error(lambda: model.fit(ROWS, TARGETS, 8, verbose=0), "peak", "tfscale_reduce")


class Peak(keras.metrics.Metric):
    """The product of two states is no sum over rows."""

    def __init__(self):
        super().__init__(name="peak")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.max(ops.abs(y_true - y_pred)))

    def result(self):
        return self.total


# What is right stays as it is.


class Adversarial(keras.Model):
    """Two networks and two optimizers; noise, and numbers drawn while the step is traced."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([layers.Dense(6, "relu"), layers.Dense(4)])
        self.critic = keras.Sequential(
            [layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.of_critic = keras.optimizers.Adam(0.01)

    def train_step(self, real):
        noise = keras.random.normal((tf.shape(real)[0], 2), seed=self.seeds)
        factor = float(np.random.uniform(0.5, 1.0))
        with tf.GradientTape() as tape:
            fake = self.maker(noise)
            of_fake, of_real = self.critic(fake, training=True), self.critic(real, training=True)
            loss = ops.mean(ops.relu(1 + of_fake)) + factor * ops.mean(ops.relu(1 - of_real))
        weights = self.critic.trainable_weights
        self.of_critic.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            of_maker = -ops.mean(self.critic(self.maker(noise)))
        weights = self.maker.trainable_weights
        self.optimizer.apply(tape.gradient(of_maker, weights), weights)
        return {"critic": loss, "maker": of_maker}


def adversarial():
    model = Adversarial()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    return model, model.fit(ROWS, batch_size=10, epochs=2, verbose=0)


def classifier(**fit):
    model = keras.Sequential(
        [
            layers.Dense(12, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=fit.pop("steps_per_execution", 1),
    )
    labels = np.arange(24) % 3
    options = {"epochs": 1, "verbose": 0, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}
    history = model.fit(ROWS, labels, 6, validation_split=0.25, **options, **fit)
    model.train_on_batch(ROWS[:8], labels[:8])
    model.predict_on_batch(ROWS[:5])
    return model, history


def regression():
    model = of_layers(layers.Dense(8, "relu"))
    return model, model.fit(ROWS, TARGETS, 8, verbose=0)


def mixed():
    with contextlib.ExitStack() as stack:
        keras.config.set_dtype_policy("mixed_float16")
        stack.callback(keras.config.set_dtype_policy, "float32")
        model = of_layers(layers.Dense(8, "relu"))
        return model, model.fit(ROWS.astype("float32"), TARGETS, 8, verbose=0)


@sizes(2, timeout_s=200)
def case_steps_that_are_right_train_as_without_verification():
    for train, options in (
        (adversarial, {}),
        (lambda: classifier(steps_per_execution=3), {"exchange": "sharded"}),
        (regression, {"exchange": tfscale.Chunked(replicated_dense=1)}),
        (regression, {"exchange": tfscale.LocalSGD(groups=2, interval=2)}),
        (mixed, {}),
    ):
        results = []
        for verify in ("off", 2):
            np.random.seed(1)
            with distributed(verify=verify, **options):
                model, history = train()
                arrays = [np.asarray(v.numpy()) for v in model.variables]
                arrays += [v.numpy() for v in model.optimizer.variables if "iteration" in v.path]
                drawn = np.random.uniform(size=2)
            results.append([*arrays, *map(np.array, history.history.values()), drawn])
        require_identical(results[1], results[0])


@sizes(2)
def case_what_cannot_be_compared_is_said():
    def printing(net, x, y):
        tf.print("a line")
        return ops.mean((net(x) - y) ** 2)

    def drawing(net, x, y):
        noise = tf.raw_ops.RandomStandardNormal(shape=[1, 4], dtype=x.dtype)
        return ops.mean((net(x + noise) - y) ** 2)

    for loss_of, text in ((printing, "PrintV2"), (drawing, "keras.random")):
        with distributed():
            model = Trained(loss_of)
            model.compile("sgd")
            rows, targets = ROWS.astype("float32"), TARGETS.astype("float32")
            told = warnings_of_ranks(partial(model.fit, rows, targets, 8, verbose=0))[0]
            assert "was not compared" in told and text in told, told


@sizes(2)
def case_a_part_of_a_batch_is_compared_if_memory_is_missing():
    largest, MemoryGuard.largest = MemoryGuard.largest, lambda guard, rows: 6
    try:
        with float64(), distributed():
            model = of_layers(Layer(COUPLED["mean"]))
            require_error(
                lambda: model.fit(ROWS, TARGETS, 8, verbose=0), "differs from a step of one process"
            )
            model = of_layers()
            model.fit(ROWS, TARGETS, 8, verbose=0)
    finally:
        MemoryGuard.largest = largest


@sizes(2)
def case_verify_is_checked():
    for verify in ("always", 0, -1, True):
        assert "verify" in outcome(partial(tfscale.distribute, verify=verify))
