"""Reductions of metric states over ranks, recognised in their updates."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale.internals.trace import changes_of, probe

ops = keras.ops


def change(update):
    """Return the effect of an update on a state of three numbers, given other numbers."""
    state = tf.Variable([1.0, 2.0, 3.0])
    others = tf.Variable([1.0, 2.0, 3.0])
    graph = probe(lambda x: update(state, x, others), (tf.ones((4, 3)),), {})
    return changes_of(graph, 0, [state, others])[0]


ADDS = {
    "assign_add": lambda v, x, w: v.assign_add(tf.reduce_sum(x, 0)),
    "assign_sub": lambda v, x, w: v.assign_sub(tf.reduce_sum(x, 0)),
    "value_plus": lambda v, x, w: v.assign(v + tf.reduce_sum(x, 0)),
    "plus_value": lambda v, x, w: v.assign(tf.reduce_sum(x, 0) + v),
    "minus": lambda v, x, w: v.assign(v - tf.reduce_mean(x, 0)),
    "twice": lambda v, x, w: (v.assign_add(x[0]), v.assign(v + x[1])),
    "sum_of_three": lambda v, x, w: v.assign(tf.add_n([x[0], v.read_value(), x[1]])),
    "one_of_them": lambda v, x, w: v.assign(tf.tensor_scatter_nd_add(v, [[1]], [x[0, 0]])),
    "scatter": lambda v, x, w: v.scatter_add(tf.IndexedSlices(x[0, :1], [2])),
    "where": lambda v, x, w: v.assign(tf.where(x[0] > 0, v + x[0], v)),
    "in_float64": lambda v, x, w: v.assign(
        tf.cast(tf.cast(v, tf.float64) + tf.cast(x[0], tf.float64), tf.float32)
    ),
}
COMPARES = {
    "max": lambda v, x, w: v.assign(tf.maximum(v, tf.reduce_max(x, 0))),
    "max_of_all": lambda v, x, w: v.assign(ops.maximum(ops.max(ops.abs(x)), v)),
    "min": lambda v, x, w: v.assign(tf.minimum(v, tf.reduce_min(x, 0))),
}
OTHERS = {
    "last": lambda v, x, w: v.assign(x[0]),
    "moving_average": lambda v, x, w: v.assign(0.9 * v + 0.1 * x[0]),
    "towards_the_mean": lambda v, x, w: v.assign_add((x[0] - v) / 10.0),
    "product": lambda v, x, w: v.assign(v * x[0]),
    "doubled": lambda v, x, w: v.assign(v + v),
    "subtracted_from": lambda v, x, w: v.assign(x[0] - v),
    "times_another_state": lambda v, x, w: v.assign_add(x[0] * w),
    "rounded": lambda v, x, w: v.assign(tf.cast(tf.cast(v + 0.5 * x[0], tf.int32), tf.float32)),
    "best_mean": lambda v, x, w: v.assign(tf.maximum(v, tf.reduce_mean(x, 0))),
    "max_over_columns": lambda v, x, w: v.assign(tf.maximum(v, tf.reduce_max(x[:3], 1))),
    "added_and_compared": lambda v, x, w: v.assign(tf.maximum(v + x[0], tf.reduce_max(x, 0))),
    "in_a_branch": lambda v, x, w: tf.cond(
        x[0, 0] > 0, lambda: v.assign(2.0 * v), lambda: v.read_value()
    ),
    "condition": lambda v, x, w: v.assign(tf.where(v > 0, v + x[0], v)),
}


@pytest.mark.parametrize("name", ADDS)
def test_updates_that_add(name):
    assert change(ADDS[name]) == "sum"


@pytest.mark.parametrize("name", COMPARES)
def test_updates_that_compare(name):
    assert change(COMPARES[name]) == name[:3]


@pytest.mark.parametrize("name", OTHERS)
def test_updates_of_which_nothing_is_known(name):
    assert change(OTHERS[name]) == "other"


@pytest.mark.parametrize("name", ["read", "nothing"])
def test_a_state_that_stays(name):
    update = {"read": lambda v, x, w: w.assign_add(v), "nothing": lambda v, x, w: x}[name]
    assert change(update) == "none"


# Keras's own metrics: the states of two parts, added, are those of the whole.

RNG = np.random.default_rng(0)
ARGUMENTS = {
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "MeanIoU": {"num_classes": 3},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
SPARSE = ("IoU", "MeanIoU")
OF_ONE_ARGUMENT = ("Mean", "Sum")
KERAS = {
    name: item
    for name, item in vars(keras.metrics).items()
    if inspect.isclass(item) and name not in ("Metric",) and issubclass(item, keras.metrics.Metric)
}


def batch_for(name):
    scores = RNG.uniform(0.01, 0.99, (12, 3)).astype("float32")
    scores /= scores.sum(axis=1, keepdims=True)
    one_hot = np.eye(3, dtype="float32")[RNG.integers(0, 3, 12)]
    if name in SPARSE:
        return RNG.integers(0, 3, 12), RNG.integers(0, 3, 12)
    if name in OF_ONE_ARGUMENT:
        return (scores,)
    if name.startswith("Sparse"):
        return RNG.integers(0, 3, (12, 1)), scores
    return one_hot, scores


@pytest.mark.parametrize("name", KERAS)
def test_states_of_kerass_metrics_add(name):
    def states(*arrays):
        metric = KERAS[name](**ARGUMENTS.get(name, {}))
        metric.update_state(*arrays)
        return [np.asarray(variable) for variable in metric.variables]

    batch = batch_for(name)
    parts = [states(*(array[rows] for array in batch)) for rows in (slice(5), slice(5, 12))]
    whole = states(*batch)
    assert whole
    for of_whole, *of_parts in zip(whole, *parts, strict=True):
        np.testing.assert_allclose(sum(of_parts), of_whole, rtol=1e-5)
