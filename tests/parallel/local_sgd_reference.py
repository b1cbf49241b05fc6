"""Local SGD by hand: single processes whose models are averaged in NumPy."""

import keras
import numpy as np
import tensorflow as tf

from tests.parallel.cases_equality import OPTIMIZERS, dense_model, inputs_of

BATCH, STEPS = 24, 10


def models_for(groups, make):
    """Return models that all start alike."""
    models = []
    for _ in range(groups):
        keras.utils.set_random_seed(3)
        model = dense_model()
        model.compile(make(), loss="mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    return models


def own_part(step, group, groups):
    """Return the samples of a group in a step."""
    part = BATCH // groups
    begin = step * BATCH + group * part
    return slice(begin, begin + part)


def set_all(models, values, of=lambda model: model.trainable_variables):
    """Give all models the same values."""
    for model in models:
        for variable, value in zip(of(model), values, strict=True):
            variable.assign(value)


def train_by_hand(make, groups, interval, *, gradients=False, outer=None, average_state=False):
    """Train each group's model in this process and average them; return the average."""
    x, y = samples()
    models = models_for(groups, make)
    common = [np.array(v.numpy()) for v in models[0].trainable_variables]
    sums = [0.0] * len(common)  # over groups and steps
    outer_variables = [keras.Variable(c, dtype="float64") for c in common]
    for step in range(STEPS):
        for i, model in enumerate(models):
            own = own_part(step, i, groups)
            if gradients:
                new = gradients_of(model, x[own], y[own])
                sums = [total + g for total, g in zip(sums, new, strict=True)]
            model.train_on_batch(x[own], y[own])
        if (step + 1) % interval:
            continue
        mean = mean_of([m.trainable_variables for m in models])
        if gradients:
            rate = float(models[0].optimizer.learning_rate.numpy())
            common = [c - rate * t / groups for c, t in zip(common, sums, strict=True)]
            sums = [0.0] * len(common)
        elif outer is not None:
            changes = [v.value - m for v, m in zip(outer_variables, mean, strict=True)]
            outer.apply(changes, outer_variables)
            common = [v.numpy() for v in outer_variables]
        else:
            common = mean
        if average_state:
            state = mean_of([m.optimizer.variables for m in models])
            set_all(models, state, lambda model: model.optimizer.variables)
        set_all(models, common)
    return mean_of([m.trainable_variables for m in models])


def gradients_of(model, x, y):
    """Return the gradients of one batch."""
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


def by_hand_over_epochs(epochs, first_local, interval, groups):
    """Train together for some epochs, then apart; return the average."""
    return by_hand_for_steps(epochs * STEPS, interval, groups, first_local)


def by_hand_for_steps(n_steps, interval, groups, first_local=0):
    """Train for some steps, of which those of the first epochs are together; return the average."""
    x, y = samples()
    models = models_for(groups, OPTIMIZERS["momentum"])
    since = 0
    for n in range(n_steps):
        epoch, step = divmod(n, STEPS)
        is_local = epoch >= first_local
        for i, model in enumerate(models):
            batch = slice(step * BATCH, (step + 1) * BATCH)
            own = own_part(step, i, groups) if is_local else batch
            model.train_on_batch(x[own], y[own])
        since = since + 1 if is_local else 0
        if since == interval:
            since = 0
            set_all(models, mean_of([m.trainable_variables for m in models]))
    return mean_of([m.trainable_variables for m in models])


def distance_by_hand(n_steps):
    """Return D of two single processes after some steps."""
    x, y = samples()
    weights = []
    for i, model in enumerate(models_for(2, OPTIMIZERS["sgd"])):
        for step in range(n_steps):
            own = own_part(step, i, 2)
            model.train_on_batch(x[own], y[own])
        weights.append(np.concatenate([v.numpy().ravel() for v in model.trainable_variables]))
    mean = np.mean(weights, axis=0)
    return np.mean([np.linalg.norm(w - mean) for w in weights])
