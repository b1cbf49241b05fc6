"""`tfscale.distribute` with steps of one's own, and with fewer rows than ranks.

Vectors as targets of tapes, random numbers for several blocks of rows, metrics whose states do not
add, results of metrics under other names. As in `cases_distribute.py`, each model first trains as
one process would.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64, outcome, require_error
from tests.parallel.cases_distribute import (
    ROWS,
    SEED,
    TARGETS,
    distributed,
    require_equal_runs,
    results,
)
from tfscale.testing import require_close

keras_random = keras.random
LABELS = (ROWS.sum(axis=1) > 0).astype("float64")


class Stepper(keras.Model):
    """A model of several nets, each trained by a step of its own: a function (model, net, rows)."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.nets = [step_net() for _, step_net in steps]
        self.seeds = keras_random.SeedGenerator(7)
        self.numbers = tf.random.Generator.from_seed(7)

    def train_step(self, rows):
        pairs = []
        for (step, _), net in zip(self.steps, self.nets, strict=True):
            gradients = step(self, net, rows)
            pairs += zip(gradients, net.trainable_weights, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"norm": tf.reduce_mean(rows**2)}


def dense(units=3, **options):
    return keras.Sequential([keras.Input((5,)), layers.Dense(units, activation="tanh", **options)])


def fit_steps(steps, batches=None, **options):
    """Return the variables of each net after some batches, the last with fewer rows than ranks."""
    model = Stepper(steps)
    model.compile(keras.optimizers.Adam(0.01), **options)
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(9) if batches is None else batches
    history = model.fit(batches, epochs=2, verbose=0)
    arrays = [np.array(history.history["norm"])]
    return [v.numpy() for net in model.nets for v in net.variables] + arrays


