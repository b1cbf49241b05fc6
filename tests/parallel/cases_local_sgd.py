"""Groups that average, and their distance: equal to single processes, float64, 1e-10."""

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import (
    require_close,
    require_equal_ranks,
    require_error,
    require_identical,
    values_of,
)
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import LAYERWISE, OPTIMIZERS, dense_model, float64
from tests.parallel.local_sgd_reference import BATCH, STEPS, ByHand, samples, train_by_hand
from tfscale.callbacks import LearningRateScaling, ModelDistance
from tfscale.comm import runtime
from tfscale.plan.buckets import owner_of


def train(make, strategy, epochs=1, callbacks=(), data=None, at_once=1, **options):
    keras.utils.set_random_seed(3)
    x, y = data or samples()
    model = dense_model()
    optimizer = hvd.DistributedOptimizer(make(), exchange=strategy, **options)
    model.compile(optimizer, loss="mse", steps_per_execution=at_once)
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[start, *callbacks])
    return model


def compare(model, expected):
    require_close(model.trainable_variables, expected)
    require_equal_ranks(model.trainable_variables)


def require_layers(model, expected):
    """The last distance of each layer, in the order of the model, is as expected."""
    average = model.optimizer.group_average
    found = dict(zip(average.layers, average.layer_distances.numpy(), strict=True))
    names = [owner_of(variable.path) for variable in model.trainable_variables[::2]]
    np.testing.assert_allclose([found[name] for name in names], expected, rtol=1e-9)


