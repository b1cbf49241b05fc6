"""Moving statistics over ranks; models that are hard to build; several optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.fake_ranks import FakeRanks, single_job  # noqa: F401
from tests.unit.callback_models import compiled, data, fit, functional
from tfscale.callbacks import BroadcastGlobalVariablesCallback, ConsistencyCheck, NonTrainableState
from tfscale.checkpoints import variables as model_state
from tfscale.config import ExchangeError


def test_frozen_layers_seeds_and_counters_are_no_averaged_state():
    inner = functional()
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dropout(0.1)])
    inner.get_layer("hidden").trainable = False
    names = [variable.path for variable in model_state.non_trainable_state(model)]
    assert names == ["normalize/moving_mean", "normalize/moving_variance"]


def alike(n):
    models = [compiled(functional(), rate=0.0) for _ in range(n)]
    for model in models:
        model.set_weights(models[0].get_weights())
    return models


@pytest.mark.parametrize("mode", ["average", "local"])
def test_moving_statistics_are_united_before_validation(mode):
    models = alike(3)
    own = []
    for seed, model in enumerate(models):
        fit(model, [], seed=seed)
        own.append(model.get_layer("normalize").moving_mean.numpy().copy())
    for model in models:
        model.get_layer("normalize").moving_mean.assign([0.0, 0.0])
    at_validation = [None] * 3

    class Look(keras.callbacks.Callback):
        def __init__(self, rank):
            super().__init__()
            self.rank = rank

        def on_test_begin(self, logs=None):
            mean = self.model.get_layer("normalize").moving_mean
            at_validation[self.rank] = mean.numpy().copy()

    def body(rank):
        callbacks = [NonTrainableState(mode), Look(rank)]
        fit(models[rank], callbacks, seed=rank, validation_data=data(9))

    assert FakeRanks(3).run(body) == [None] * 3
    expected = [np.mean(own, axis=0)] * 3 if mode == "average" else own
    for mine, wanted in zip(at_validation, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-7)


def test_a_rank_with_nan_is_left_out_of_the_average(caplog):
    """Variable by variable; where no rank has a finite value each keeps its own."""
    models = [compiled(functional(), rate=0.0) for _ in range(3)]
    for rank, model in enumerate(models):
        layer = model.get_layer("normalize")
        layer.moving_mean.assign([float(rank), np.inf if rank == 1 else 5.0])
        layer.moving_variance.assign([np.nan, 1.0])

    def body(rank):
        callback = NonTrainableState()
        callback.set_model(models[rank])
        callback.act()
        return [v.numpy() for v in model_state.non_trainable_state(models[rank])]

    for mean, variance in FakeRanks(3).run(body):
        np.testing.assert_array_equal(mean, [1.0, 5.0])
        np.testing.assert_array_equal(variance, [np.nan, 1.0])
    text = "Rank 1 has NaN or infinity in normalize/moving_mean, normalize/moving_variance, and"
    assert text in caplog.text


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 3}])
def test_statistics_of_a_run_with_a_skipped_step_are_those_without_it(options):
    """Also where another layer's state has been infinite all along."""

    class Least(keras.layers.Layer):
        def build(self, shape):
            least = keras.initializers.Constant(np.inf)
            self.least = self.add_weight(initializer=least, trainable=False)

        def call(self, x):
            return x

    def train(x):
        keras.utils.set_random_seed(1)
        layers = keras.layers
        model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(momentum=0.5),
                                  Least(), layers.Dense(1)])  # fmt: skip
        optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), nonfinite="skip")
        model.compile(optimizer, "mse", **options)
        callback = tfscale.callbacks.Callback()
        model.fit(x, np.ones((len(x), 1)), 4, verbose=0, shuffle=False, callbacks=[callback])
        return model, optimizer.n_skipped_steps

    x, _ = data(3, samples=20)
    spoiled = np.insert(x, 8, [[np.nan] * 3, *[[1.0] * 3] * 3], axis=0)
    (with_it, n), (without, _) = train(spoiled), train(x)
    assert n == 1
    for own, wanted in zip(with_it.variables, without.variables, strict=True):
        np.testing.assert_array_equal(own.numpy(), wanted.numpy())


@pytest.mark.parametrize("steps", ["unknown", "stopped", "outside of a list"])
def test_moving_statistics_are_united_when_the_last_batch_is_not_known(steps):
    models = alike(2)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    def body(rank):
        x, y = data(rank)
        callback = NonTrainableState()
        if steps == "unknown":
            batches = ((x[i : i + 4], y[i : i + 4]) for i in (0, 4))
            models[rank].fit(batches, verbose=0, callbacks=[callback])
        elif steps == "stopped":
            fit(models[rank], [callback, Stop()], seed=rank)
        else:
            fit(models[rank], callback, seed=rank)
        return models[rank].get_layer("normalize").moving_mean.numpy()

    first, second = FakeRanks(2).run(body)
    np.testing.assert_array_equal(first, second)
    assert np.any(first != 0.0)


class TwoOptimizers(keras.Model):
    """A model whose train_step has an optimizer for each of two layers."""

    def __init__(self, rate):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.second = keras.layers.Dense(1)
        self.others = [keras.optimizers.SGD(rate, momentum=0.5)]

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - tf.cast(y, tf.float32)))
        first, second = self.first.trainable_variables, self.second.trainable_variables
        gradients = tape.gradient(loss, first + second)
        self.optimizer.apply(gradients[:2], first)
        self.others[0].apply(gradients[2:], second)
        return {"loss": loss}


def test_all_optimizers_of_a_train_step_are_broadcast_and_checked():
    models = []
    for rank in range(2):
        keras.utils.set_random_seed(rank)
        models.append(TwoOptimizers(0.1 * (rank + 1)))
        models[-1](data(0)[0])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(models[-1].first.trainable_variables)
        compiled(models[-1], optimizer=optimizer)

    def body(rank):
        fit(models[rank], [BroadcastGlobalVariablesCallback(1)], seed=0)
        models[rank].others[0].momentums[0].assign_add(np.full((2, 1), float(rank)))
        check = ConsistencyCheck()
        check.set_model(models[rank])
        check.check("at last")

    for error in FakeRanks(2).run(body):
        assert isinstance(error, ExchangeError) and "momentum' on ranks [1]" in str(error)
    rates = [float(model.others[0].learning_rate.numpy()) for model in models]
    assert rates == [pytest.approx(0.2)] * 2
