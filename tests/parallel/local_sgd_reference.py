"""Local SGD by hand: single processes whose models are averaged in NumPy."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.parallel.cases_equality import dense_model, inputs_of

BATCH, STEPS = 24, 10


def models_for(groups, make, build=dense_model):
    models = []
    for _ in range(groups):
        keras.utils.set_random_seed(3)
        model = build()
        model.compile(make(), loss="mse")
        model.optimizer.build(model.trainable_variables)
        models.append(model)
    return models


def own_part(step, group, groups):
    part = BATCH // groups
    begin = step * BATCH + group * part
    return slice(begin, begin + part)


def train_by_hand(make, groups, interval, n_steps=STEPS, **options):
    """Return the average of the groups' models."""
    return ByHand(make, groups, tfscale.LocalSGD(groups, interval, **options)).train(n_steps)


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


class ByHand:
    """Single processes, one for each group, whose models are averaged in NumPy."""

    def __init__(self, make, groups, strategy, build=dense_model):
        self.strategy, self.groups = strategy, groups
        self.models = models_for(groups, make, build)
        own = [m.trainable_variables for m in self.models]
        self.variables = list(zip(*own, strict=True))  # of all groups, by position
        self.common = [keras.Variable(v[0].numpy(), dtype="float64") for v in self.variables]
        self.places = fragments_of(own[0], strategy.fragments)
        self.outers = [self.outer_for(places) for places in self.places]
        self.under_way = {}  # step of the merge and what was sent, by fragment
        self.square, self.distances, self.steps = np.zeros(groups), [], []
        self.gradients = [[] for _ in range(groups)]  # since the last average

    def outer_for(self, places):
        given = self.strategy.outer
        if given is not None:
            given = keras.optimizers.SGD.from_config(given.get_config())
            given.build([self.common[i] for i in places])
        return given

    def train(self, n_steps):
        """Train for some steps, together in the epochs before `start`; return the average."""
        x, y = samples()
        together = self.strategy.start * STEPS if self.strategy.start != "immediately" else 0
        for step in range(-together, n_steps - together):
            for g, model in enumerate(self.models):
                own = own_part(step % STEPS, *((g, self.groups) if step >= 0 else (0, 1)))
                if self.strategy.average == "gradients":
                    self.gradients[g].append(gradients_of(model, x[own], y[own]))
                model.train_on_batch(x[own], y[own])
            for f, places in enumerate(self.places if step >= 0 else ()):
                if self.under_way.get(f, [None])[0] == step:
                    self.merge(f)
                if self.is_due(f, step + 1):
                    self.steps.append(step + 1)
                    self.under_way[f] = step + self.strategy.overlap, self.sent(places)
                    if self.strategy.overlap == 0:
                        self.merge(f)
        return mean_of([m.trainable_variables for m in self.models])

    def is_due(self, f, step):
        rule, since = self.strategy.interval, step - max(self.steps, default=0)
        if isinstance(rule, int):
            return step % rule == f * rule // len(self.places)
        if isinstance(rule, tfscale.GrowingInterval):
            return since >= min(rule.most, int(rule.start * (1 + rule.growth * len(self.steps))))
        changes = [[v - c for v in own] for own, c in zip(self.variables, self.common, strict=True)]
        squares = np.sum([[np.sum(change**2) for change in own] for own in changes], axis=0)
        is_apart = np.mean(np.sqrt(squares)) > rule.limit
        return since == rule.most or (since % rule.every == 0 and is_apart)

    def sent(self, places):
        if self.strategy.average != "gradients":
            return {i: [v.numpy() for v in self.variables[i]] for i in places}
        rate = float(self.models[0].optimizer.learning_rate.numpy())
        sums = [[sum(same) for same in zip(*own, strict=True)] for own in self.gradients]
        self.gradients = [[] for _ in sums]
        return {i: [self.common[i].numpy() - rate * own[i] for own in sums] for i in places}

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
        weight = 0 if self.strategy.average == "gradients" else self.strategy.merge
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
        if self.strategy.average_state:
            states = [model.optimizer.variables for model in self.models]
            for mean, *same in zip(mean_of(states), *states, strict=True):
                for variable in same:
                    variable.assign(mean)


def fragments_of(variables, n):
    """Return the positions of each fragment: a layer joins the one with the fewest values."""
    filled, places = [0] * n, [[] for _ in range(n)]
    for kernel in range(0, len(variables), 2):  # and its bias
        smallest = int(np.argmin(filled))
        filled[smallest] += sum(v.numpy().size for v in variables[kernel : kernel + 2])
        places[smallest] += [kernel, kernel + 1]
    return places
