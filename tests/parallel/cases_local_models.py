"""Averages of groups beside constraints, schedules, dtypes, local layers and empty segments."""

from __future__ import annotations

import keras
import numpy as np

import tfscale
import tfscale.keras as hvd
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import float64
from tests.parallel.cases_local_sgd import agree, compare, train

SGD = keras.optimizers.SGD
LocalSGD = tfscale.LocalSGD


def own_fit(model, optimizer, *callbacks, epochs=1, **options):
    """Train a model of the caller's on 8 steps of 24 samples; return it."""
    x = np.random.default_rng(4).normal(size=(192, 2))
    model.compile(optimizer, "mse")
    data = tfscale.data.GlobalBatches(x, x[:, :1], batch_size=24, shuffle=False)
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks, **options)
    return model


def start():
    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def distributed(rule, strategy):
    return hvd.DistributedOptimizer(rule, exchange=strategy)


@sizes(4, timeout_s=120)
def case_an_outer_optimizer_where_a_rank_owns_nothing():
    def weights(within):
        keras.utils.set_random_seed(5)
        whole = keras.layers.Dense(1, use_bias=False, kernel_constraint=keras.constraints.NonNeg())
        model = keras.Sequential([keras.Input((2,)), whole])
        strategy = LocalSGD(2, 3, within, outer=SGD(0.7, momentum=0.9, nesterov=True))
        own_fit(model, distributed(SGD(0.05), strategy), start())
        return model.get_weights(), len(model.optimizer.group_average.targets)

    whole, _ = weights("allreduce")
    parts, n_own = weights(tfscale.Sharded())
    assert 0 in tfscale.allgather_object(n_own), tfscale.allgather_object(n_own)
    for mine, expected in zip(parts, whole, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


@sizes(2, timeout_s=60)
def case_an_outer_optimizer_of_several_dtypes():
    """One that goes all the way changes nothing."""
    results = []
    for outer in (SGD(1.0), None):
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(3), keras.layers.Dense(1, dtype="float64")]
        model = keras.Sequential([keras.Input((2,)), *layers])
        own_fit(model, distributed(SGD(0.05), LocalSGD(2, 3, "allreduce", outer=outer)), start())
        results.append(model.get_weights())
    assert {w.dtype for w in results[0]} == {np.dtype("float32"), np.dtype("float64")}
    for mine, expected in zip(*results, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6)


@sizes(2, timeout_s=100)
def case_constraints_hold_behind_averages():
    """An outer step and a step by summed gradients may go where no rule lets a parameter be."""

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernels.append(self.model.layers[0].kernel.numpy())

    unit, positive = keras.constraints.UnitNorm(), keras.constraints.NonNeg()
    outer = SGD(0.9, momentum=0.9, nesterov=True)
    for constraint, options in (
        (unit, {}),
        (unit, {"outer": outer}),
        (positive, {"outer": outer}),
        (positive, {"average": "gradients"}),
    ):
        kernels = []
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(3, kernel_constraint=constraint), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        strategy = LocalSGD(2, 4, "allreduce", **options)
        own_fit(model, distributed(SGD(0.3), strategy), start(), Look(), epochs=2)
        for kernel in (*kernels, model.layers[0].kernel.numpy()):
            norms = np.linalg.norm(kernel, axis=0)
            is_met = np.allclose(norms, 1, atol=1e-5) if constraint is unit else kernel.min() >= 0
            assert is_met, (constraint, options, kernel)
        assert agree(model.layers[0].kernel.numpy())


@sizes(2, timeout_s=60)
def case_summed_gradients_move_by_the_rate_they_were_made_with():
    """The rate falls after the fifth step, where an interval ends."""
    with float64():
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.001])
        first = train(lambda: SGD(schedule), LocalSGD(2, 5, "allreduce"))
        second = train(lambda: SGD(schedule), LocalSGD(2, 5, "allreduce", average="gradients"))
        compare(second, [v.numpy() for v in first.trainable_variables])


@sizes(2, timeout_s=60)
def case_slots_of_local_variables_are_not_averaged():
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = distributed(
        SGD(0.05, momentum=0.9), LocalSGD(2, 8, "allreduce", average_state=True)
    )
    optimizer.register_local_var(model.layers[0].kernel)
    local = [model.layers[0].kernel]
    own_fit(model, optimizer, hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", local))
    slots = dict(zip([v.path for v in model.trainable_variables], optimizer.momentums, strict=True))
    found = {path: agree(slot.numpy()) for path, slot in slots.items()}
    assert [found[v.path] for v in model.trainable_variables] == [False, True, True, True], found
