"""A wide model on several hosts: sums in segments, data read from the memory of other ranks.

Run by test_hosts.py on several layouts. Other cases exchange so little that every vector comes
whole to every rank.
"""

from collections.abc import Callable

import keras
import numpy as np

import tfscale
from tests.helpers.equality import OPTIMIZERS
from tests.helpers.ranks import float64, values_of
from tests.parallel import cases_equality, cases_local_sgd, cases_parameter_averaging
from tests.parallel.local_sgd_reference import STEPS, ByHand
from tfscale import Sum
from tfscale.testing import require_identical

# Above 32 KiB: activations and output gradients of the 6 samples of a rank, statistics of a layer;
# above 400 KiB: a kernel.
WIDTH = 2304


def wide_model(*after: Callable[[], keras.layers.Layer]) -> keras.Model:
    """Return three dense layers, and others after the first."""
    layers = [keras.layers.Dense(WIDTH, activation="tanh"), *(layer() for layer in after)]
    layers += [keras.layers.Dense(24, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def require_same_bits(train: Callable[[], list[np.ndarray]]) -> None:
    """Train twice: all ranks end with the same bits, both times."""
    first = train()
    require_identical(train(), first)
    for theirs in tfscale.allgather_object(first):
        require_identical(theirs, first)


def check(exchange, rule="momentum", build=wide_model, local_build=None):
    cases_equality.check(build, OPTIMIZERS[rule], exchange, local_build, n_runs=2)


def case_allreduce_and_sync_batch_normalization():
    check(
        "allreduce",
        build=lambda: wide_model(keras.layers.BatchNormalization),
        local_build=lambda: wide_model(tfscale.SyncBatchNormalization),
    )


def case_sharded_chunks_and_replicated_layers():
    check(tfscale.Sharded(dense="weights"), "adam")
    check(tfscale.Chunked(first_chunk_layers=1, replicated_dense=2))


def case_groups_that_average():
    """Groups are consecutive: on hosts of one rank they have two hosts, else averages do."""
    groups, make = 2 if tfscale.size() == 4 else 3, OPTIMIZERS["momentum"]
    strategy = tfscale.LocalSGD(groups, interval=3)
    with float64():
        expected = ByHand(make, groups, strategy, build=wide_model).train(STEPS)

        def train() -> list[np.ndarray]:
            model = cases_local_sgd.train(make, strategy, build=wide_model)
            cases_local_sgd.compare(model, expected)
            return values_of(model.trainable_variables)

        require_same_bits(train)


def case_parameter_averaging():
    options = {"lam": 0.0, "n_epochs": 2, "n_outputs": 8192}

    def train() -> list[np.ndarray]:
        averaging = tfscale.callbacks.ParameterAveraging()
        model = cases_parameter_averaging.check(averaging, range(2), **options)
        return model.get_weights()

    require_same_bits(train)


def case_sets_of_ranks_of_several_hosts():
    """All ranks but the first: of two hosts of two, one rank of one and both of the other."""
    rank, members = tfscale.rank(), tfscale.add_process_set(range(1, tfscale.size()))
    if not members.included():
        return
    n, here = members.size(), members.rank()
    numbers = np.arange(60_000.0)  # 480 KB
    every = [numbers * (r + 1) for r in members.ranks]
    own, total, last = every[here], sum(every), members.ranks[-1]
    mine = [np.split(values, n)[here] for values in every]
    for call, expected in (
        (lambda: tfscale.allreduce(own, Sum, process_set=members), total),
        (lambda: tfscale.reducescatter(own, Sum, process_set=members), np.split(total, n)[here]),
        (lambda: tfscale.allgather(own, process_set=members), np.concatenate(every)),
        (lambda: tfscale.broadcast(own, last, process_set=members), every[-1]),
        (lambda: tfscale.alltoall(own, process_set=members), np.concatenate(mine)),
    ):
        np.testing.assert_array_equal(call(), expected, err_msg=f"rank {rank}")
