"""Callbacks on real ranks; expected values are those of one process that sees all samples."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.models import Deferred, functional
from tests.helpers.ranks import StopAt, require_error, shared_folder
from tests.parallel.fit_model import compiled, data, metrics, own
from tfscale import DistributedOptimizer, Sharded
from tfscale.callbacks import (
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    RankZero,
    Synchronize,
)
from tfscale.callbacks.synchronize import ConsistencyCheck
from tfscale.data import GlobalBatches
from tfscale.testing import require_equal_ranks, require_identical


def fit(model, arrays, callbacks, epochs=2, **options):
    x, y = arrays
    options = {"batch_size": len(x) // 2, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **options).history


class WeightsBeforeFirstStep(keras.callbacks.Callback):
    """Records the weights with which the first step begins. Comes before the broadcast."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def on_train_begin(self, logs=None):
        step = self.model.train_function

        def first(iterator):
            if self.seen is None:
                state = self.model.weights + self.model.optimizer.variables
                self.seen = [v.numpy().copy() for v in state]
            return step(iterator)

        self.model.train_function = first


def case_last_rank_is_root():
    """Its weights, state and rate begin the first step, also where that step builds the model."""
    root = tfscale.size() - 1
    for build in (functional, Deferred):
        keras.utils.set_random_seed(tfscale.rank())
        model = compiled(build(), keras.optimizers.Adam(0.01 * (1 + tfscale.rank())))
        kernels = [model.get_layer("hidden").kernel.numpy()] if model.built else []
        before = WeightsBeforeFirstStep()
        fit(model, own(), [before, BroadcastGlobalVariablesCallback(root)])
        every = tfscale.allgather_object((kernels, before.seen))
        for _, theirs in every:
            require_identical(theirs, every[root][1])
        require_identical(before.seen[: len(kernels)], every[root][0])
        require_equal_ranks([*model.weights, *model.optimizer.variables])


@sizes(2, 3)
def case_local_variables_stay_local():
    keras.utils.set_random_seed(tfscale.rank())
    model = functional(has_statistics=False)
    layer = model.get_layer("hidden")
    local = layer.trainable_variables
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = tfscale.PartialDistributedOptimizer(inner, local_layers=layer)
    model.compile(optimizer, "binary_crossentropy")
    root = tfscale.size() - 1
    fit(model, own(), [BroadcastGlobalVariablesCallback(root, local_variables=local)])
    require_equal_ranks(model.get_layer("out").trainable_variables)
    kernels = tfscale.allgather_object(local[0].numpy())
    assert not np.array_equal(kernels[0], kernels[1])


def case_metrics_equal_one_process():
    samples = [2 * (3 + 5 * rank) for rank in range(tfscale.size())]
    n, end = samples[tfscale.rank()], sum(samples[: tfscale.rank() + 1])
    train, validation = (data(sum(samples), seed) for seed in (0, 1))
    plain = functional(has_statistics=False)
    plain.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=metrics())
    expected = fit(plain, train, [], validation_data=validation)
    expected_alone = plain.evaluate(*validation, verbose=0)

    own_train, share = (tuple(a[end - n : end] for a in arrays) for arrays in (train, validation))
    # Arrays would have to come in batches of one size on all ranks.
    batches = tf.data.Dataset.from_tensor_slices(own_train).batch(n // 2)
    model = compiled(functional(has_statistics=False), keras.optimizers.SGD(0.0), metrics())
    model.set_weights(plain.get_weights())
    average = MetricAverageCallback()
    for callbacks in ([BroadcastGlobalVariablesCallback(0), average], [Synchronize()]):
        options = {"validation_data": share, "verbose": 0, "callbacks": callbacks}
        history = model.fit(batches, epochs=2, **options).history
        for key, values in expected.items():
            assert history[key] == pytest.approx(values, rel=5e-6), key
        assert len({repr(item) for item in tfscale.allgather_object(history)}) == 1
        alone = model.evaluate(*share, verbose=0, callbacks=callbacks[-1:])
        assert alone == pytest.approx(expected_alone, rel=5e-6)


@sizes(2, 3)
def case_ranks_with_opposite_scores_stop_and_slow_down_together():
    """Scores of rank 0 rise and those of the last rank fall; their mean falls for three epochs."""
    last = tfscale.size() - 1
    slope = {0: 10.0, last: -10.0}.get(tfscale.rank(), 0.0)
    means = (5.0, 4.0, 3.0, 4.0, 4.0, 4.0)
    scores = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(score=means[epoch] + slope * epoch)
    )
    model = compiled(functional())
    rate = float(model.optimizer.learning_rate)
    callbacks = [
        scores,
        Synchronize(),
        keras.callbacks.ReduceLROnPlateau("score", factor=0.5, patience=1, mode="min"),
        keras.callbacks.EarlyStopping("score", patience=1, mode="min"),
    ]
    history = fit(model, own(), callbacks, epochs=6)
    np.testing.assert_allclose(history["score"], means[:4])
    assert float(model.optimizer.learning_rate) == rate / 2
    require_equal_ranks(model.weights)


