"""Groups that average: equal to single processes averaged by hand, float64, 1e-10."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import OPTIMIZERS, TOLERANCE, dense_model, float64, inputs_of

BATCH, STEPS = 24, 10


def train_by_hand(make, groups, interval, *, gradients=False, outer=None, average_state=False):
    """Train each group's model in this process and average them; return the average."""
    x, y = samples()
    models = []
    for _ in range(groups):
        keras.utils.set_random_seed(3)
        model = dense_model()
        model.compile(make(), loss="mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    common = [np.array(v.numpy()) for v in models[0].trainable_variables]
    sums = [[0.0] * len(common) for _ in models]
    outer_variables = [keras.Variable(c, dtype="float64") for c in common]
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        for i, model in enumerate(models):
            part = BATCH // groups
            own = slice(batch.start + i * part, batch.start + (i + 1) * part)
            if gradients:
                for j, g in enumerate(gradients_of(model, x[own], y[own])):
                    sums[i][j] = sums[i][j] + g
            model.train_on_batch(x[own], y[own])
        if (step + 1) % interval:
            continue
        if gradients:
            rate = float(models[0].optimizer.learning_rate.numpy())
            mean = [np.mean([s[j] for s in sums], axis=0) for j in range(len(common))]
            common = [c - rate * m for c, m in zip(common, mean, strict=True)]
            sums = [[0.0] * len(common) for _ in models]
        elif outer is not None:
            mean = mean_of([m.trainable_variables for m in models])
            outer.apply(
                [v.value - m for v, m in zip(outer_variables, mean, strict=True)], outer_variables
            )
            common = [v.numpy() for v in outer_variables]
        else:
            common = mean_of([m.trainable_variables for m in models])
        if average_state:
            state = mean_of([m.optimizer.variables for m in models])
            for model in models:
                for variable, value in zip(model.optimizer.variables, state, strict=True):
                    variable.assign(value)
        for model in models:
            for variable, value in zip(model.trainable_variables, common, strict=True):
                variable.assign(value)
    return mean_of([m.trainable_variables for m in models])


def gradients_of(model, x, y):
    """Return the gradients of one batch."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=tf.constant(y), y_pred=model(x, training=True))
    return [g.numpy() for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]


def mean_of(lists):
    """Average variables, position by position."""
    return [
        np.mean([np.asarray(v.numpy(), np.float64) for v in same], axis=0)
        for same in zip(*lists, strict=True)
    ]


def samples():
    """Return the same samples on all ranks."""
    x = inputs_of(dense_model)
    return x, np.random.default_rng(8).normal(size=(len(x), 3))


def train(make, strategy, epochs=1, callbacks=()):
    """Train with local SGD; return the model."""
    keras.utils.set_random_seed(3)
    x, y = samples()
    model = dense_model()
    model.compile(hvd.DistributedOptimizer(make(), exchange=strategy), loss="mse")
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[start, *callbacks])
    return model


def compare(model, expected):
    """Weights are as expected and equal on all ranks."""
    ours = [v.numpy() for v in model.trainable_variables]
    for mine, single in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, single, rtol=0, atol=TOLERANCE)
    for mine, *others in zip(ours, *tfscale.allgather_object(ours), strict=True):
        for other in others:
            np.testing.assert_array_equal(mine, other)


WITHIN = {
    "allreduce": "allreduce",
    "chunked": tfscale.Chunked(first_chunk_layers=1),
    "sharded": tfscale.Sharded(),
    "sharded small": tfscale.Sharded(bucket_mb=1e-4),
}


@sizes(2, 4, timeout_s=400)
def case_groups_equal_single_processes():
    with float64():
        for within in WITHIN.values():
            for interval in (1, 3, 4):
                strategy = tfscale.LocalSGD(groups=2, interval=interval, within=within)
                model = train(OPTIMIZERS["momentum"], strategy)
                compare(model, train_by_hand(OPTIMIZERS["momentum"], 2, interval))


@sizes(2, 3, timeout_s=120)
def case_every_step_with_sgd_is_synchronous():
    with float64():
        n = tfscale.size()
        model = train(OPTIMIZERS["sgd"], tfscale.LocalSGD(groups=n, interval=1))
        compare(model, train_by_hand(OPTIMIZERS["sgd"], 1, 1))


@sizes(2, 4, timeout_s=300)
def case_variants():
    """SASGD, an outer optimizer, averaged state."""

    def outer():
        return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)

    with float64():
        for within in ("allreduce", tfscale.Sharded()):
            strategy = tfscale.LocalSGD(2, 3, within, average="gradients")
            expected = train_by_hand(OPTIMIZERS["adam"], 2, 3, gradients=True)
            compare(train(OPTIMIZERS["adam"], strategy), expected)
            strategy = tfscale.LocalSGD(2, 3, within, outer=outer())
            expected = train_by_hand(OPTIMIZERS["momentum"], 2, 3, outer=outer())
            compare(train(OPTIMIZERS["momentum"], strategy), expected)
            strategy = tfscale.LocalSGD(2, 3, within, average_state=True)
            expected = train_by_hand(OPTIMIZERS["adam"], 2, 3, average_state=True)
            compare(train(OPTIMIZERS["adam"], strategy), expected)
