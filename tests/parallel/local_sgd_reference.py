"""Local SGD by hand: single processes whose models are averaged in NumPy."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.equality import LAYERWISE, OPTIMIZERS, dense_model, inputs_of
from tfscale.callbacks import ModelDistance
from tfscale.plan.buckets import owner_of
from tfscale.testing import inspect, require_close, require_equal_ranks

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


def rounded_mean(dtype, changes):
    """Return the mean of changes that are sent in 16 bits, added in float32, and rounded again."""
    total = sum(tf.cast(tf.cast(c, dtype), tf.float32) for c in changes)
    mean = tf.cast(total * np.float32(1 / len(changes)), dtype)
    return tf.cast(mean, tf.float64).numpy()


bf16_mean = functools.partial(rounded_mean, tf.bfloat16)


def set_rate(optimizer, rate):
    """Set the learning rate, with the correction of velocities of Goyal et al."""
    change = rate / float(optimizer.learning_rate.numpy())
    optimizer.learning_rate = rate
    for velocity in optimizer.velocities:
        velocity.assign(velocity * change)


class ByHand:
    """Single processes, one for each group, whose models are averaged in NumPy.

    `data` replaces the samples; a group leaves out a step with NaN. A step has `passes` batches.
    `mean` computes means of changes since the last average. `rate_of` returns the rate of a step.
    """

    def __init__(
        self,
        make,
        groups,
        strategy,
        data=None,
        passes=1,
        mean=None,
        rate_of=None,
        build=dense_model,
    ):
        self.strategy, self.groups, self.data = strategy, groups, data or samples()
        self.passes, self.mean, self.rate_of = passes, mean, rate_of
        self.models = models_for(groups, make, build)
        own = [m.trainable_variables for m in self.models]
        self.variables = list(zip(*own, strict=True))  # of all groups, by position
        self.common = [keras.Variable(v[0].numpy(), dtype="float64") for v in self.variables]
        self.places = fragments_of(own[0], strategy.fragments)
        self.outers = [self.outer_for(places) for places in self.places]
        self.under_way = {}  # step of the merge and what was sent, by fragment
        self.interval, self.since, self.n_intervals = strategy.first_interval, 0, 0
        self.losses, self.first_loss = [], None  # of the epoch; of the first one
        self.squares = np.zeros((groups, len(own[0]) // 2))  # by layer: a kernel and its bias
        self.steps, self.distances, self.layer_distances = [], [], []
        self.gradients = [[] for _ in range(groups)]  # since the last average

    def outer_for(self, places):
        given = self.strategy.outer
        if given is not None:
            given = keras.optimizers.SGD.from_config(given.get_config())
            given.build([self.common[i] for i in places])
        return given

    def train(self, n_steps):
        """Train for some steps, together until `start`; return the average."""
        x, y = self.data
        per_epoch, start = STEPS // self.passes, self.strategy.start
        # The rate of those who start after its decay falls with the second epoch.
        known = {"immediately": 0, "after_first_decay": per_epoch + 1}
        together = known[start] if start in known else start * per_epoch
        for step in range(n_steps):
            is_apart = step >= together
            for g, model in enumerate(self.models):
                own = self.rows_of(step, *((g, self.groups) if is_apart else (0, 1)))
                if self.strategy.average == "gradients":
                    self.gradients[g].append(gradients_of(model, x[own], y[own]))
                if self.rate_of is not None:
                    set_rate(model.optimizer, self.rate_of(step))
                if np.isfinite(x[own]).all():
                    model.reset_metrics()
                    self.losses.append(float(model.train_on_batch(x[own], y[own])))
            if is_apart:
                self.average(step)
            if (step + 1) % per_epoch == 0:
                self.end_epoch()
        return mean_of([m.trainable_variables for m in self.models])

    def rows_of(self, step, group, groups):
        part, first = np.arange(BATCH // groups), step * self.passes % STEPS
        batches = range(first, first + self.passes)
        return np.concatenate([BATCH * batch + len(part) * group + part for batch in batches])

    def average(self, step):
        """Merge what was sent so many steps ago, and send what is due after a step."""
        reached, rule, n = self.since + 1, self.strategy.interval, len(self.places)
        is_full = reached >= self.interval or self.is_too_far(reached)
        self.since = 0 if is_full else reached
        for f, places in enumerate(self.places):
            if self.under_way.get(f, [None])[0] == step:
                self.merge(f)
            if self.since == f * self.interval // n and f not in self.under_way:
                self.steps.append(step + 1)
                self.under_way[f] = step + self.strategy.overlap, self.sent(places)
                if self.strategy.overlap == 0:
                    self.merge(f)
        self.n_intervals += is_full
        if isinstance(rule, tfscale.GrowingInterval):
            steps = int(rule.initial * (1 + rule.growth * self.n_intervals))
            self.interval = min(rule.maximum, steps)

    def is_too_far(self, reached):
        rule = self.strategy.interval
        if not isinstance(rule, tfscale.DistanceGuard) or reached % rule.every:
            return False
        changes = [[v - c for v in own] for own, c in zip(self.variables, self.common, strict=True)]
        squares = np.sum([[np.sum(change**2) for change in own] for own in changes], axis=0)
        return np.mean(np.sqrt(squares)) > rule.limit

    def end_epoch(self):
        rule, loss, self.losses = self.strategy.interval, np.mean(self.losses), []
        if isinstance(rule, tfscale.AdaptiveInterval):
            self.first_loss = self.first_loss or loss
            self.interval = rule.after(self.interval, loss, self.first_loss)

    def sent(self, places):
        if self.strategy.average != "gradients":
            return {i: [v.numpy() for v in self.variables[i]] for i in places}
        rate = float(self.models[0].optimizer.learning_rate.numpy())
        sums = [[sum(same) for same in zip(*own, strict=True)] for own in self.gradients]
        self.gradients = [[] for _ in sums]
        return {i: [self.common[i].numpy() - rate * own[i] for own in sums] for i in places}

    def mean_for(self, i, values):
        if self.mean is None:
            return np.mean(values, axis=0)
        last, unit = self.common[i].numpy(), 1.0
        if self.strategy.average == "gradients":  # which are sent without their rate
            unit = -float(self.models[0].optimizer.learning_rate.numpy())
        return last + unit * self.mean([(value - last) / unit for value in values])

    def merge(self, f):
        sent = self.under_way.pop(f)[1]
        means = {i: self.mean_for(i, values) for i, values in sent.items()}
        common = [self.common[i] for i in sent]
        if self.outers[f] is not None:
            changes = [c.value - m for c, m in zip(common, means.values(), strict=True)]
            self.outers[f].apply(changes, common)
        else:
            for variable, mean in zip(common, means.values(), strict=True):
                variable.assign(mean)
        are_summed = self.strategy.average == "gradients"
        weight = 0 if are_summed else self.strategy.merge
        for i, values in sent.items():
            new = self.common[i].numpy()
            for g, variable in enumerate(self.variables[i]):
                own = variable.numpy()
                added = own + new - values[g]
                variable.assign(added if weight is None else weight * own + (1 - weight) * new)
                apart = own if are_summed else values[g]
                self.squares[g, i // 2] += np.sum((means[i] - apart) ** 2)
        if f == len(self.places) - 1:
            self.distances.append(np.mean(np.sqrt(self.squares.sum(axis=1))))
            self.layer_distances.append(np.mean(np.sqrt(self.squares), axis=0))
            self.squares[:] = 0.0
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


RULES = {**OPTIMIZERS, **LAYERWISE}


ALLREDUCE = {"within": "allreduce"}


def train(
    make, strategy, epochs=1, callbacks=(), data=None, at_once=1, build=dense_model, **options
):
    keras.utils.set_random_seed(3)
    x, y = data or samples()
    model = build()
    optimizer = hvd.DistributedOptimizer(RULES.get(make, make)(), exchange=strategy, **options)
    model.compile(optimizer, loss="mse", steps_per_execution=at_once)
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[start, *callbacks])
    return model


def compare(model, expected):
    require_close(model.trainable_variables, expected)
    require_equal_ranks(model.trainable_variables)


def check(
    options,
    rule,
    epochs=1,
    *,
    groups=2,
    callbacks=(),
    data=None,
    passes=1,
    mean=None,
    rate_of=None,
    **more,
):
    """Compare weights and distances, of layers too, with groups by hand; return these."""
    make, strategy, record = (
        RULES.get(rule, rule),
        tfscale.LocalSGD(groups, **options),
        ModelDistance(),
    )
    model = train(make, strategy, epochs, [*callbacks, record], data, **more)
    by_hand = ByHand(make, groups, strategy, data, passes, mean, rate_of)
    compare(model, by_hand.train(epochs * STEPS // passes))
    steps, distances = zip(*record.distances, strict=True)
    # Averages that are on their way at the end, or to be read with the next, have no distance yet.
    assert len(distances) >= (3 if strategy.overlap else len(by_hand.distances)), distances
    assert agree(distances)
    np.testing.assert_allclose(distances, by_hand.distances[: len(distances)], rtol=1e-9)
    if strategy.fragments == 1 and not strategy.overlap:
        assert list(steps) == [passes * step for step in by_hand.steps]
    average = model.optimizer.bound.average
    found = dict(zip(average.report.layers, average.report.layer_distances.numpy(), strict=True))
    names = [owner_of(variable.path) for variable in model.trainable_variables[::2]]
    expected = by_hand.layer_distances[len(distances) - 1]
    np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-9)
    return by_hand


def agree(value) -> bool:
    every = tfscale.allgather_object(value)
    return all(np.array_equal(v, every[0]) for v in every)


def names_with_bytes():
    """Return bytes by the name of what was sent since the last call."""
    names = {}
    for event in inspect.take_collectives():
        if event.plan >= 0:
            label = event.name
            names[label] = names.get(label, 0) + event.bytes
    return names
