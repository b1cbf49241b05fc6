"""Groups that average: equal to single processes averaged by hand, float64, 1e-10."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import OPTIMIZERS, TOLERANCE, dense_model, float64, inputs_of
from tfscale import runtime

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


class Watch(keras.callbacks.Callback):
    """Notes the weights before each epoch, and whether ranks agree on them."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(self.model.trainable_variables[0].numpy())

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append(self.model.trainable_variables[0].numpy())


def agree(value) -> bool:
    """Whether a value is the same on all ranks."""
    every = tfscale.allgather_object(value)
    return all(np.array_equal(v, every[0]) for v in every)


@sizes(2, 4, timeout_s=120)
def case_callbacks_see_the_average_and_groups_go_on():
    """Weights at an epoch's end are equal on all ranks; those of the next beginning are not."""
    with float64():
        for within in ("allreduce", tfscale.Sharded()):
            watch = Watch()
            strategy = tfscale.LocalSGD(2, 7, within)  # 10 steps per epoch: in mid-interval
            model = train(OPTIMIZERS["momentum"], strategy, epochs=3, callbacks=[watch])
            assert all(agree(w) for w in watch.ended)
            assert agree(watch.begun[0]) and not any(agree(w) for w in watch.begun[1:])
            assert agree(model.trainable_variables[0].numpy())
            groups = model.optimizer.groups
            for group in groups:
                every = tfscale.allgather_object(watch.begun[1])
                assert all(np.array_equal(every[r], every[group[0]]) for r in group)


def by_hand_over_epochs(epochs, first_local, interval, groups):
    """Train together for some epochs, then apart; return the average."""
    x, y = samples()
    models = []
    for _ in range(groups):
        keras.utils.set_random_seed(3)
        models.append(dense_model())
        models[-1].compile(OPTIMIZERS["momentum"](), loss="mse")
    since = 0
    for epoch in range(epochs):
        for step in range(STEPS):
            batch = slice(step * BATCH, (step + 1) * BATCH)
            for i, model in enumerate(models):
                if epoch < first_local:
                    model.train_on_batch(x[batch], y[batch])
                    continue
                part = BATCH // groups
                own = slice(batch.start + i * part, batch.start + (i + 1) * part)
                model.train_on_batch(x[own], y[own])
            since = since + 1 if epoch >= first_local else 0
            if since == interval:
                since = 0
                mean = mean_of([m.trainable_variables for m in models])
                for model in models:
                    for variable, value in zip(model.trainable_variables, mean, strict=True):
                        variable.assign(value)
    return mean_of([m.trainable_variables for m in models])


@sizes(2, 4, timeout_s=200)
def case_groups_start_later():
    """Post-local SGD: from an epoch on, or after the first decay of the learning rate."""
    with float64():
        expected = by_hand_over_epochs(3, 1, 4, 2)
        for within in ("allreduce", tfscale.Sharded()):
            strategy = tfscale.LocalSGD(2, 4, within, start=1)
            compare(train(OPTIMIZERS["momentum"], strategy, epochs=3), expected)
        strategy = tfscale.LocalSGD(2, 4, start="after_first_decay")
        kept = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)
        model = train(OPTIMIZERS["momentum"], strategy, epochs=2, callbacks=[kept])
        assert model.optimizer.waits_for_groups
        lower = keras.callbacks.LearningRateScheduler(
            lambda epoch, rate: rate / 2 if epoch else rate
        )
        model = train(OPTIMIZERS["momentum"], strategy, epochs=3, callbacks=[lower])
        assert not model.optimizer.waits_for_groups


@sizes(2, 4, timeout_s=120)
def case_distance():
    """D is [L] eq. 9, taken just before an average."""
    with float64():
        for within in ("allreduce", tfscale.Sharded()):
            record = tfscale.callbacks.ModelDistance()
            strategy = tfscale.LocalSGD(2, 5, within)
            train(OPTIMIZERS["sgd"], strategy, callbacks=[record])
            assert [step for step, _ in record.distances] == [5, 10]
            assert all(agree(d) for _, d in record.distances)
            np.testing.assert_allclose(record.distances[0][1], distance_by_hand(5), rtol=1e-9)


def distance_by_hand(n_steps):
    """Return D of two single processes after some steps."""
    x, y = samples()
    weights = []
    for i in range(2):
        keras.utils.set_random_seed(3)
        model = dense_model()
        model.compile(OPTIMIZERS["sgd"](), loss="mse")
        for step in range(n_steps):
            begin = step * BATCH + i * BATCH // 2
            own = slice(begin, begin + BATCH // 2)
            model.train_on_batch(x[own], y[own])
        weights.append(np.concatenate([v.numpy().ravel() for v in model.trainable_variables]))
    mean = np.mean(weights, axis=0)
    return np.mean([np.linalg.norm(w - mean) for w in weights])


@sizes(4, timeout_s=120)
def case_bytes_of_averages():
    """Sharded inside: each rank averages its 1/m of the model; else all of it."""
    with float64():
        for within, parts in ((tfscale.Sharded(), 2), ("allreduce", 1)):
            runtime.backend().take_events()
            model = train(OPTIMIZERS["sgd"], tfscale.LocalSGD(2, 10, within))
            names = {}
            for event in runtime.backend().take_events():
                if event.plan >= 0:
                    label = runtime.backend().slot_name(event.plan, event.slot)
                    names[label] = names.get(label, 0) + event.bytes
            n_values = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
            own = sum(int(np.prod(v.shape)) for v in model.optimizer.group_average.targets)
            assert names["average of parameters"] == own * 8
            total = sum(tfscale.allgather_object(own))
            assert total == n_values * tfscale.size() // parts
            assert abs(own - n_values / parts) <= 8 * 8 * len(model.trainable_variables)


@sizes(2, timeout_s=120)
def case_interval_adapts():
    strategy = tfscale.LocalSGD(2, tfscale.AdaptiveInterval(start=8), "allreduce")
    model = train(OPTIMIZERS["sgd"], strategy, epochs=3)
    interval = int(model.optimizer.group_average.interval.numpy())
    assert 1 <= interval <= 2 and agree(interval)


@sizes(3, timeout_s=60)
def case_groups_must_divide_the_ranks():
    try:
        train(OPTIMIZERS["sgd"], tfscale.LocalSGD(2))
        raise AssertionError("no error")
    except tfscale.ConfigError as error:
        assert "groups must divide the number of ranks, 3. Received: groups=2" in str(error)
