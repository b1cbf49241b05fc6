"""Local SGD by hand: single processes whose models are averaged in NumPy."""

import keras
import numpy as np
import tensorflow as tf

from tests.parallel.cases_equality import OPTIMIZERS, dense_model, inputs_of

BATCH, STEPS = 24, 10


def models_for(groups, make):
    models = []
    for _ in range(groups):
        keras.utils.set_random_seed(3)
        model = dense_model()
        model.compile(make(), loss="mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    return models


def own_part(step, group, groups):
    part = BATCH // groups
    begin = step * BATCH + group * part
    return slice(begin, begin + part)


def set_all(models, values, of=lambda model: model.trainable_variables):
    for model in models:
        for variable, value in zip(of(model), values, strict=True):
            variable.assign(value)


def train_by_hand(make, groups, interval, *, gradients=False, average_state=False):
    """Train each group's model in this process and average them; return the average."""
    x, y = samples()
    models = models_for(groups, make)
    common = [np.array(v.numpy()) for v in models[0].trainable_variables]
    sums = [0.0] * len(common)  # over groups and steps
    for step in range(STEPS):
        for i, model in enumerate(models):
            own = own_part(step, i, groups)
            if gradients:
                new = gradients_of(model, x[own], y[own])
                sums = [total + g for total, g in zip(sums, new, strict=True)]
            model.train_on_batch(x[own], y[own])
        if (step + 1) % interval:
            continue
        if gradients:
            rate = float(models[0].optimizer.learning_rate.numpy())
            common = [c - rate * t / groups for c, t in zip(common, sums, strict=True)]
            sums = [0.0] * len(common)
        else:
            common = mean_of([m.trainable_variables for m in models])
        if average_state:
            state = mean_of([m.optimizer.variables for m in models])
            set_all(models, state, lambda model: model.optimizer.variables)
        set_all(models, common)
    return mean_of([m.trainable_variables for m in models])


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(y=tf.constant(y), y_pred=model(x, training=True))
    return [g.numpy() for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]


def mean_of(lists):
    return [
        np.mean([np.asarray(v.numpy(), np.float64) for v in same], axis=0)
        for same in zip(*lists, strict=True)
    ]


def samples():
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


class ByHand:
    """Single processes, one for each group, whose models are averaged in NumPy."""

    def __init__(self, make, groups, strategy):
        self.strategy, self.groups = strategy, groups
        self.models = models_for(groups, make)
        own = [m.trainable_variables for m in self.models]
        self.variables = list(zip(*own, strict=True))  # of all groups, by position
        self.common = [keras.Variable(v[0].numpy(), dtype="float64") for v in self.variables]
        self.places = fragments_of(own[0], strategy.fragments)
        self.outers = [self.outer_for(places) for places in self.places]
        self.under_way = {}  # step of the merge and what was sent, by fragment
        self.square, self.distances = np.zeros(groups), []

    def outer_for(self, places):
        given = self.strategy.outer
        if given is not None:
            given = keras.optimizers.SGD.from_config(given.get_config())
            given.build([self.common[i] for i in places])
        return given

    def train(self, n_steps):
        x, y = samples()
        n, interval = len(self.places), self.strategy.interval
        for step in range(n_steps):
            for g, model in enumerate(self.models):
                own = own_part(step % STEPS, g, self.groups)
                model.train_on_batch(x[own], y[own])
            for f, places in enumerate(self.places):
                if self.under_way.get(f, [None])[0] == step:
                    self.merge(f)
                if (step + 1) % interval == f * interval // n:
                    sent = {i: [v.numpy() for v in self.variables[i]] for i in places}
                    self.under_way[f] = step + self.strategy.overlap, sent
                    if self.strategy.overlap == 0:
                        self.merge(f)
        return mean_of([m.trainable_variables for m in self.models])

    def merge(self, f):
        sent = self.under_way.pop(f)[1]
        means = {i: np.mean(values, axis=0) for i, values in sent.items()}
        common = [self.common[i] for i in sent]
        if self.outers[f] is not None:
            changes = [c.value - m for c, m in zip(common, means.values(), strict=True)]
            self.outers[f].apply(changes, common)
        else:
            for variable, mean in zip(common, means.values(), strict=True):
                variable.assign(mean)
        weight = self.strategy.merge
        for i, values in sent.items():
            new = self.common[i].numpy()
            for g, variable in enumerate(self.variables[i]):
                own = variable.numpy()
                added = own + new - values[g]
                variable.assign(added if weight is None else weight * own + (1 - weight) * new)
                self.square[g] += np.sum((means[i] - values[g]) ** 2)
        if f == len(self.places) - 1:
            self.distances.append(np.mean(np.sqrt(self.square)))
            self.square[:] = 0.0


def fragments_of(variables, n):
    """Return the positions of each fragment: a layer joins the one with the fewest values."""
    filled, places = [0] * n, [[] for _ in range(n)]
    for kernel in range(0, len(variables), 2):  # and its bias
        smallest = int(np.argmin(filled))
        filled[smallest] += sum(v.numpy().size for v in variables[kernel : kernel + 2])
        places[smallest] += [kernel, kernel + 1]
    return places
