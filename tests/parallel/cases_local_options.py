"""Local SGD with compression, constraints, schedules, dtypes, local layers and empty segments."""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import dense_model
from tests.helpers.ranks import float64, require_error
from tests.parallel.local_fit_model import (
    SGD,
    Dense,
    LocalSGD,
    distributed,
    model_of,
    own_fit,
    start,
)
from tests.parallel.local_sgd_reference import (
    ALLREDUCE,
    agree,
    check,
    compare,
    names_with_bytes,
    rounded_mean,
    train,
)
from tfscale.testing import inspect, require_close, require_identical


@sizes(4, timeout_s=120)
def case_an_outer_optimizer_where_a_rank_owns_nothing():
    def weights(within):
        whole = {"use_bias": False, "kernel_constraint": keras.constraints.NonNeg()}
        model = model_of(lambda: [Dense(1, **whole)])
        strategy = LocalSGD(2, 3, within, outer=SGD(0.7, momentum=0.9, nesterov=True))
        own_fit(model, distributed(SGD(0.05), strategy), start())
        return model.get_weights(), len(model.optimizer.bound.average.targets)

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
            model = model_of(lambda: [Dense(3), Dense(1, dtype="float64")])
            strategy = LocalSGD(2, 3, "allreduce", outer=outer, overlap=overlap)
            own_fit(model, distributed(SGD(0.05), strategy), start())
            results.append(model.get_weights())
        assert {w.dtype for w in results[0]} == {np.dtype("float32"), np.dtype("float64")}
        require_close(*results, rtol=1e-6, atol=0)


@sizes(2, timeout_s=160)
def case_one_group_applies_constraints_as_plain_training():
    """Once per step: one that halves weights would halve them again at averages and the end."""

    def weights(exchange):
        halve = {"kernel_constraint": lambda kernel: 0.5 * kernel}
        model = model_of(lambda: [Dense(3, **halve), Dense(1)])
        own_fit(model, distributed(SGD(0.05), exchange), start())
        return model.get_weights()

    plain = weights("allreduce")
    for options in ({}, {"overlap": 1}):
        require_close(weights(LocalSGD(1, 3, "allreduce", **options)), plain, rtol=1e-6, atol=0)


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
        kernels, limited = [], {"kernel_constraint": constraint}
        model = model_of(lambda limited=limited: [Dense(3, **limited), Dense(1)])
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
    model = model_of(lambda: [Dense(3), Dense(1)])
    strategy = LocalSGD(2, 8, "allreduce", average_state=True)
    optimizer = distributed(SGD(0.05, momentum=0.9), strategy)
    local = model.layers[0].kernel
    optimizer.register_local_var(local)
    own_fit(model, optimizer, start(local_variables=[local]))
    found = [agree(slot.numpy()) for slot in optimizer.momentums]
    assert found == [False, True, True, True]


@sizes(2, 4, timeout_s=300)
def case_changes_of_parameters_travel_compressed():
    """Changes, not parameters, are rounded: equal to a mean by hand in 16 bits."""
    bf16, fp16 = (tfscale.Compression.bf16, tf.bfloat16), (tfscale.Compression.fp16, tf.float16)
    with float64():
        for (wire, dtype), options in (
            (bf16, {}),
            (fp16, {}),
            (bf16, {"outer": SGD(0.7)}),
            (bf16, {"average": "gradients"}),
        ):
            names_with_bytes()
            more = {"mean": functools.partial(rounded_mean, dtype), "compression": wire}
            own = {"interval": 5, **ALLREDUCE, **options}
            by_hand = check(own, "sgd", groups=tfscale.size(), **more)
            averaged = options.get("average", "parameters")
            n_values = sum(v.numpy().size for v in by_hand.common)
            assert names_with_bytes()[f"average of {averaged}"] == 2 * 2 * n_values  # two averages


@sizes(2, 4, timeout_s=120)
def case_groups_that_begin_apart_meet():
    """Ranks have other weights when the optimizer is built, and get equal ones later or never."""
    for is_broadcast in (True, False):
        keras.utils.set_random_seed(tfscale.rank())
        model = dense_model()
        optimizer = tfscale.DistributedOptimizer(
            SGD(0.01),
            exchange=LocalSGD(tfscale.size(), 2, "allreduce"),
            compression=tfscale.Compression.bf16,
        )
        optimizer.build(model.trainable_variables)
        if is_broadcast:
            tfscale.broadcast_variables(model.trainable_variables, tfscale.size() - 1)
        for _ in range(2):
            own = 1.0 + tfscale.rank()
            optimizer.apply([own * tf.ones(v.shape) for v in model.trainable_variables])
        assert all(agree(v.numpy()) for v in model.trainable_variables)


@sizes(2, timeout_s=60)
def case_rules_that_need_more_than_a_rank_knows_are_refused():
    """Norms of an outer optimizer need whole models; summed gradients know of no clipping."""
    for outer in (SGD(0.7, clipnorm=1.0), keras.optimizers.Lamb(0.7)):
        train("sgd", LocalSGD(1, 4, "allreduce", outer=outer))
        text = "with sharded parameters. Received: " + type(outer).__name__
        require_error(lambda o=outer: train("sgd", LocalSGD(1, 4, outer=o)), "ConfigError", text)
    for options in ({"clipnorm": 1.0}, {"weight_decay": 0.1}, {"gradient_accumulation_steps": 2}):
        strategy = LocalSGD(2, 4, "allreduce", average="gradients")
        text = f"average='gradients' with {next(iter(options))}. Use"
        require_error(lambda o=options, s=strategy: train(lambda: SGD(0.1, **o), s), text)


@sizes(2, 4, timeout_s=120)
def case_optimizers_with_the_same_groups_share_their_communicators():
    """MPI has a limited number of them, and a search over settings builds many optimizers."""
    with float64():
        strategy = LocalSGD(tfscale.size(), 5)
        first = train("sgd", strategy)
        known = len(inspect.process_sets())
        again = train("sgd", strategy)
    assert len(inspect.process_sets()) == known > 0
    require_identical(first.get_weights(), again.get_weights())
