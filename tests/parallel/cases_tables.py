"""Tables whose rows are spread over the ranks train as in one process: float64, 1e-10."""

import functools

import keras
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import OPTIMIZERS
from tests.helpers.ranks import float64
from tests.helpers.tables import (
    BATCH,
    MANY,
    alone,
    check,
    ids_of,
    new_model,
    require_close,
    targets,
    whole_weights,
)

RULES = {**OPTIMIZERS, "adagrad": lambda: keras.optimizers.Adagrad(0.05)}


@sizes(1, 2, 3, 4, timeout_s=300)
def case_every_rule():
    for make in RULES.values():
        check(make)


@sizes(1, 2, 3, 4, timeout_s=300)
def case_repeated_indices_as_keras():
    for make in RULES.values():
        check(make, repeated_indices="keras")


@sizes(2, 3, timeout_s=300)
def case_every_exchange():
    for exchange in (tfscale.Sharded(), "chunked", "auto"):
        check(RULES["adam"], exchange=exchange)
        check(RULES["adagrad"], exchange=exchange, repeated_indices="keras")


@sizes(1, 2, 4, timeout_s=300)
def case_slices():
    """Tables of which each rank holds more than is updated at once."""
    for name in ("adamw", "momentum"):
        check(RULES[name], n_rows=MANY)
    check(RULES["adam"], n_rows=MANY, repeated_indices="keras")
    check(RULES["adagrad"], n_rows=MANY, exchange=tfscale.Sharded())


@sizes(2, 3, timeout_s=300)
def case_clipping():
    limits = {"clipnorm": 0.02, "global_clipnorm": 0.05, "clipvalue": 0.002}
    for name, limit in limits.items():
        for exchange in ("allreduce", "sharded"):
            check(functools.partial(keras.optimizers.SGD, 0.5, **{name: limit}), exchange=exchange)
    check(lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05), n_rows=MANY)


@sizes(2, 3, timeout_s=300)
def case_accumulation():
    make = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)  # noqa: E731
    check(make)
    check(make, exchange="sharded")


@sizes(2, timeout_s=300)
def case_policies_for_gradients():
    for policy in ("ignore", "raise", "skip"):
        check(RULES["adam"], nonfinite=policy)
        check(RULES["adam"], nonfinite=policy, exchange="sharded")


@sizes(2, 3)
def case_tapes():
    """A tape returns the mean of all ranks' gradients, for this rank's rows."""
    with float64():
        weights, _ = alone(RULES["sgd"])
        model, optimizer = new_model(tfscale.layers.ShardedEmbedding), RULES["sgd"]()
        ids, y = ids_of(), targets()
        n, rank = BATCH // tfscale.size(), tfscale.rank()

        @tf.function
        def step(first, second, y):
            with tfscale.DistributedGradientTape(tf.GradientTape()) as tape:
                outputs = model([first, second], training=True)
                loss = tf.reduce_mean(tf.square(outputs - y))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_weights)

        for begin in range(rank * n, len(y), BATCH):
            step(*(tf.constant(part[begin : begin + n]) for part in (*ids, y)))
        require_close(whole_weights(model), weights)
