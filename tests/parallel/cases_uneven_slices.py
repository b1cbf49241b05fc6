"""`GlobalBatches` whose last batch the ranks do not divide: `fit` trains as one process does.

With 97 samples the last batch has one row, so all ranks but the first have none. With 101 samples
it has 5 rows.
"""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, Interruption, float64, require_error, shared_folder
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BatchSizeSchedule,
    Checkpoint,
    MetricAverageCallback,
    ParameterAveraging,
    Synchronize,
)
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.data.slices import epoch_order
from tfscale.testing import require_close, require_equal_ranks

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(101, 4)), RNG.integers(0, 3, 101)
WEIGHTS = RNG.uniform(size=101)
CLASS_WEIGHT = {0: 0.5, 1: 1.0, 2: 3.0}


def model_of(make_optimizer=lambda inner: inner, *before):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, "tanh"), *before, keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = make_optimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def normalised():
    return keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=2)


def data_of(n, **options):
    return GlobalBatches(X[:n], Y[:n], batch_size=12, **{"shuffle": False, **options})


def require_equal_fits(model, history, alone, expected):
    require_close(model.variables, alone.variables, atol=1e-10)
    require_equal_ranks(model.variables)
    assert history.history.keys() == expected.history.keys()
    for name, values in history.history.items():
        np.testing.assert_allclose(values, expected.history[name], rtol=1e-9, err_msg=name)


@sizes(2, 3, timeout_s=240)
def case_slices_that_differ_train_and_evaluate_as_one_process():
    with float64():
        for n, exchange, weights, class_weight in (
            (97, "allreduce", WEIGHTS, None),
            (97, tfscale.Sharded(), None, CLASS_WEIGHT),
            (101, "allreduce", None, None),
        ):
            own = {} if weights is None else {"sample_weight": weights[:n]}
            options = {"epochs": 2, "verbose": 0, "class_weight": class_weight}
            alone = model_of(lambda inner: inner, *normalised())
            expected = alone.fit(X[:n], Y[:n], batch_size=12, shuffle=False, **own, **options)
            distribute = functools.partial(tfscale.DistributedOptimizer, exchange=exchange)
            model, data = model_of(distribute, *normalised()), data_of(n, **own)
            history = model.fit(data, callbacks=[Synchronize()], **options)
            require_equal_fits(model, history, alone, expected)
            found = model.evaluate(data, verbose=0, callbacks=[MetricAverageCallback()])
            wanted = alone.evaluate(X[:n], Y[:n], batch_size=12, verbose=0, **own)
            np.testing.assert_allclose(found, wanted, rtol=1e-9)


@sizes(2, 3, timeout_s=240)
def case_other_ways_to_serve_and_call():
    with float64():
        n, options = 97, {"verbose": 0, "epochs": 2}
        alone = model_of()
        expected = alone.fit(X[:n], Y[:n], batch_size=12, shuffle=False, **options)
        rows = tf.data.Dataset.from_tensor_slices((X[:n], Y[:n]))
        records = GlobalBatches.from_dataset(rows, batch_size=12, shuffle_buffer=0)
        for data, steps in ((data_of(n), 1), (records, 1), (data_of(n), 3)):
            model = model_of(tfscale.DistributedOptimizer)
            model.steps_per_execution = steps
            history = model.fit(data, callbacks=[Synchronize()], **options)
            require_equal_fits(model, history, alone, expected)
        # Callbacks in a list that was made before `fit`, validation on the same data, and a batch
        # of this rank alone after it.
        model = model_of(tfscale.DistributedOptimizer)
        listed = keras.callbacks.CallbackList(
            [Synchronize()], add_history=True, model=model, epochs=2, verbose=0
        )
        data = data_of(n)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Your input ran out of data")
            history = model.fit(data, validation_data=data, callbacks=listed, **options)
        alone = model_of()
        expected = alone.fit(
            X[:n], Y[:n], batch_size=12, shuffle=False, validation_data=(X[:n], Y[:n]),
            validation_batch_size=12, **options,
        )  # fmt: skip
        require_equal_fits(model, history, alone, expected)
        model.train_on_batch(X[:6], Y[:6])
        alone.train_on_batch(X[:6], Y[:6])
        require_close(model.variables[:4], alone.variables[:4], atol=1e-10)


@sizes(2, 3, timeout_s=240)
def case_a_shuffled_rest_is_trained_on_and_batches_grow():
    with float64():
        alone, sizes_of_epochs = model_of(), (12, 24, 24)
        for epoch, size in enumerate(sizes_of_epochs):
            order = epoch_order(7, epoch, 101)
            for rows in np.split(order, range(size, 101, size)):
                alone.train_on_batch(X[rows], Y[rows])
        data = data_of(101, shuffle=True, seed=7, drop_remainder=False)
        model = model_of(tfscale.DistributedOptimizer)
        with pytest.raises(Interruption):  # leaves nothing to the next `fit`
            model.fit(data, verbose=0, callbacks=[Synchronize(), InterruptAt(0, 0)])
        model = model_of(tfscale.DistributedOptimizer)
        callbacks = [Synchronize(), BatchSizeSchedule({1: 24})]
        history = model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        assert history.history["batch_size"] == list(sizes_of_epochs)
        require_close(model.variables, alone.variables, atol=1e-10)


@sizes(2, 3, timeout_s=120)
def case_training_resumes_before_the_last_batch():
    with float64(), shared_folder() as folder:
        alone = model_of()
        alone.fit(X[:97], Y[:97], batch_size=12, shuffle=False, epochs=2, verbose=0)
        for others in ([InterruptAt(1, 6)], []):
            model = model_of(tfscale.DistributedOptimizer)
            callbacks = [Synchronize(), Checkpoint(folder, every_n_steps=1, keep=2), *others]
            with contextlib.suppress(Interruption):
                model.fit(data_of(97), epochs=2, verbose=0, callbacks=callbacks)
        require_close(model.variables, alone.variables, atol=1e-10)


@sizes(2, 3)
def case_what_cannot_weigh_ranks_is_refused():
    model = model_of(tfscale.DistributedOptimizer)
    text = "drop_remainder=False needs a last batch that the number of ranks divides"
    require_error(lambda: model.fit(data_of(97), verbose=0), f"ConfigError: {text}", "Synchronize")
    callbacks = [Synchronize(), ParameterAveraging()]
    apart = model_of()
    require_error(
        lambda: apart.fit(data_of(97), verbose=0, callbacks=callbacks),
        "ConfigError: drop_remainder=False needs gradients", "size=",
    )  # fmt: skip
    data = GlobalBatches(X[:97], Y[:97], batch_size=2 * tfscale.size(), shuffle=False)
    grown = AdaptiveBatchSize(data, 24, active_ranks="grow", start_batch_size=4, log_path=None)
    require_error(
        lambda: model.fit(data, verbose=0, callbacks=[Synchronize(), grown]), "ConfigError: "
    )
    with pytest.raises(ConfigError, match=text):
        iter(data_of(97, shuffle=True, drop_remainder=False))