def fit_own_step():
    """Train a model that was given its step; return weights, losses and rows of each trace."""
    model = dense()
    n_rows = []

    def step(rows):
        n_rows.append(rows.shape[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(row_losses(model, rows))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"norm": loss}

    model.compile(keras.optimizers.SGD(0.1))
    model.train_step = step
    batches = tf.data.Dataset.from_tensor_slices(ROWS).batch(6, drop_remainder=True)
    history = model.fit(batches, epochs=2, verbose=0)
    return [v.numpy() for v in model.variables] + [np.array(history.history["norm"])], n_rows


@sizes(2, 3, timeout_s=120)
def case_a_step_given_to_the_model():
    """Each rank computes its rows with it."""
    with float64():
        keras.utils.set_random_seed(SEED)
        alone, _ = fit_own_step()
        keras.utils.set_random_seed(SEED)
        with distributed():
            ours, n_rows = fit_own_step()
    require_close(ours, alone)
    assert n_rows and n_rows[-1] != 6, n_rows


# Targets of tapes.


def row_losses(net, x):
    return tf.reduce_sum(tf.square(net(x) - x[:, :3]), axis=-1)


def vector(model, net, x):
    with tf.GradientTape() as tape:
        loss = row_losses(net, x)
    return tape.gradient(loss, net.trainable_weights)


def matrix_and_mean(model, net, x):
    with tf.GradientTape() as tape:
        matrix = tf.abs(net(x) - 1.0)
        mean = tf.reduce_mean(row_losses(net, x))
    return tape.gradient({"matrix": matrix, "mean": mean}, net.trainable_weights)


def listed(model, net, x):
    with tf.GradientTape(persistent=True) as tape:
        losses = [row_losses(net, x), row_losses(net, -x)[:, tf.newaxis]]
    first = tape.gradient(losses, net.trainable_weights)
    second = tape.gradient(losses[1], net.trainable_weights)
    return [a + b for a, b in zip(first, second, strict=True)]


def output_gradients(model, net, x):
    with tf.GradientTape() as tape:
        loss = row_losses(net, x)
    return tape.gradient(loss, net.trainable_weights, output_gradients=x[:, 0])


def stacked_means(model, net, x):
    with tf.GradientTape() as tape:
        outputs = net(x)
        loss = 2.0 * tf.stack([tf.reduce_mean(outputs[:, i] ** 2) for i in range(3)])
    return tape.gradient(loss, net.trainable_weights)


def means(model, net, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(row_losses(net, x)) + keras.ops.mean(net(x))
        loss += tf.add_n([tf.nn.l2_loss(v) for v in net.trainable_weights])
    return tape.gradient(loss, net.trainable_weights)


def joined(model, net, x):
    """Real and fake samples in one vector of losses."""
    noise = keras_random.normal((tf.shape(x)[0], 5), seed=model.seeds)
    with tf.GradientTape() as tape:
        both = tf.concat([noise, x], 0)
        signs = tf.concat([tf.ones_like(x[:, :1]), -tf.ones_like(x[:, :1])], 0)
        loss = tf.nn.softplus(signs * net(both))
    return tape.gradient(loss, net.trainable_weights)


def gradient_penalty(model, net, x):
    """Gradients of a vector for the rows themselves stay as they are."""
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = net(x)
        slopes = inner.gradient(outputs, x)
        loss = tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)
    gradients = tape.gradient(loss, net.trainable_weights)
    weights = net.trainable_weights
    return [tf.zeros_like(w) if g is None else g for g, w in zip(gradients, weights, strict=True)]


def of_weights_and_rows(model, net, x):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = row_losses(net, x)
        slopes, *of_weights = inner.gradient(outputs, [x, *net.trainable_weights])
        loss = tf.reduce_mean(slopes**2)
    of_penalty = tape.gradient(loss, net.trainable_weights)
    return [a if b is None else a + b for a, b in zip(of_weights, of_penalty, strict=True)]


def embedded(model, net, x):
    """Sparse gradients."""
    with tf.GradientTape() as tape:
        indices = tf.cast(tf.abs(x) * 3.0, tf.int32) % 7
        loss = tf.reduce_sum(net(indices) ** 2, axis=(1, 2))
    return tape.gradient(loss, net.trainable_weights)


def jacobian(model, net, x):
    with tf.GradientTape(persistent=True) as tape:
        loss = row_losses(net, x)
    of_rows = tape.jacobian(loss, net.trainable_weights)
    return [tf.reduce_mean(each, axis=0) for each in of_rows]


def embedding():
    return keras.Sequential([keras.Input((5,)), layers.Embedding(7, 2)])


VECTORS = (vector, matrix_and_mean, listed, output_gradients, stacked_means, means, joined)
PENALTIES = (gradient_penalty, of_weights_and_rows, jacobian)
TARGETS_OF_TAPES = [*((step, dense) for step in VECTORS + PENALTIES), (embedded, embedding)]


@sizes(2, 3, timeout_s=240)
def case_vectors_are_targets_of_tapes():
    fixed = tf.data.Dataset.from_tensor_slices(ROWS).batch(8, drop_remainder=True)
    some = [(step, dense) for step in (vector, stacked_means)]
    with float64():
        require_equal_runs(lambda: fit_steps(TARGETS_OF_TAPES))
        require_equal_runs(lambda: fit_steps(some, fixed))
        require_equal_runs(lambda: fit_steps(some[:1], run_eagerly=True))


class Adding(layers.Layer):
    """A loss for each row, as those of CTC, and a mean."""

    def call(self, x):
        self.add_loss(keras.ops.sum(x**2, axis=1, keepdims=True))
        self.add_loss(0.1 * keras.ops.mean(keras.ops.abs(x)))
        return x


@sizes(2, 3)
def case_losses_that_layers_add_are_vectors():
    def train():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3), Adding(), layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        fitted = model.fit(ROWS, TARGETS, 9, epochs=2, validation_split=0.2, verbose=0)
        return results(model, fitted)

    with float64():
        require_equal_runs(train)


# Random numbers. Each draw trains a net of its own, so that all are seen in one model.


def joined_labels(x, seed):
    labels = tf.concat([tf.ones_like(x[:, :1]), tf.zeros_like(x[:, :1])], 0)
    return tf.concat([x, -x], 0), keras_random.uniform(tf.shape(labels), seed=seed)


def three_blocks(x, seed):
    both = keras.ops.concatenate([x, 2 * x, 3 * x], axis=0)
    return both, keras_random.normal(keras.ops.shape(both), seed=seed)


def tiled(x, seed):
    both = tf.tile(x, [2, 1])
    return both, keras_random.uniform(tf.shape(both), seed=seed)


def computed_number(x, seed):
    return tf.concat([x, -x], 0), keras_random.normal((2 * tf.shape(x)[0], 1), seed=seed)


def repeated(x, seed):
    both = tf.repeat(x, 3, axis=0)
    return both, keras_random.normal(tf.shape(both), seed=seed)


