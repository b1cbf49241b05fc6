"""What a distributed optimizer or tape refuses, and with which words."""

import re

import keras
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.fake_ranks import single_job  # noqa: F401
from tfscale import DistributedGradientTape, DistributedOptimizer
from tfscale.config import ConfigError
from tfscale.optimizer.distributed import PartialDistributedOptimizer

SGD, LSO = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": "Min"}, "Received: op='Min'."),
        ({"op": tfscale.Sum, "gradient_predivide_factor": 2.0}, "factor=2.0, op=Sum."),
        ({"gradient_predivide_factor": 0.0}, "Received: gradient_predivide_factor=0.0."),
        ({"compression": "fp16"}, "compression must be Compression.none, fp16, bf16, int8"),
        ({"num_groups": -1}, "groups must be a number of 0 or more"),
        ({"groups": -1}, "Received: num_groups=-1, groups=None."),
        ({"groups": "dense"}, "or lists of variables that are sent together."),
        ({"groups": ["dense"]}, "or lists of variables that are sent together."),
        ({"process_set": [0]}, "process_set must be a ProcessSet. Received: process_set=[0]."),
        ({"exchange": "fast"}, "exchange must be one of 'allreduce'"),
        ({"exchange": tfscale.Allreduce}, "or a strategy such as tfscale.Allreduce(bucket_mb=4)."),
    ],
)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda **options: DistributedOptimizer(SGD(), **options),
        lambda **options: DistributedGradientTape(tf.GradientTape(), **options),
        lambda **options: PartialDistributedOptimizer(SGD(), **options),
    ],
)
def test_options_that_do_not_fit(wrap, options, text):
    with pytest.raises(ConfigError) as error:
        wrap(**options)
    assert text in str(error.value)


SUMMED = tfscale.LocalSGD(groups=2, average="gradients")
REPLICATED = (
    tfscale.Chunked(replicated_dense=1),
    *(tfscale.Sharded(dense=dense) for dense in ("partial", "replicated")),
)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DistributedOptimizer(SGD(), nonfinite="stop"), "nonfinite must be 'warn', "),
        (lambda: DistributedOptimizer(SGD(), exchange=SUMMED, nonfinite="skip"), "adds up those"),
        (lambda: DistributedOptimizer("sgd"), "must be a Keras optimizer. Received: str."),
        (lambda: DistributedOptimizer(SGD), "for example keras.optimizers.SGD(0.1)."),
        *(
            (lambda w=w: DistributedOptimizer(w()), "An optimizer must be wrapped once")
            for w in (lambda: DistributedOptimizer(SGD()), lambda: LSO(DistributedOptimizer(SGD())))
        ),
        *(
            (lambda n=n: DistributedOptimizer(SGD(), backward_passes_per_step=n), "1 or more")
            for n in (0, -1, 1.5)
        ),
        *(
            (
                lambda e=e: DistributedOptimizer(SGD(), exchange=e, backward_passes_per_step=2),
                "exchange activations in every backward pass",
            )
            for e in (*REPLICATED, *(tfscale.LocalSGD(2, within=e) for e in REPLICATED))
        ),
        (
            lambda: DistributedOptimizer(
                LSO(SGD(gradient_accumulation_steps=4)), backward_passes_per_step=2
            ),
            "Received: both, the latter 4. Multiply",
        ),
        (lambda: PartialDistributedOptimizer(SGD(), local_layers=["dense"]), "Received: str."),
        *(
            (lambda n=n: tfscale.Allreduce(bucket_mb=n), "must be 'auto' or a number of MiB")
            for n in (-1, "all", None)
        ),
    ],
)
def test_what_cannot_be(make, text):
    with pytest.raises(ConfigError) as error:
        make()
    assert text in str(error.value)


class Bypassed(SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients((2 * g, v) for g, v in grads_and_vars)


class Doubled(SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply([2 * g for g in grads], trainable_variables)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, LSO])
def test_reduced_gradients_go_to_apply(wrap):
    text = "Received: Bypassed, which overrides `apply_gradients`. Override `apply` instead."
    with pytest.raises(ConfigError, match=re.escape(text)):
        DistributedOptimizer(wrap(Bypassed(0.5)))
    weight = keras.Variable([1.0])
    DistributedOptimizer(Doubled(0.5)).apply([tf.constant([1.0])], [weight])
    assert float(weight.numpy()[0]) == 0.0


def test_keras_on_another_library_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ConfigError, match="Received: the Keras backend 'jax'. Set KERAS_BACKEND="):
        DistributedOptimizer(SGD())


def test_arguments_that_change_nothing(tmp_path):
    weight = keras.Variable([1.0])
    tfscale.broadcast_variables([weight], root_rank=0, inplace=True)
    model = keras.Sequential([keras.Input((2,)), tfscale.SyncBatchNormalization(fused=False)])
    model.save(tmp_path / "plain.keras")  # not compiled
    for options in ({}, {"legacy_opts": True}):
        loaded = tfscale.load_model(tmp_path / "plain.keras", **options)
        assert loaded.count_params() == model.count_params() and not loaded.compiled
    for fused in (True, None):
        with pytest.raises(ConfigError, match="the plain kernels of Keras"):
            tfscale.SyncBatchNormalization(fused=fused)
