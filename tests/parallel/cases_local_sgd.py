"""Groups that average, and their distance: equal to single processes, float64, 1e-10."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import sizes
from tests.helpers.equality import OPTIMIZERS
from tests.helpers.ranks import float64, values_of
from tests.parallel.local_sgd_reference import (
    ALLREDUCE,
    BATCH,
    STEPS,
    agree,
    check,
    compare,
    names_with_bytes,
    train,
    train_by_hand,
)
from tfscale.callbacks import LearningRateScaling, ModelDistance
from tfscale.testing import require_identical


def outer():
    return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)


# D is [L] eq. 9, taken just before an average, whatever is averaged and comes after it.
TABLE = (
    ({"interval": 1, "within": tfscale.Chunked(first_chunk_layers=1)}, "momentum"),
    ({"interval": 3, "within": tfscale.Chunked(replicated_dense=2)}, "momentum"),
    ({"interval": 4, "within": tfscale.Sharded(bucket_mb=1e-4)}, "momentum"),
    *(
        ({"within": within, **options}, rule)
        for within in ("allreduce", tfscale.Sharded())
        for options, rule in (
            ({"interval": 4}, "momentum"),
            ({"interval": 3, "average": "gradients"}, "adam"),
            ({"interval": 3, "outer": outer()}, "momentum"),
            ({"interval": 3, "average_state": True}, "adam"),
            ({"interval": 3}, "lars"),
        )
    ),
)


@sizes(2, 4, timeout_s=400)
def case_groups_equal_single_processes():
    """Also SASGD, an outer optimizer, averaged state, layer-wise rates, cycles of batches."""
    with float64():
        for options, rule in TABLE:
            check(options, rule)
        cycles = {"backward_passes_per_step": 5, "average_aggregated_gradients": True}
        check({"interval": 2, **ALLREDUCE}, "sgd", epochs=2, passes=5, **cycles)


@sizes(2, 3, timeout_s=120)
def case_every_step_with_sgd_is_synchronous():
    with float64():
        n = tfscale.size()
        model = train("sgd", tfscale.LocalSGD(groups=n, interval=1))
        compare(model, train_by_hand(OPTIMIZERS["sgd"], 1, 1))


@sizes(2, 4, timeout_s=200)
def case_interval_rules_equal_single_processes():
    guard = tfscale.DistanceGuard(limit=0.3, maximum=5, every=2)
    with float64():
        for rule, epochs, more in (
            (tfscale.GrowingInterval(initial=2, growth=0.5, maximum=4), 2, {}),
            (tfscale.DistanceGuard(limit=0.3, maximum=7), 2, {}),
            (guard, 2, ALLREDUCE),
            (tfscale.AdaptiveInterval(initial=8), 3, ALLREDUCE),
        ):
            by_hand = check({"interval": rule, **more}, "sgd", epochs)
            assert len(set(np.diff(by_hand.steps))) > 1, by_hand.steps  # intervals differ


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(self.model.trainable_variables[0].numpy())

    def on_epoch_end(self, epoch, logs=None):
        self.ended.append(self.model.trainable_variables[0].numpy())


@sizes(2, 4, timeout_s=120)
def case_callbacks_see_the_average_and_groups_go_on():
    """Weights at an epoch's end are equal on all ranks; those of the next beginning are not."""
    with float64():
        for within in ("allreduce", tfscale.Sharded()):
            watch = Watch()
            strategy = tfscale.LocalSGD(2, 7, within)  # 10 steps per epoch: in mid-interval
            model = train("momentum", strategy, epochs=3, callbacks=[watch])
            assert all(agree(w) for w in watch.ended)
            assert agree(watch.begun[0]) and not any(agree(w) for w in watch.begun[1:])
            assert agree(model.trainable_variables[0].numpy())
            every = tfscale.allgather_object(watch.begun[1])
            for group in model.optimizer.bound.groups.ranks:
                assert all(np.array_equal(every[r], every[group[0]]) for r in group)


@sizes(2, 4, timeout_s=200)
def case_groups_start_later():
    """Post-local SGD; and each group steps with the rates of the large batch of all groups."""
    rates = [0.1 * (1 + batch / STEPS) for batch in range(STEPS)] + [0.2] * STEPS + [0.02] * STEPS
    with float64():
        for within in ("allreduce", tfscale.Chunked(replicated_dense=1), tfscale.Sharded()):
            check({"interval": 4, "within": within, "start": 1}, "momentum", epochs=3)
        for within in ("allreduce", tfscale.Sharded()):
            scaling = LearningRateScaling(0.1, 12, BATCH, warmup_epochs=1, decay_epochs=(2,))
            options = {"callbacks": [scaling], "rate_of": rates.__getitem__}
            check({"interval": 4, "within": within}, "lars", epochs=3, **options)


@sizes(2, timeout_s=120)
def case_groups_wait_while_the_rate_does_not_fall():
    for keep in (
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=3),
    ):
        strategy = tfscale.LocalSGD(2, 4, start="after_first_decay")
        model = train("sgd", strategy, epochs=5, callbacks=[keep])
        assert model.optimizer.bound.is_waiting_for_groups


@sizes(4, timeout_s=120)
def case_averages_reach_shards_without_a_gradient():
    """A step that averages may have no gradient of a parameter that earlier ones have changed."""
    for is_traced in (False, True):
        with float64():
            both = [keras.Variable(np.zeros(8), name=name) for name in ("used", "unused")]
            strategy = tfscale.LocalSGD(2, 2, tfscale.Sharded(bucket_mb=1e-5))
            optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(1.0), exchange=strategy)
            optimizer.build(both)
            group = tf.fill([8], float(tfscale.rank() // 2))
            for gradients in ([group, group], [group, None]):
                step = partial(optimizer.apply, gradients, both)
                tf.function(step)() if is_traced else step()
            require_identical(both[0].numpy(), np.full(8, -1.0))
            require_identical(both[1].numpy(), np.full(8, -0.5))


def groups_of_hosts():
    """Two hosts of two ranks: run by `test_hosts`."""
    results = []
    for groups in ("host", 2):
        model = train("momentum", tfscale.LocalSGD(groups, 3), 2)
        groups = model.optimizer.bound.groups.ranks
        assert groups == [[0, 1], [2, 3]], groups
        results.append(values_of(model.trainable_variables))
    require_identical(*results)


@sizes(4, timeout_s=120)
def case_what_groups_send():
    """Activations within a group; of averages each rank of a sharded group its 1/m, else all."""
    with float64():
        for start in ("immediately", 1):
            names_with_bytes()
            within = tfscale.Chunked(replicated_dense=1)
            train("sgd", tfscale.LocalSGD(2, 4, within, start=start), epochs=2)
            names = names_with_bytes()
            assert any("activations" in name for name in names), names
        for within, parts in ((tfscale.Sharded(), 2), ("allreduce", 1)):
            names_with_bytes()
            model = train("sgd", tfscale.LocalSGD(2, 10, within))
            n_values, own = (
                sum(int(np.prod(v.shape)) for v in variables)
                for variables in (
                    model.trainable_variables,
                    model.optimizer.bound.average.targets,
                )
            )
            assert names_with_bytes()["average of parameters"] == own * 8
            assert sum(tfscale.allgather_object(own)) == n_values * tfscale.size() // parts
            assert abs(own - n_values / parts) <= 8 * 8 * len(model.trainable_variables)


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
    train("sgd", tfscale.LocalSGD(2, 15), 4, callbacks=[record, logged])
    (_, first), (_, second) = record.distances
    assert logged.distances == [None, first, second, None]
