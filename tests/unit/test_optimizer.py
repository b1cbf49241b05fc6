"""DistributedOptimizer in one process: a transparent proxy, exact cycles, clear errors."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.single_job import single_job  # noqa: F401
from tfscale import DistributedGradientTape, DistributedOptimizer
from tfscale.config import ConfigError
from tfscale.optimizer.distributed import distributed_of

SGD, Adam, LSO = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer


def weight(values=(1.0, 2.0), name="weight"):
    return keras.Variable(np.array(values), dtype="float64", name=name)


def gradient(*values):
    return tf.constant(values, tf.float64)


def test_the_proxy_looks_like_the_optimizer():
    inner = Adam(0.1)
    optimizer = DistributedOptimizer(inner)
    assert isinstance(optimizer, Adam) and isinstance(optimizer, DistributedOptimizer)
    assert optimizer.__class__ is Adam and optimizer.__wrapped__ is inner
    assert keras.optimizers.get(optimizer) is optimizer
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(inner)
    assert distributed_of(optimizer) is distributed_of(LSO(optimizer)) is optimizer
    assert distributed_of(inner) is distributed_of(LSO(inner)) is None


def test_learning_rate_and_other_attributes_pass_through():
    optimizer = DistributedOptimizer(SGD(0.5))
    optimizer.learning_rate = 0.25
    assert float(optimizer.__wrapped__.learning_rate) == 0.25
    optimizer.learning_rate.assign(0.125)
    assert float(optimizer.learning_rate) == 0.125
    optimizer.momentum = 0.9
    assert optimizer.__wrapped__.momentum == 0.9
    scheduled = DistributedOptimizer(SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)))
    assert float(scheduled.learning_rate) == pytest.approx(0.1)
    scaled = DistributedOptimizer(LSO(SGD(0.5)))
    scaled.learning_rate = 0.25
    assert float(scaled.inner_optimizer.learning_rate) == 0.25


def test_apply_without_variables_takes_those_of_build():
    """Also of an optimizer with loss scaling around ours."""
    scaled = LSO(DistributedOptimizer(SGD(2.0)), initial_scale=2.0)
    for optimizer in (DistributedOptimizer(SGD(1.0)), scaled):
        variable = weight()
        optimizer.build([variable])
        optimizer.apply([gradient(1.0, 2.0)])
        np.testing.assert_array_equal(variable.numpy(), [0.0, 0.0])


@pytest.mark.parametrize("make", [Adam, lambda: LSO(SGD(0.1)), lambda: SGD(0.25, momentum=0.5)])
def test_config_round_trip_of_instance_and_class(make):
    optimizer = DistributedOptimizer(make())
    config = optimizer.get_config()
    copied = optimizer.from_config(copy.deepcopy(config))
    assert copied.get_config() == config
    assert type(copied) is DistributedOptimizer and copied.__wrapped__ is not optimizer.__wrapped__
    again = optimizer.__class__.from_config(copy.deepcopy(config))
    for plain in (again, pickle.loads(pickle.dumps(optimizer))):
        assert plain.get_config() == config and type(plain) is type(optimizer.__wrapped__)


@pytest.mark.parametrize("do_copy", [copy.copy, copy.deepcopy])
def test_copies_stay_distributed(do_copy):
    optimizer = DistributedOptimizer(Adam(0.25), backward_passes_per_step=2)
    variable = weight()
    optimizer.register_local_var(variable)
    optimizer.apply([gradient(1.0, 1.0)], [variable])
    copied = do_copy(optimizer)
    assert type(copied) is DistributedOptimizer
    assert copied.__wrapped__ is not optimizer.__wrapped__
    assert float(copied.learning_rate) == 0.25
    assert copied.is_local_var(variable)
    other = weight()
    for number in (1.0, 2.0):  # the original's cycle had begun, the copy's begins again
        np.testing.assert_array_equal(other.numpy(), [1.0, 2.0])
        copied.apply([gradient(number, number)], [other])
    assert (other.numpy() != [1.0, 2.0]).all()


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize(("is_mean", "expected"), [(False, -3.0), (True, -1.5)])
def test_cycles_of_batches(is_traced, is_mean, expected):
    optimizer = DistributedOptimizer(
        SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=is_mean
    )
    variable, rows = weight((0.0, 0.0)), weight(((0.0,), (0.0,), (0.0,)), "rows")

    def step(number):
        sparse = tf.IndexedSlices(number[tf.newaxis, tf.newaxis], [1], tf.constant([3, 1]))
        optimizer.apply([tf.fill([2], number), sparse], [variable, rows])

    step = tf.function(step) if is_traced else step
    for number, wanted in ((1.0, 0.0), (2.0, expected), (7.0, expected)):
        step(tf.constant(number, tf.float64))
        np.testing.assert_array_equal(variable.numpy(), [wanted] * 2)
        np.testing.assert_array_equal(rows.numpy(), [[0.0], [wanted], [0.0]])
    assert int(optimizer.iterations) == 3


def test_lars_by_hand():
    """|w| is 5 and |g| is 10: trust is 0.25 * 5 / (10 + 0.5 * 5 + 2.5). A bias has trust 1."""
    options = {"trust_coefficient": 0.25, "weight_decay": 0.5, "epsilon": 2.5}
    rule = tfscale.LARS(1.0, momentum=0.5, **options)
    matrix, bias = weight([[3.0, 4.0]]), weight([1.0, 2.0], "bias")
    DistributedOptimizer(rule).apply([gradient([6.0, 8.0]), gradient(0.5, 1.0)], [matrix, bias])
    np.testing.assert_allclose(matrix.numpy(), [[3 - 7.5 / 12, 4 - 10 / 12]], rtol=1e-12)
    np.testing.assert_array_equal(bias.numpy(), [0.5, 1.0])


@pytest.mark.parametrize("rule", [Adam, lambda rate: SGD(rate, clipnorm=1.0)])
def test_repeated_indices_are_added_up_with_a_warning(rule, caplog, monkeypatch):
    """As Keras does with dense gradients; without tfscale its rules take the parts one by one."""
    monkeypatch.setattr("tfscale.optimizer.rules._warned", set())
    ours, plain, dense = (weight(np.ones((3, 1))) for _ in range(3))
    wrapped, inner, whole = DistributedOptimizer(rule(0.1)), rule(0.1), rule(0.1)
    for _ in range(2):
        values = tf.constant([[1.0], [2.0], [-4.0]], tf.float64)
        slices = tf.IndexedSlices(values, tf.constant([0, 0, 2]), tf.constant([3, 1]))
        wrapped.apply([slices], [ours])
        inner.apply([slices], [plain])
        whole.apply([tf.convert_to_tensor(slices)], [dense])
    np.testing.assert_allclose(ours.numpy(), dense.numpy(), rtol=1e-12)
    assert [v.name for v in wrapped.variables] == [v.name for v in whole.variables]
    assert np.abs(plain.numpy() - dense.numpy()).max() > 1e-3
    assert caplog.text.count("adds up the gradients of an index that occurs repeatedly") == 1
    caplog.clear()
    DistributedOptimizer(SGD(0.1)).apply([slices], [ours])
    DistributedOptimizer(rule(0.1)).apply([gradient([1.0], [2.0], [3.0])], [ours])
    assert not caplog.text


# Refusals.

WRAPPERS = (
    lambda **options: DistributedOptimizer(SGD(), **options),
    lambda **options: DistributedGradientTape(tf.GradientTape(), **options),
    lambda **options: tfscale.PartialDistributedOptimizer(SGD(), **options),
)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": "Min"}, "op='Min'"),
        ({"op": tfscale.Sum, "gradient_predivide_factor": 2.0}, "factor=2.0, op=Sum"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"compression": "fp16"}, "compression must be Compression.none, fp16, bf16, int8"),
        ({"num_groups": -1}, "groups must be a number of 0 or more"),
        ({"groups": -1}, "num_groups=-1, groups=None"),
        ({"groups": "dense"}, "or lists of variables"),
        ({"groups": ["dense"]}, "or lists of variables"),
        ({"process_set": [0]}, r"process_set=\[0\]"),
        ({"exchange": "fast"}, "exchange must be one of 'allreduce'"),
        ({"exchange": tfscale.Allreduce}, r"a strategy such as tfscale.Allreduce\(bucket_mb=4\)"),
    ],
)
def test_options_that_do_not_fit(options, text):
    for wrap in WRAPPERS:
        with pytest.raises(ConfigError, match=text):
            wrap(**options)


SUMMED = tfscale.LocalSGD(groups=2, average="gradients")
PARTIAL, REPLICATED = (tfscale.Sharded(dense=dense) for dense in ("partial", "replicated"))
DENSE = (tfscale.Chunked(replicated_dense=1), PARTIAL, REPLICATED)


@pytest.mark.parametrize(
    ("wrapped", "options", "text"),
    [
        ("sgd", {}, "must be a Keras optimizer. Received: str."),
        (SGD, {}, "for example keras.optimizers.SGD"),
        (DistributedOptimizer(SGD()), {}, "wrapped once"),
        (LSO(DistributedOptimizer(SGD())), {}, "wrapped once"),
        (SGD(), {"nonfinite": "stop"}, "nonfinite must be 'warn', "),
        (SGD(), {"nonfinite": "skip", "exchange": SUMMED}, "excludes average"),
        *((SGD(), {"backward_passes_per_step": n}, "1 or more") for n in (0, -1, 1.5)),
        *(
            (SGD(), {"backward_passes_per_step": 2, "exchange": e}, "must be 1 with this exchange")
            for e in (*DENSE, *(tfscale.LocalSGD(2, within=e) for e in DENSE))
        ),
        (LSO(SGD(gradient_accumulation_steps=4)), {"backward_passes_per_step": 2}, "the latter 4"),
    ],
)
def test_optimizers_that_do_not_fit(wrapped, options, text):
    with pytest.raises(ConfigError, match=text):
        DistributedOptimizer(wrapped, **options)


def test_other_arguments_that_do_not_fit():
    with pytest.raises(ConfigError, match="local_layers.*Received: str"):
        tfscale.PartialDistributedOptimizer(SGD(), local_layers=["dense"])
    for size in (-1, "all", None):
        with pytest.raises(ConfigError, match="bucket_mb"):
            tfscale.Allreduce(bucket_mb=size)


class Bypassed(SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients((2 * g, v) for g, v in grads_and_vars)


class Doubled(SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([2 * g for g in grads], trainable_variables)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, LSO])
def test_reduced_gradients_go_to_apply(wrap):
    with pytest.raises(ConfigError, match="Received: Bypassed, which overrides `apply_gradients`"):
        DistributedOptimizer(wrap(Bypassed(0.5)))
    variable = weight((1.0,))
    DistributedOptimizer(Doubled(0.5)).apply([gradient(1.0)], [variable])
    assert variable.numpy() == [0.0]


def test_keras_on_another_library_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ConfigError, match="the Keras backend 'jax'"):
        DistributedOptimizer(SGD())


def test_arguments_that_change_nothing(tmp_path):
    tfscale.broadcast_variables([weight()], root_rank=0, inplace=True)
    model = keras.Sequential([keras.Input((2,)), tfscale.SyncBatchNormalization(fused=False)])
    model.save(tmp_path / "plain.keras")  # not compiled
    for options in ({}, {"legacy_opts": True}):
        loaded = tfscale.load_model(tmp_path / "plain.keras", **options)
        assert loaded.count_params() == model.count_params() and not loaded.compiled
    for fused in (True, None):
        with pytest.raises(ConfigError, match="the plain kernels of Keras"):
            tfscale.SyncBatchNormalization(fused=fused)
