"""Local SGD on batches that the ranks do not divide: each sample counts alike in an average.

A rank weighs the mean gradient of its rows by rows * size / rows of the batch. A group's update is
then that of its rows' share in the whole batch, and the mean over groups that of the batch. With 97
samples the last batch of 12 has one row, so all ranks but the first have none.
"""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64
from tests.parallel.local_sgd_reference import mean_of
from tfscale.callbacks import BatchSizeSchedule, Synchronize
from tfscale.data import GlobalBatches
from tfscale.testing import require_close, require_equal_ranks

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(101, 4)), RNG.normal(size=(101, 3))
BATCH, RATE, EPOCHS = 12, 0.1, 2


def model_of(make_optimizer=lambda inner: inner, momentum=0.0):
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(6, "tanh")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(3)])
    model.compile(make_optimizer(keras.optimizers.SGD(RATE, momentum=momentum)), "mse")
    return model


def rows_of_ranks(n, size, batch):
    """Return the rows of each rank in each batch of an epoch; the first ranks have one more."""
    return [np.array_split(np.arange(n)[i : i + batch], size) for i in range(0, n, batch)]


def sum_of_gradients(model, rows):
    """Return the sum over rows of the gradient of their losses, 0 without rows."""
    variables = [v.value for v in model.trainable_variables]
    if not len(rows):
        return [tf.zeros_like(v) for v in variables]
    with tf.GradientTape() as tape:
        errors = tf.square(model(tf.constant(X[rows])) - Y[rows])
        loss = tf.reduce_sum(tf.reduce_mean(errors, axis=-1))
    return tape.gradient(loss, variables)


def train_by_hand(n, groups, interval, momentum=0.0, batches=(BATCH, BATCH)):
    """Return the mean of the groups' parameters after training in one process."""
    models, size = [model_of(momentum=momentum) for _ in range(groups)], tfscale.size()
    steps = [rows for batch in batches for rows in rows_of_ranks(n, size, batch)]
    for step, rows in enumerate(steps, 1):
        for group, model in enumerate(models):
            of_group = rows[group * size // groups : (group + 1) * size // groups]
            # The mean over the batch, as far as the group has its rows, times the groups.
            factor = groups / sum(map(len, rows))
            sums = sum_of_gradients(model, np.concatenate(of_group))
            model.optimizer.apply([factor * s for s in sums], model.trainable_variables)
        if step % interval == 0:
            mean = mean_of([model.trainable_variables for model in models])
            for model in models:
                set_parameters(model, mean)
    return mean_of([model.trainable_variables for model in models])


def set_parameters(model, values):
    for variable, value in zip(model.trainable_variables, values, strict=True):
        variable.assign(value)


def fit(data, groups, interval, momentum=0.0, callbacks=(), **options):
    exchange = tfscale.LocalSGD(groups, interval, **options)
    model = model_of(lambda inner: tfscale.DistributedOptimizer(inner, exchange=exchange), momentum)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Synchronize(), *callbacks])
    require_equal_ranks(model.trainable_variables)
    return model


def data_of(n):
    return GlobalBatches(X[:n], Y[:n], batch_size=BATCH, shuffle=False, drop_remainder=False)


@sizes(2, 3, 4, timeout_s=240)
def case_each_sample_counts_alike_in_averages_of_groups():
    groups = 2 if tfscale.size() % 2 == 0 else tfscale.size()
    with float64():
        for n, interval, momentum, within in (
            (97, 3, 0.0, "allreduce"),
            (101, 3, 0.9, "allreduce"),
            (97, 3, 0.9, tfscale.Sharded()),
        ):
            model = fit(data_of(n), groups, interval, momentum, within=within)
            expected = train_by_hand(n, groups, interval, momentum)
            require_close(model.trainable_variables, expected, atol=1e-12)


@sizes(2, 3, timeout_s=240)
def case_an_average_after_each_step_trains_as_one_process():
    size = tfscale.size()
    with float64():
        for n in (97, 101):
            alone = model_of()
            alone.fit(X[:n], Y[:n], batch_size=BATCH, shuffle=False, epochs=EPOCHS, verbose=0)
            model = fit(data_of(n), size, 1, within="allreduce")
            require_close(model.trainable_variables, alone.trainable_variables, atol=1e-12)


@sizes(2, 3, timeout_s=240)
def case_ranks_cut_their_rows_of_batches_of_a_dataset():
    rows = tf.data.Dataset.from_tensor_slices((X[:97], Y[:97])).batch(BATCH)
    with float64():
        grown = BatchSizeSchedule(rows, {1: 2 * BATCH})
        model = fit(rows, tfscale.size(), 3, callbacks=[grown], within="allreduce")
        expected = train_by_hand(97, tfscale.size(), 3, batches=(BATCH, 2 * BATCH))
        require_close(model.trainable_variables, expected, atol=1e-12)