def merged_axes(x, seed):
    both = tf.reshape(tf.stack([x, x + 1.0], axis=1), [-1, 5])
    return both, keras_random.uniform(tf.shape(both), seed=seed)


def rows_only(x, seed):
    return x, keras_random.truncated_normal((tf.shape(x)[0], 2), seed=seed)


def joined_dropout(x, seed):
    both = tf.concat([x, -x], 0)
    return both, keras_random.dropout(both, 0.4, seed=seed)


def joined_categories(x, seed):
    both = tf.concat([x, -x], 0)
    return both, tf.cast(keras_random.categorical(both, 2, seed=seed), x.dtype)


def integers(x, seed):
    both = tf.concat([x, x + 1.0], 0)
    drawn = keras_random.randint(tf.shape(both)[:1], 0, 9, seed=seed)
    return both, tf.cast(drawn, x.dtype)[:, tf.newaxis]


def common(x, seed):
    drawn = keras_random.normal((4, 5), seed=seed)
    return x, tf.ones_like(x) * tf.reduce_sum(drawn)


def weights_noise(x, seed):
    """A static shape that is a multiple of any rank's rows by chance."""
    weights = tf.zeros((12, 5), x.dtype)
    drawn = keras_random.normal(tf.shape(weights), seed=seed)
    return x, tf.ones_like(x) * tf.reduce_sum(drawn)


def common_length(x, seed):
    """A length that is not known while tracing, and is not that of rows."""
    length = tf.cast(tf.size(x[0]) + 18, tf.int32)  # 23: no multiple of rows, but for one
    drawn = keras_random.normal((length, 2), seed=seed)
    return x, tf.ones_like(x) * tf.reduce_sum(drawn)


# TensorFlow's own draws continue from a state of each op.


def normals(x, seed):
    both = tf.concat([x, -x], 0)
    wide = tf.random.normal((tf.shape(both)[0], 2), 1.0, 2.0, x.dtype)
    return both, wide + tf.random.truncated_normal(tf.shape(both)[:1], dtype=x.dtype)[:, None]


def uniforms(x, seed):
    numbers = tf.random.uniform((tf.shape(x)[0], 3), 0, 7, tf.int64)
    return x, tf.cast(numbers, x.dtype) + tf.random.uniform(tf.shape(x[:, :1]), dtype=x.dtype)


def counts(x, seed):
    gammas = tf.random.gamma(tf.shape(x)[:1], [0.5, 2.0], dtype=x.dtype)
    return x, gammas + tf.random.poisson(tf.shape(x)[:1], [4.0, 1.0], x.dtype)


def categories(x, seed):
    return x, tf.cast(tf.random.categorical(x, 2), x.dtype)


def dropped(x, seed):
    both = tf.repeat(x, 2, axis=0)
    return both, tf.nn.dropout(both, 0.4)


def common_normal(x, seed):
    return x, tf.ones_like(x) * tf.random.normal((1, 5), dtype=x.dtype)


TENSORFLOW_DRAWS = (normals, uniforms, counts, categories, dropped, common_normal)
BLOCKS = (joined_labels, three_blocks, tiled, computed_number, joined_categories)
DRAWS = (*BLOCKS, repeated, merged_axes, rows_only, joined_dropout, integers, common)


def noisy(draw):
    def step(model, net, x):
        with tf.GradientTape() as tape:
            both, noise = draw(x, model.seeds)
            loss = tf.reduce_mean((net(both) - tf.reduce_mean(noise, 1, keepdims=True)) ** 2)
        return tape.gradient(loss, net.trainable_weights)

    return step, lambda: dense(1)


def by_generator(model, net, x):
    drawn = model.numbers.normal(shape=(tf.shape(x)[0], 2), dtype=x.dtype)
    drawn += model.numbers.uniform([tf.shape(x)[0], 1], dtype=x.dtype)
    return noisy(lambda x, _: (x, drawn))[0](model, net, x)


@sizes(2, 3, timeout_s=240)
def case_random_numbers_for_several_blocks_of_rows():
    fixed = tf.data.Dataset.from_tensor_slices(ROWS).batch(6, drop_remainder=True)
    in_tens = tf.data.Dataset.from_tensor_slices(ROWS[:30]).batch(10)
    static = (joined_labels, repeated, weights_noise, rows_only, joined_dropout, joined_categories)
    with float64():
        for draws, batches in (
            (DRAWS, None),
            (TENSORFLOW_DRAWS, None),
            (static, fixed),
            ((common_length,), in_tens),
        ):
            steps = [noisy(draw) for draw in draws] + [(by_generator, lambda: dense(1))]
            require_equal_runs(lambda steps=steps, batches=batches: fit_steps(steps, batches))


