"""Local SGD with compression, constraints, schedules, dtypes, local layers and empty segments."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import require_close, require_error, require_identical
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import OPTIMIZERS, dense_model, float64
from tests.parallel.cases_local_sgd import agree, compare, names_with_bytes, train
from tests.parallel.local_sgd_reference import models_for, train_by_hand
from tfscale.comm import runtime

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
    require_close(parts, whole, rtol=1e-5, atol=0)


@sizes(2, timeout_s=60)
def case_an_outer_optimizer_of_several_dtypes():
    """One that goes all the way changes nothing."""
    for overlap in (0, 1):
        results = []
        for outer in (SGD(1.0), None):
            keras.utils.set_random_seed(5)
            layers = [keras.layers.Dense(3), keras.layers.Dense(1, dtype="float64")]
            model = keras.Sequential([keras.Input((2,)), *layers])
            strategy = LocalSGD(2, 3, "allreduce", outer=outer, overlap=overlap)
            own_fit(model, distributed(SGD(0.05), strategy), start())
            results.append(model.get_weights())
        assert {w.dtype for w in results[0]} == {np.dtype("float32"), np.dtype("float64")}
        require_close(*results, rtol=1e-6, atol=0)


@sizes(2, timeout_s=160)
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
        (unit, {"overlap": 2}),
        (positive, {"overlap": 1, "merge": 0.5}),
        (positive, {"overlap": 1, "outer": outer}),
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


@sizes(2, 4, timeout_s=300)
def case_changes_of_parameters_travel_compressed():
    """Changes, not parameters, are rounded: an error of a small part of what a step changes."""
    n = tfscale.size()
    rate = 1e-4  # changes are far below what bfloat16 resolves of a parameter

    def sgd():
        return keras.optimizers.SGD(rate)

    variants = ({}, {"average": "gradients"}, {"outer": keras.optimizers.SGD(1.0)})
    with float64():
        start = [v.numpy() for v in models_for(1, sgd)[0].trainable_variables]
        exact = train_by_hand(sgd, n, 5)
        for wire, part in ((tfscale.Compression.bf16, 2**-7), (tfscale.Compression.fp16, 2**-9)):
            for variant in variants:
                runtime.backend().take_events()
                strategy = tfscale.LocalSGD(n, 5, "allreduce", **variant)
                model = train(sgd, strategy, compression=wire)
                compare_changes(model, start, exact, part)
                names, own = names_with_bytes(), model.optimizer.group_average.targets
                averaged = "gradients" if "average" in variant else "parameters"
                n_values = sum(int(np.prod(v.shape)) for v in own)
                assert names[f"average of {averaged}"] == 2 * 2 * n_values  # two averages


def compare_changes(model, start, exact, part):
    """Weights differ by at most a part of the largest change, and not between ranks."""
    ours = [v.numpy() for v in model.trainable_variables]
    for mine, first, single in zip(ours, start, exact, strict=True):
        error, change = np.abs(mine - single).max(), np.abs(single - first).max()
        assert 0 < error < part * change, (error, change)
        assert all(np.array_equal(mine, other) for other in tfscale.allgather_object(mine))


@sizes(2, 4, timeout_s=120)
def case_groups_that_begin_apart_meet():
    """Ranks have other weights when the optimizer is built, and get equal ones later or never."""
    for is_broadcast in (True, False):
        keras.utils.set_random_seed(tfscale.rank())
        model = dense_model()
        optimizer = tfscale.DistributedOptimizer(
            keras.optimizers.SGD(0.01),
            exchange=tfscale.LocalSGD(tfscale.size(), 2, "allreduce"),
            compression=tfscale.Compression.bf16,
        )
        optimizer.build(model.trainable_variables)
        if is_broadcast:
            tfscale.broadcast_variables(model.trainable_variables, tfscale.size() - 1)
        for _ in range(2):
            own = 1.0 + tfscale.rank()
            optimizer.apply([own * tf.ones(v.shape) for v in model.trainable_variables])
        assert all(agree(v.numpy()) for v in model.trainable_variables)


@sizes(2, timeout_s=120)
def case_a_warm_up_is_no_decay():
    """Groups that wait for the first decay do not part while the rate rises."""
    strategy = tfscale.LocalSGD(2, 4, "allreduce", start="after_first_decay")
    warm_up = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=3)
    model = train(OPTIMIZERS["sgd"], strategy, epochs=5, callbacks=[warm_up])
    assert model.optimizer.waits_for_groups


@sizes(2, timeout_s=60)
def case_an_outer_optimizer_with_norms_needs_whole_models():
    for outer in (keras.optimizers.SGD(0.7, clipnorm=1.0), keras.optimizers.Lamb(0.7)):
        train(OPTIMIZERS["sgd"], tfscale.LocalSGD(1, 4, "allreduce", outer=outer))
        text = "sees a rank's segment only. Received: " + type(outer).__name__
        strategy = tfscale.LocalSGD(1, 4, outer=outer)
        require_error(lambda s=strategy: train(OPTIMIZERS["sgd"], s), "ConfigError", text)


@sizes(2, timeout_s=60)
def case_distances_of_executions_and_cycles():
    """An average is recorded once, where it was taken."""
    for options, steps in (({"backward_passes_per_step": 5}, [10]), ({}, [4, 8])):
        record = tfscale.callbacks.ModelDistance()
        strategy = tfscale.LocalSGD(2, 2 if options else 4, "allreduce")
        train(OPTIMIZERS["sgd"], strategy, callbacks=[record], **options)
        assert [step for step, _ in record.distances] == steps
        assert all(distance > 0 for _, distance in record.distances)


@sizes(2, timeout_s=60)
def case_summed_gradients_know_nothing_of_what_an_optimizer_makes_of_them():
    for options in ({"clipnorm": 1.0}, {"weight_decay": 0.1}, {"gradient_accumulation_steps": 2}):
        strategy = tfscale.LocalSGD(2, 4, "allreduce", average="gradients")
        require_error(
            lambda o=options, s=strategy: train(lambda: keras.optimizers.SGD(0.1, **o), s),
            *("ConfigError", f"average='gradients' with {next(iter(options))}. Use"),
        )


@sizes(2, 4, timeout_s=120)
def case_optimizers_with_the_same_groups_share_their_communicators():
    """MPI has a limited number of them, and a search over settings builds many optimizers."""
    with float64():
        strategy = tfscale.LocalSGD(tfscale.size(), 5)
        first = train(OPTIMIZERS["sgd"], strategy)
        known = len(runtime.known_process_sets())
        again = train(OPTIMIZERS["sgd"], strategy)
    assert len(runtime.known_process_sets()) == known > 0
    require_identical(first.get_weights(), again.get_weights())
