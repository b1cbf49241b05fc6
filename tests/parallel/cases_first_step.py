"""Training with DistributedOptimizer and without callbacks: ranks that differ are found."""

from functools import partial

import keras
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import BATCH
from tests.helpers.ranks import require_error
from tests.parallel.agreement_model import TOLD, warnings_of_ranks
from tests.parallel.nonfinite_data import data
from tfscale import Chunked, DistributedOptimizer, Sharded
from tfscale.callbacks import MetricAverageCallback
from tfscale.testing import require_equal_ranks

SGD = keras.optimizers.SGD


def fit(optimizer, seed=1, callbacks=None, data_of=data, is_built=True, **options):
    """Train on this rank's part of the batches."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(4), keras.layers.Dense(3)]
    model = keras.Sequential([*([keras.Input((6,))] if is_built else []), *layers])
    model.compile(optimizer, "mse", **options)
    _, x, y = data_of()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return model


@sizes(2, 3, timeout_s=180)
def case_different_first_weights_are_refused():
    for wrapped, options in (
        ({}, {}),
        ({"exchange": Sharded()}, {}),
        ({"exchange": Chunked(first_chunk_layers=1, replicated_dense=0)}, {}),
        ({"backward_passes_per_step": 2}, {}),
        ({}, {"is_built": False}),
        ({}, {"run_eagerly": True}),
    ):
        optimizer = DistributedOptimizer(SGD(0.1), **wrapped)
        require_error(partial(fit, optimizer, 1 + tfscale.rank(), **options), TOLD)
    optimizer = DistributedOptimizer(SGD(0.1))
    require_equal_ranks(fit(optimizer).variables)


@sizes(2)
def case_local_variables_may_differ_from_the_start():
    own, shared = tf.Variable([float(tfscale.rank())]), tf.Variable([1.0])
    optimizer = DistributedOptimizer(SGD(0.1))
    optimizer.register_local_var(own)
    optimizer.apply([tf.ones(1), tf.ones(1)], [own, shared])
    alone = tfscale.add_process_set([0])
    own_sets = DistributedOptimizer(SGD(0.1), process_set=alone)
    own_sets.apply([tf.ones(1)], [tf.Variable([float(tfscale.rank())])])


@sizes(2, 3, timeout_s=60)
def case_callbacks_of_one_rank_are_named():
    """Ranks without any wait in their first step, before they form groups."""
    exchanges = {0: "allreduce", 1: tfscale.LocalSGD(tfscale.size(), 4), 2: Sharded()}
    for chosen in range(tfscale.size()):
        others = ", ".join(str(r) for r in range(tfscale.size()) if r != chosen)
        callbacks = [MetricAverageCallback()] if tfscale.rank() == chosen else []
        given, none = f"MetricAverageCallback on rank {chosen}", f"none on rank {others}"
        first, second = (given, none) if chosen == 0 else (none, given)
        require_error(
            partial(
                fit, DistributedOptimizer(SGD(0.1), exchange=exchanges[chosen]), callbacks=callbacks
            ),
            f"Received: {first} and {second}. ",
        )


def spoiled():
    """Data whose third batch has NaN on the last rank."""
    x, clean, y = data()
    return None, x if tfscale.rank() == tfscale.size() - 1 else clean, y


@sizes(1, 2, 3, timeout_s=180)
def case_the_first_nonfinite_gradient_is_told_by_its_rank():
    rank = tfscale.size() - 1
    expected = f"NaN or infinity in step 3, on rank {rank} in "
    for compiled, options in (
        ({}, {}),
        ({}, {"exchange": Sharded()}),
        ({"run_eagerly": True}, {}),
        ({}, {"nonfinite": "ignore"}),
    ):
        keras.utils.clear_session()
        optimizer = DistributedOptimizer(SGD(0.1), **options)
        texts = warnings_of_ranks(lambda o=optimizer, c=compiled: fit(o, data_of=spoiled, **c))
        is_told = tfscale.size() > 1 and "nonfinite" not in options
        for other, text in enumerate(texts):
            is_here = is_told and other == rank
            assert text.count("gradients must be finite") == is_here, (options, texts)
            assert (expected in text and "dense/kernel" in text) == is_here, (options, texts)