# Metrics.


class Stateful(keras.metrics.Metric):
    """A metric with a state of some shape, which a function changes."""

    def __init__(self, change, shape=(), name=None):
        super().__init__(name=name or change.__name__)
        self.change = change
        self.v = self.add_variable(shape, "zeros", name="v")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.change(self.v, tf.cast(y_true, y_pred.dtype) - y_pred)

    def result(self):
        return keras.ops.sum(self.v)


def largest(v, error):
    v.assign(keras.ops.maximum(v, keras.ops.max(keras.ops.abs(error))))


def smallest(v, error):
    v.assign(tf.minimum(tf.reduce_min(error), v))


def largest_of_each_output(v, error):
    v.assign(tf.maximum(v, tf.reduce_max(error, axis=0)))


def added(v, error):
    v.assign_add(tf.reduce_sum(error**2))


def subtracted(v, error):
    v.assign(v - keras.ops.sum(error))


def constant(v, error):
    pass


def last(v, error):
    v.assign(tf.reduce_mean(error))


def moving_average(v, error):
    v.assign(0.9 * v + 0.1 * tf.reduce_mean(error))


def best_batch(v, error):
    v.assign(tf.maximum(v, tf.reduce_mean(error)))


def running_mean(v, error):
    v.assign_add(0.1 * (tf.reduce_mean(error) - v))


def evaluated(*metrics, **options):
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
    model.compile("sgd", "mse", metrics=list(metrics), **options)
    history = model.fit(ROWS, TARGETS, batch_size=9, epochs=2, verbose=0).history
    tested = model.evaluate(ROWS[:19], TARGETS[:19], batch_size=9, verbose=0, return_dict=True)
    on_batch = model.train_on_batch(ROWS[:1], TARGETS[:1], return_dict=True)
    return [np.array(v) for logs in (history, tested, on_batch) for v in logs.values()]


