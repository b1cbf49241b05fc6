"""Ranks that do not fit together: each difference is named, alike on all ranks."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import outcome
from tests.parallel.agreement_model import SGD, batches, train
from tfscale import DistributedOptimizer
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BatchSizeSchedule,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    ParameterAveraging,
    RankZero,
)
from tfscale.callbacks.synchronize import ConsistencyCheck


class Drift(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and is_odd():
            self.model.layers[0].bias.assign_add(tf.ones(3))


def is_odd():
    return tfscale.rank() == tfscale.size() - 1


def wrapped(inner=None, **options):
    return {"optimizer": DistributedOptimizer(inner or SGD(0.1), **options)}


def growing(**settings):
    data = batches(1)["data"]
    adaptive = AdaptiveBatchSize(data, 24, log_path=None, **settings)
    return {"data": data, "callbacks": [adaptive]}


def other_versions():
    with mock.patch(
        "tfscale.fit.agreement.versions", lambda: "tfscale 2" if is_odd() else "tfscale 1"
    ):
        train()


# The arguments of `train` on the last rank and on the others, and what the error says.
TABLE = """
width=4 | | /kernel (2, 4) float32 trainable=True on rank {last}
**wrapped(keras.optimizers.Adam(0.1)) | **momentum(0.0) | class=SGD on rank {rest} and class=Adam
**momentum(0.5) | **momentum(0.0) | momentum=0.0 on rank {rest} and momentum=0.5 on rank {last}
**scaled(0.5) | **scaled(0.0) | inner momentum=0.0 on rank {rest} and inner momentum=0.5 on rank
**wrapped(SGD(0.5)) | **wrapped(SGD(0.25)) | learning_rate=0.25 on rank {rest} and learning_rate=0.5
**buckets(1) | **buckets(2) | exchange=Allreduce(bucket_mb=2, overlap=True) on rank {rest} and
**wrapped(backward_passes_per_step=2) | | backward_passes_per_step=1 on rank {rest} and
**wrapped(compression=tfscale.Compression.fp16) | | : compression=
**wrapped(nonfinite="raise") | | nonfinite=warn on rank {rest} and nonfinite=raise on rank {last}
batch_size=8, n=32 | | 4 on rank {rest} and 8 on rank {last}
n=32 | | steps and epochs must be the same on all ranks. Received: steps=
**batches(2) | **batches(1) | Received: seed=1 on rank {rest} and seed=2 on rank {last}
run_eagerly=True | | Received: run_eagerly=False on
callbacks=[AVERAGE] | | no number 0 on rank {rest} and number 0: MetricAverageCallback
**scheduled(24) | **scheduled(12) | sizes={{1: 12}}, sharded=False) on rank {rest} and
**growing(interval=1) | **growing(interval=2) | : AdaptiveBatchSize(
**averaged(2) | **averaged(1) | ParameterAveraging(every_n_epochs=1,
callbacks=[Drift(), CHECK] | callbacks=[Drift(), CHECK] | /bias (variable
""".strip()
AVERAGE, START = MetricAverageCallback(), BroadcastGlobalVariablesCallback(0)
CHECK = ConsistencyCheck()


def momentum(value):
    return wrapped(SGD(0.1, momentum=value))


def scaled(value):
    return wrapped(keras.optimizers.LossScaleOptimizer(SGD(0.1, momentum=value)))


def buckets(size):
    return wrapped(exchange=tfscale.Allreduce(bucket_mb=size))


def scheduled(size):
    return {**batches(1), "callbacks": [BatchSizeSchedule({1: size})]}


def averaged(n):
    return {"callbacks": [ParameterAveraging(n)], "optimizer": SGD(0.1)}


@sizes(2, 3, timeout_s=180)
def case_each_difference_is_named():
    last = tfscale.size() - 1
    names = {"rest": ", ".join(map(str, range(last))), "last": last}
    for row in TABLE.splitlines():
        odd, other, text = map(str.strip, row.split("|"))
        arguments = eval(f"dict({odd if is_odd() else other})")
        texts = tfscale.allgather_object(outcome(lambda given=arguments: train(**given)))
        assert len(set(texts)) == 1, (row, texts)
        assert texts[0].startswith("ExchangeError: "), (row, texts[0])
        assert text.format(**names) in texts[0], (row, texts[0])
    texts = tfscale.allgather_object(outcome(other_versions))
    assert len(set(texts)) == 1, texts
    assert f"tfscale 1 on rank {names['rest']} and tfscale 2 on rank {last}" in texts[0], texts


@sizes(2, timeout_s=120)
def case_what_may_differ():
    """Orders, rates that are broadcast, silent callbacks, and models of ranks that train apart."""
    train(callbacks=[AVERAGE, START] if is_odd() else [START, AVERAGE])
    rate = 0.1 * (1 + tfscale.rank())
    extra = [RankZero(keras.callbacks.TerminateOnNaN())] if is_odd() else []
    callbacks = [BroadcastGlobalVariablesCallback(0), *extra]
    model = train(DistributedOptimizer(SGD(rate)), callbacks=callbacks)
    assert float(model.optimizer.learning_rate) == np.float32(0.1)
    alone = [tfscale.add_process_set([rank]) for rank in range(tfscale.size())]
    own = DistributedOptimizer(SGD(0.1), process_set=alone[tfscale.rank()])
    train(own, width=3 + tfscale.rank())
