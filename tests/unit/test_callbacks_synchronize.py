"""Broadcast, consistency check and moving statistics, with ranks played by threads."""

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.single_job import single_job  # noqa: F401
from tests.unit.callback_models import Deferred, TwoOptimizers, compiled, data, fit, functional
from tfscale.callbacks.synchronize import (
    BroadcastGlobalVariablesCallback,
    ConsistencyCheck,
    NonTrainableState,
)
from tfscale.checkpoints import variables as model_state
from tfscale.config import ExchangeError
from tfscale.testing import FakeRanks, require_identical


def require_errors(results, *texts):
    for error in results:
        assert isinstance(error, ExchangeError) and all(text in str(error) for text in texts), error


def test_different_models_are_an_error_on_all_ranks():
    models = [compiled(Deferred(units)) for units in (2, 3)]
    for model in models:
        model(data(0)[0])
    callbacks = [[BroadcastGlobalVariablesCallback(0)] for _ in models]  # a thread's own
    results = FakeRanks(2).run(lambda rank: fit(models[rank], callbacks[rank]))
    require_errors(results, "(3, 2)", "(3, 3) float32 trainable=True on rank 1")


def alike(n, **options):
    models = [compiled(functional(), **options) for _ in range(n)]
    for model in models:
        model.set_weights(models[0].get_weights())
    return models


def test_consistency_check_names_variable_and_ranks():
    models = alike(3)

    def disturb(epoch, logs):
        if epoch == 1:
            models[2].optimizer.learning_rate = 0.05

    def body(rank):
        disturbs = [keras.callbacks.LambdaCallback(on_epoch_begin=disturb)] * (rank == 2)
        fit(models[rank], [BroadcastGlobalVariablesCallback(0), *disturbs], seed=0, epochs=3)

    texts = ("at the end of epoch 2", "other hidden/kernel (variable 0) on rank 2 than", "more")
    require_errors(FakeRanks(3).run(body), *texts)


def test_groups_compare_within_groups_only():
    models = alike(4)
    for rank, model in enumerate(models):
        model.set_weights([np.full(w.shape, float(rank // 2)) for w in model.weights])

    def check(groups):
        def body(rank):
            callback = ConsistencyCheck(groups=groups)
            callback.set_model(models[rank])
            callback.check("now")

        return FakeRanks(4).run(body)

    assert check([(0, 1), (2, 3)]) == [None] * 4
    require_errors(check(None), "on rank 2, 3 than on rank 0")
    require_errors(check([(0, 2), (1, 3)]), "on rank 2 than on rank 0", "on rank 3 than on rank 1")


def test_frozen_layers_seeds_and_counters_are_no_averaged_state():
    inner = functional()
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dropout(0.1)])
    inner.get_layer("hidden").trainable = False
    names = [variable.path for variable in model_state.non_trainable_state(model)]
    assert names == ["normalize/moving_mean", "normalize/moving_variance"]


def moving_mean(model):
    return model.get_layer("normalize").moving_mean


@pytest.mark.parametrize("mode", ["average", "local"])
def test_moving_statistics_are_united_before_validation(mode):
    models = alike(3, rate=0.0)
    own, at_validation = [], {}
    for seed, model in enumerate(models):
        fit(model, [], seed=seed)
        own.append(moving_mean(model).numpy())
    for model in models:
        moving_mean(model).assign([0.0, 0.0])

    def body(rank):
        def look(logs):
            at_validation[rank] = moving_mean(models[rank]).numpy()

        callbacks = [NonTrainableState(mode), keras.callbacks.LambdaCallback(on_test_begin=look)]
        fit(models[rank], callbacks, seed=rank, validation_data=data(9))

    assert FakeRanks(3).run(body) == [None] * 3
    expected = [np.mean(own, axis=0)] * 3 if mode == "average" else own
    for rank, wanted in enumerate(expected):
        np.testing.assert_allclose(at_validation[rank], wanted, rtol=1e-6, atol=1e-7)


def test_a_rank_with_nan_is_left_out_of_the_average(caplog):
    """Variable by variable; where no rank has a finite value each keeps its own."""
    models = alike(3)
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
        callbacks = [tfscale.callbacks.Callback()]
        model.fit(x, np.ones((len(x), 1)), 4, verbose=0, shuffle=False, callbacks=callbacks)
        return [v.numpy() for v in model.variables], optimizer.n_skipped_steps

    x, _ = data(3, samples=20)
    spoiled = np.insert(x, 8, [[np.nan] * 3, *[[1.0] * 3] * 3], axis=0)
    (with_it, n), (without, _) = train(spoiled), train(x)
    assert n == 1
    require_identical(with_it, without)


@pytest.mark.parametrize("steps", ["unknown", "stopped", "outside of a list"])
def test_moving_statistics_are_united_when_the_last_batch_is_not_known(steps):
    models = alike(2, rate=0.0)

    def body(rank):
        x, y = data(rank)
        unite, model = NonTrainableState(), models[rank]
        stop = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", True)
        )
        if steps == "unknown":
            batches = ((x[i : i + 4], y[i : i + 4]) for i in (0, 4))
            model.fit(batches, verbose=0, callbacks=[unite])
        else:
            fit(model, [unite, stop] if steps == "stopped" else unite, seed=rank)
        return moving_mean(model).numpy()

    first, second = FakeRanks(2).run(body)
    np.testing.assert_array_equal(first, second)
    assert np.any(first != 0.0)


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

    require_errors(FakeRanks(2).run(body), ") on rank 1 than on rank 0")
    rates = [float(model.others[0].learning_rate.numpy()) for model in models]
    assert rates == [pytest.approx(0.2)] * 2