@sizes(2, 3, timeout_s=240)
def case_metrics_whose_states_do_not_add():
    kept = (largest, smallest, added, subtracted, constant)

    def compiled(**options):
        return evaluated(
            *[Stateful(change) for change in kept],
            Stateful(largest_of_each_output, (2,)),
            **options,
        )

    with float64():
        require_equal_runs(compiled)
        require_equal_runs(lambda: compiled(run_eagerly=True))
        for change in (last, moving_average, best_batch, running_mean):
            with distributed():
                texts = (f"metric '{change.__name__}'", "variable 'v'", "tfscale_reduce")
                require_error(lambda change=change: evaluated(Stateful(change)), *texts)

        class Declared(Stateful):
            tfscale_reduce = {"v": "mean"}  # noqa: RUF012

        with distributed(verify="off"):  # a mean of last values is no value of one process
            assert outcome(lambda: evaluated(Declared(last))) == "no error"
    model = keras.Sequential([keras.Input((5,)), layers.Dense(2)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.compile(model.optimizer, "mse", metrics=[Stateful(last)])
    before = [v.numpy() for v in model.weights]
    own = np.full((4, 5), 1.0 + tfscale.rank()), np.ones((4, 2))
    callbacks = [tfscale.callbacks.Synchronize()]
    require_error(
        lambda: model.fit(*own, verbose=0, callbacks=callbacks), "ConfigError", "metric 'last'"
    )
    require_close([v.numpy() for v in model.weights], tfscale.broadcast_object(before))


class Renaming(keras.Model):
    """Returns results under names of its own, those of two metrics nearly or exactly equal."""

    def __init__(self):
        super().__init__()
        self.net = dense(5)
        self.total, self.part = keras.metrics.Mean("total_loss"), keras.metrics.Mean("part_loss")
        self.rows = keras.metrics.Sum("rows")

    def train_step(self, x):
        x = x[0] if isinstance(x, tuple) else x
        with tf.GradientTape() as tape:
            part = tf.reduce_mean((self.net(x) - x) ** 2)
        weights = self.net.trainable_weights
        self.optimizer.apply(tape.gradient(part, weights), weights)
        return self.logs(x, part)

    def test_step(self, x):
        logs = self.logs(x, tf.reduce_mean((self.net(x) - x) ** 2))
        return {"inner": {"a": logs["loss"]}, "part_loss": logs["part_loss"]}

    def logs(self, x, part):
        self.total.update_state(part * (1 + 3e-6))
        self.part.update_state((self.net(x) - x) ** 2)
        self.rows.update_state(tf.ones_like(x[:, 0]))
        # "rows" is the metric of that name here, and "total_loss" is none.
        logs = {"loss": self.total.result(), "part_loss": self.part.result()}
        return logs | {"n": self.rows.result(), "total_loss": part}


def renamed(**options):
    model = Renaming()
    model.compile(keras.optimizers.SGD(0.1), **options)
    data = tf.data.Dataset.from_tensor_slices(ROWS)
    history = model.fit(
        data.batch(9), epochs=2, verbose=0, validation_data=data.take(20).batch(6)
    ).history
    assert abs(history["loss"][-1] / history["part_loss"][-1] - 1) > 1e-6
    assert history["n"] == [37.0, 37.0]
    logs = [*history.items(), *model.evaluate(data.batch(7), return_dict=True).items()]
    logs += model.train_on_batch(ROWS[:5], return_dict=True).items()
    return [np.array(value) for _, value in sorted(logs, key=lambda item: item[0])]


@sizes(2, 3, timeout_s=240)
def case_results_of_metrics_have_other_names():
    with float64():
        for options in ({"run_eagerly": True}, {"steps_per_execution": 2}):
            require_equal_runs(lambda options=options: renamed(**options))


# Ranks without rows.


def sequence_model(*hidden, units=2, shape=(6, 5), loss="mse", metrics=()):
    model = keras.Sequential([keras.Input(shape), *hidden, layers.Dense(units, "sigmoid")])
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def few_rows(model, *arrays):
    """Train, test and predict with batches of two rows and of one."""
    batches = tf.data.Dataset.from_tensor_slices(arrays).batch(2)
    found = results(model, model.fit(batches, epochs=2, verbose=0))
    tested = model.evaluate(batches, verbose=0, return_dict=True)
    found += [np.array(value) for value in tested.values()]
    return [*found, model.predict(arrays[0], batch_size=2, verbose=0)]


@sizes(2, 3, timeout_s=240)
def case_ranks_without_rows():
    """Layers and losses that need a row, statistics, metrics, and numbers of a single batch."""
    x = np.random.default_rng(1).normal(size=(3, 6, 5))
    y = np.random.default_rng(2).integers(0, 2, (3, 2)).astype("float64")

    def recurrent():
        kinds = keras.metrics.AUC, keras.metrics.F1Score, keras.metrics.R2Score
        model = sequence_model(layers.LSTM(3), metrics=["accuracy", *(kind() for kind in kinds)])
        return few_rows(model, x, y)

    def normalised():
        hidden = layers.Conv1D(3, 2), layers.BatchNormalization(), layers.Flatten()
        metrics = Stateful(largest), Stateful(added)
        model = sequence_model(*hidden, layers.Dropout(0.3), metrics=metrics)
        found = few_rows(model, x, y, np.array([0.5, 2.0, 1.0]))
        for rows in (slice(1), slice(1, 3)):
            logs = model.train_on_batch(x[rows], y[rows], return_dict=True)
            found += [np.array(value) for value in logs.values()]
        return found

    def masked():
        hidden = layers.Dense(3, activity_regularizer="l2", kernel_regularizer="l2")
        loss = keras.losses.MeanSquaredError(reduction="sum")
        embedded = layers.Embedding(9, 4, mask_zero=True)
        model = sequence_model(embedded, layers.SimpleRNN(3), hidden, shape=(6,), loss=loss)
        return few_rows(model, np.array([[3, 4, 4, 0, 0, 0], [1, 2, 0, 0, 0, 0], [5] * 6]), y)

    def overlap():
        return few_rows(sequence_model(layers.Flatten(), loss=keras.losses.Dice()), x, y)

    def aligned():
        model = keras.Sequential([keras.Input((6, 5)), layers.Dense(4)])
        model.compile("adam", keras.losses.CTC())
        return few_rows(model, x, np.array([[1, 2, 0], [3, 0, 0], [1, 1, 2]]))

    with float64():
        for train in (recurrent, normalised, masked, overlap):
            require_equal_runs(train)
        require_equal_runs(aligned, atol=1e-6)  # CTC computes in float32