@sizes(2, 3, 4)
def case_a_metric_key_of_one_rank_is_an_error_on_all():
    model = compiled(functional())
    validation = own() if tfscale.rank() == 1 else None
    require_error(
        lambda: fit(model, own(), [MetricAverageCallback()], validation_data=validation),
        "ExchangeError",
        "Received: no val_loss on rank 0",
        "and val_loss on rank 1.",
    )


class NoteUpdates(ConsistencyCheck):
    """Notes whether there was an update before the first check."""

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.before, self.noted = self.model.get_weights()[0], []

    def check(self, moment):
        self.noted.append((moment, bool((self.model.get_weights()[0] != self.before).any())))
        super().check(moment)


@sizes(2, 3)
def case_the_first_update_is_awaited_where_batches_are_added_up():
    for passes, inner in (
        (4, keras.optimizers.SGD(0.1)),
        (1, keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)),
    ):
        model = functional(has_statistics=False)
        optimizer = DistributedOptimizer(inner, backward_passes_per_step=passes)
        model.compile(optimizer, "binary_crossentropy")
        begin, check = BroadcastGlobalVariablesCallback(0), NoteUpdates()
        fit(model, own(), [begin, check], epochs=1, batch_size=1)
        assert check.noted == [("after the first update", True), ("at the end of epoch 1", True)]


def case_rank_zero_stops_all_ranks():
    model = compiled(functional())
    first = [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
    history = fit(model, own(), [*first, RankZero(StopAt(rank=0))], epochs=6)
    losses = tfscale.allgather_object(history["loss"])
    assert len(losses[0]) == 2 and {len(item) for item in losses} <= {2, 3}, losses
    for item in losses:
        assert item[:2] == losses[0] and item[-1] == losses[0][-1]
    require_equal_ranks(model.weights)
    fit(model, own(), first)


N_EPOCHS, BATCH = 2, 12


def _data(n_batches, **options):
    rng = np.random.default_rng(n_batches)
    x = rng.normal(size=(n_batches * BATCH, 3)).astype("float32")
    return GlobalBatches(x, (x[:, :1] > 0).astype("float32"), batch_size=BATCH, **options)


def _scalars(folder, tag):
    """Return the steps and values of a scalar in the only file of a folder."""
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder)).Reload().Tensors(tag)
    return [event.step for event in events], [
        float(tf.make_ndarray(event.tensor_proto)) for event in events
    ]


@sizes(2, 3, 4, timeout_s=100)
def case_tensorboard_of_rank_0():
    """Weights that it draws are whole under every exchange, read while parameters are gathered."""
    for exchange in ("allreduce", Sharded()):
        with shared_folder() as folder:
            model = functional()
            optimizer = DistributedOptimizer(keras.optimizers.Adam(0.05), exchange=exchange)
            model.compile(optimizer, "binary_crossentropy")
            board = keras.callbacks.TensorBoard(folder, histogram_freq=1, update_freq=1)
            valid = _data(2, shuffle=False, drop_remainder=False)
            options = {"validation_data": valid, "epochs": N_EPOCHS, "verbose": 0}
            callbacks = [Synchronize(), RankZero(board)]
            history = model.fit(_data(3), **options, callbacks=callbacks).history
            tfscale.barrier()
            if tfscale.rank() == 0:
                epochs = list(range(N_EPOCHS))
                for kind, key in (("train", "loss"), ("validation", "val_loss")):
                    steps, values = _scalars(folder / kind, "epoch_loss")
                    assert steps == epochs
                    np.testing.assert_allclose(values, history[key], rtol=1e-6)
                assert _scalars(folder / "train", "batch_loss")[0] == list(range(1, 7))
                drawn = EventAccumulator(str(folder / "train")).Reload().Tags()["tensors"]
                assert any("kernel" in tag for tag in drawn), drawn
