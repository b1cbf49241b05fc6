"""Metrics of one rank's samples: who takes them for those of all is told."""

from unittest import mock

import keras
import numpy as np

import tfscale
from tests.helpers.spawn import sizes
from tests.parallel.cases_warnings import warnings_of
from tfscale.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback

N = 24


def data(**options):
    x = np.random.default_rng(1).normal(size=(N, 2))
    return tfscale.data.GlobalBatches(x, x[:, :1], batch_size=N // 2, **options)


def compiled():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def told_anew(action):
    with mock.patch("tfscale.comm.warnings._told", set()):
        return warnings_of(action)


@sizes(2)
def case_judges_by_own_metrics_are_told():
    def fit(*callbacks):
        start = BroadcastGlobalVariablesCallback(0)
        compiled().fit(data(), epochs=1, verbose=0, callbacks=[start, *callbacks])

    def judge():
        return keras.callbacks.EarlyStopping("loss", restore_best_weights=True)

    told = "EarlyStopping sees the metrics of each rank's own samples"
    assert told in told_anew(lambda: fit(judge()))
    assert told in told_anew(lambda: fit(judge(), MetricAverageCallback()))
    assert "own samples" not in told_anew(lambda: fit(MetricAverageCallback(), judge()))
    assert "own samples" not in told_anew(fit)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=5)
    assert "ReduceLROnPlateau sees" in told_anew(lambda: fit(plateau))


@sizes(2)
def case_an_evaluation_of_own_slices_is_told():
    model, valid = compiled(), data(shuffle=False, drop_remainder=False)
    told = "evaluate() returns the metrics of this rank's slices"
    assert told in told_anew(lambda: model.evaluate(valid, verbose=0))
    averaged = {"callbacks": [MetricAverageCallback()]}
    assert told not in told_anew(lambda: model.evaluate(valid, verbose=0, **averaged))
    x = np.ones((4, 2))
    assert told not in told_anew(lambda: model.evaluate(x, x[:, :1], verbose=0))
    start = BroadcastGlobalVariablesCallback(0)
    assert told not in told_anew(
        lambda: model.fit(data(), validation_data=valid, verbose=0, callbacks=[start])
    )

    def one_rank_alone():
        if tfscale.rank() == 0:
            model.evaluate(valid, verbose=0)

    assert told in told_anew(one_rank_alone)
