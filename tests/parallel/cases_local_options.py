"""Local SGD with compression, warm-up and options of optimizers."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.spawn import sizes
from tests.parallel.cases_equality import OPTIMIZERS, dense_model, float64
from tests.parallel.cases_local_sgd import agree, names_with_bytes, train
from tests.parallel.local_sgd_reference import models_for, train_by_hand
from tfscale.comm import runtime


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
        try:
            train(OPTIMIZERS["sgd"], tfscale.LocalSGD(1, 4, outer=outer))
            raise AssertionError("no error")
        except tfscale.ConfigError as error:
            assert "sees a rank's segment only. Received: " + type(outer).__name__ in str(error)


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
        try:
            train(lambda o=options: keras.optimizers.SGD(0.1, **o), strategy)
            raise AssertionError("no error")
        except tfscale.ConfigError as error:
            assert f"average='gradients' with {next(iter(options))}. Use" in str(error)


@sizes(2, 4, timeout_s=120)
def case_optimizers_with_the_same_groups_share_their_communicators():
    """MPI has a limited number of them, and a search over settings builds many optimizers."""
    with float64():
        strategy = tfscale.LocalSGD(tfscale.size(), 5)
        first = train(OPTIMIZERS["sgd"], strategy)
        known = len(runtime.known_process_sets())
        again = train(OPTIMIZERS["sgd"], strategy)
    assert len(runtime.known_process_sets()) == known > 0
    for one, other in zip(first.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