WITHIN = {
    "allreduce": "allreduce",
    "chunked": tfscale.Chunked(first_chunk_layers=1),
    "replicated": tfscale.Chunked(replicated_dense=2),
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


@sizes(2, 4, timeout_s=200)
def case_interval_rules_equal_single_processes():
    with float64():
        for rule, within in (
            (tfscale.GrowingInterval(start=2, growth=0.5, most=4), tfscale.Sharded()),
            (tfscale.DistanceGuard(limit=0.3, most=7), tfscale.Sharded()),
            (tfscale.DistanceGuard(limit=0.3, most=5, every=2), "allreduce"),
        ):
            record = ModelDistance()
            strategy = tfscale.LocalSGD(2, rule, within)
            model = train(OPTIMIZERS["sgd"], strategy, epochs=2, callbacks=[record])
            by_hand = ByHand(OPTIMIZERS["sgd"], 2, strategy)
            compare(model, by_hand.train(2 * STEPS))
            assert [step for step, _ in record.distances] == by_hand.steps
            assert len(set(np.diff(by_hand.steps))) > 1, by_hand.steps  # intervals differ


@sizes(2, 4, timeout_s=300)
def case_variants():
    """SASGD, an outer optimizer, averaged state, the layer-wise rates of large batches."""
    with float64():
        for within in ("allreduce", tfscale.Sharded()):
            for name, options in (
                ("adam", {"average": "gradients"}),
                ("momentum", {"outer": outer()}),
                ("adam", {"average_state": True}),
                ("lars", {}),
            ):
                make = {**OPTIMIZERS, **LAYERWISE}[name]
                model = train(make, tfscale.LocalSGD(2, 3, within, **options))
                compare(model, train_by_hand(make, 2, 3, **options))


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(self.model.trainable_variables[0].numpy())

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append(self.model.trainable_variables[0].numpy())


def agree(value) -> bool:
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


@sizes(2, 4, timeout_s=200)
def case_groups_start_later():
    """Post-local SGD: from an epoch on, or after the first decay of the learning rate."""
    with float64():
        expected = train_by_hand(OPTIMIZERS["momentum"], 2, 4, 3 * STEPS, start=1)
        for within in ("allreduce", tfscale.Chunked(replicated_dense=1), tfscale.Sharded()):
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
def case_rates_of_large_batches_inside_of_groups():
    """Warm-up, scaling for the batch of all groups, decay and LARS: each group steps with that."""
    rates = [0.1 * (1 + batch / STEPS) for batch in range(STEPS)] + [0.2] * STEPS + [0.02] * STEPS
    with float64():
        for within in ("allreduce", tfscale.Sharded()):
            scaling = LearningRateScaling(0.1, 12, BATCH, warmup_epochs=1, decay_epochs=(2,))
            strategy = tfscale.LocalSGD(2, 4, within)
            model = train(LAYERWISE["lars"], strategy, 3, [scaling])
            by_hand = ByHand(LAYERWISE["lars"], 2, strategy, rate_of=rates.__getitem__)
            compare(model, by_hand.train(3 * STEPS))


def groups_of_hosts():
    """Two hosts of two ranks: run by `test_local_hosts`."""
    results = []
    for groups in ("host", 2):
        model = train(OPTIMIZERS["momentum"], tfscale.LocalSGD(groups, 3), 2)
        assert model.optimizer.groups == [[0, 1], [2, 3]], model.optimizer.groups
        results.append(values_of(model.trainable_variables))
    require_identical(*results)


@sizes(2, 4, timeout_s=200)
def case_distance():
    """D is [L] eq. 9, taken just before an average, whatever is averaged and comes after it."""
    with float64():
        for interval, options, within in (
            (5, {}, "allreduce"),
            (5, {}, tfscale.Sharded()),
            (5, {"average": "gradients"}, tfscale.Sharded()),
            (2, {"outer": outer()}, "allreduce"),
            (2, {"outer": outer()}, tfscale.Sharded()),
        ):
            record = ModelDistance()
            strategy = tfscale.LocalSGD(2, interval, within, **options)
            model = train(OPTIMIZERS["sgd"], strategy, callbacks=[record])
            expected = ByHand(OPTIMIZERS["sgd"], 2, strategy)
            expected.train(STEPS)
            assert [step for step, _ in record.distances] == expected.steps
            found = [distance for _, distance in record.distances]
            assert len(found) == STEPS // interval and agree(found)
            np.testing.assert_allclose(found, expected.distances, rtol=1e-9)
            require_layers(model, expected.layer_distances[-1])


@sizes(4, timeout_s=120)
def case_dense_layers_exchange_activations_within_a_group():
    with float64():
        for start in ("immediately", 1):
            names_with_bytes()
            within = tfscale.Chunked(replicated_dense=1)
            train(OPTIMIZERS["sgd"], tfscale.LocalSGD(2, 4, within, start=start), epochs=2)
            names = names_with_bytes()
            assert any("activations" in name for name in names), names


@sizes(4, timeout_s=120)
def case_bytes_of_averages():
    """Sharded inside: each rank averages its 1/m of the model; else all of it."""
    with float64():
        for within, parts in ((tfscale.Sharded(), 2), ("allreduce", 1)):
            runtime.backend().take_events()
            model = train(OPTIMIZERS["sgd"], tfscale.LocalSGD(2, 10, within))
            names = names_with_bytes()
            n_values = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
            own = sum(int(np.prod(v.shape)) for v in model.optimizer.group_average.targets)
            assert names["average of parameters"] == own * 8
            total = sum(tfscale.allgather_object(own))
            assert total == n_values * tfscale.size() // parts
            assert abs(own - n_values / parts) <= 8 * 8 * len(model.trainable_variables)


def names_with_bytes():
    names = {}
    for event in runtime.backend().take_events():
        if event.plan >= 0:
            label = runtime.backend().slot_name(event.plan, event.slot)
            names[label] = names.get(label, 0) + event.bytes
    return names


@sizes(2, timeout_s=120)
def case_interval_adapts():
    strategy = tfscale.LocalSGD(2, tfscale.AdaptiveInterval(start=8), "allreduce")
    model = train(OPTIMIZERS["sgd"], strategy, epochs=3)
    interval = int(model.optimizer.group_average.interval.numpy())
    assert 1 <= interval <= 2 and agree(interval)


@sizes(3, timeout_s=60)
def case_groups_must_divide_the_ranks():
    text = "groups must divide the number of ranks, 3. Received: groups=2"
    require_error(lambda: train(OPTIMIZERS["sgd"], tfscale.LocalSGD(2)), "ConfigError", text)


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


class Logged(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.distances = []

    def on_epoch_end(self, epoch, logs=None):
        self.distances.append(logs.get("model_distance"))


@sizes(2, timeout_s=60)
def case_an_epoch_without_an_average_logs_none():
    """Ten steps in an epoch, averages after 15 and 30."""
    record, logged = ModelDistance(), Logged()
    train(OPTIMIZERS["sgd"], tfscale.LocalSGD(2, 15), 4, callbacks=[record, logged])
    (_, first), (_, second) = record.distances
    assert logged.distances == [None, first, second, None]
