"""Growing batches on several ranks: one fit equals one process; test_resume.py interrupts it."""

import contextlib
import functools
import json
import math

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.equality import dense_model
from tests.helpers.ranks import Interruption, float64, shared_folder
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
)
from tfscale.data.slices import epoch_order
from tfscale.testing import inspect, require_close, require_equal_ranks

SAMPLES, EPOCHS, START, MAXIMUM = 768, 9, 48, 384  # 3 growths by 2; multiples of 2, 3, 4 ranks
SIZES = (48, 48, 96, 96, 192, 192, 384, 384, 384)
SCALES = (*(size / START for size in SIZES[:-1]), 0.1)  # of the learning rate
SIZES_LATER = (START, *SIZES[:-1])  # after a first epoch that does not count


def arrays():
    random = np.random.default_rng(5)
    x = random.normal(size=(SAMPLES, 6))
    return x, np.tanh(x @ random.normal(size=(6, 3))) + 0.1 * random.normal(size=(SAMPLES, 3))


def scale_of(epoch, part):
    """Return the scale of the learning rate; a part of the epoch is over."""
    return SCALES[epoch]


def scale_later(epoch, part):
    """Return the scale where the rate grows from one half in a first epoch that does not count."""
    return (1 + part) / 2 if epoch == 0 else 0.1 if epoch == 8 else SIZES_LATER[epoch] / START


@functools.cache
def by_hand(make_optimizer, n_groups=1, interval=1, sizes=SIZES, scale=scale_of):
    """Train each group's part of the batches in this process and average.

    Returns:
        The model, theta after each epoch, and the distance of the groups before each average.
    """
    keras.utils.set_random_seed(3)
    models = [dense_model() for _ in range(n_groups)]
    for model in models:
        model.set_weights(models[0].get_weights())
        model.compile(make_optimizer(), "mse")
        model.optimizer.build(model.trainable_variables)
    initial = float(models[0].optimizer.learning_rate)
    x, y = arrays()
    start = [np.array(w) for w in models[0].get_weights()]
    first, thetas, distances, n_steps = None, [], [], 0
    for epoch, size in enumerate(sizes):
        losses, n_batches = [], SAMPLES // size
        for batch, rows in enumerate(epoch_order(7, epoch, SAMPLES).reshape(-1, size)):
            rate = initial * scale(epoch, (batch + 1) / n_batches)
            for model, own in zip(models, np.split(rows, n_groups), strict=True):
                model.optimizer.learning_rate = rate
                losses.append(float(np.mean((model(x[own]) - y[own]) ** 2)))
                model.train_on_batch(x[own], y[own])
            first = float(np.mean(losses)) if first is None else first
            n_steps += 1
            if n_steps % interval == 0:
                average = mean_weights(models)
                distances.append(
                    float(np.mean([distance_of(m.get_weights(), average) for m in models]))
                )
                for model in models:
                    model.set_weights(average)
        thetas.append((first - float(np.mean(losses))) / distance_of(mean_weights(models), start))
    models[0].set_weights(mean_weights(models))
    return models[0], thetas, distances


def distance_of(weights, others):
    return math.sqrt(sum(float(np.sum((w - o) ** 2)) for w, o in zip(weights, others, strict=True)))


def mean_weights(models):
    return [np.mean(same, 0) for same in zip(*(m.get_weights() for m in models), strict=True)]


def fit(make_optimizer, path, exchange="allreduce", extra=(), seed=3, **options):
    averages = [MetricAverageCallback()] if options.pop("metrics_are_averaged", True) else []
    keras.utils.set_random_seed(seed + tfscale.rank())
    model = dense_model()
    model.compile(tfscale.DistributedOptimizer(make_optimizer(), exchange=exchange), "mse")
    x, y = arrays()
    data = tfscale.data.GlobalBatches(x, y, batch_size=START, seed=7)
    options = {"interval": 2, "momentum_correction": False, "decay_epochs": (8,), **options}
    callbacks = [
        *extra,
        BroadcastGlobalVariablesCallback(0),
        *averages,
        AdaptiveBatchSize(data, MAXIMUM, log_path=path, **options),
    ]
    with contextlib.suppress(Interruption):
        history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks).history
        return model, history
    return model, {}


def state_of(model, exchange):
    """Return what is whole on every rank: with "sharded" a rank has its part of the slots."""
    return [*model.variables, *([] if exchange == "sharded" else model.optimizer.variables)]


def close(model, other, exchange, tolerance=1e-10):
    require_close(state_of(model, exchange), state_of(other, exchange), atol=tolerance)


def check_equality(make_optimizer, exchange):
    with float64(), shared_folder() as folder:
        model, history = fit(make_optimizer, folder / "adaptive.jsonl", exchange)
        alone, thetas, _ = by_hand(make_optimizer)
        require_equal_ranks(state_of(model, exchange))  # by now rank 0 has written its last line
        lines = [json.loads(s) for s in (folder / "adaptive.jsonl").read_text().splitlines()]
    assert tuple(history["batch_size"]) == SIZES
    close(model, alone, exchange)
    np.testing.assert_allclose(history["theta"], thetas, rtol=1e-9)
    assert [line["theta"] for line in lines] == history["theta"]
    assert [line["batch_size"] for line in lines] == list(SIZES)


def momentum():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.001)


@sizes(1, 2, 3, 4, timeout_s=180)
def case_growing_batches_equal_one_process():
    for make_optimizer in (momentum, adam):
        check_equality(make_optimizer, "allreduce")


@sizes(2, 3, 4, timeout_s=240)
def case_growing_batches_equal_one_process_in_other_exchanges():
    check_equality(momentum, tfscale.Chunked(first_chunk_layers=1))
    check_equality(momentum, tfscale.Chunked(first_chunk_layers=1, replicated_dense=1))
    check_equality(momentum, "sharded")


def lars():
    return tfscale.LARS(0.1, trust_coefficient=0.05, weight_decay=0.01)


@sizes(2, 4, timeout_s=180)
def case_growing_batches_inside_of_groups():
    """Theta: the loss over all groups, the distance of their average; the batch: that of all.

    With LARS another callback sets the rate in an epoch that does not count.
    """
    groups = tfscale.LocalSGD(groups=2, interval=5)
    warm_up = tfscale.callbacks.LearningRateWarmupCallback(
        0.1, warmup_epochs=1, factor=2, momentum_correction=False
    )
    later = {"sizes": SIZES_LATER, "scale": scale_later}
    with float64(), shared_folder() as folder:
        for make, extra, options, expected in (
            (momentum, [], {}, {}),
            (lars, [warm_up], {"warmup_epochs": 1}, later),
        ):
            record = tfscale.callbacks.ModelDistance()
            path = folder / f"{make.__name__}.jsonl"
            model, history = fit(make, path, groups, [*extra, record], **options)
            alone, thetas, distances = by_hand(make, 2, 5, **expected)
            assert tuple(history["batch_size"]) == expected.get("sizes", SIZES)
            first = options.get("warmup_epochs", 0)  # before it theta is not measured
            np.testing.assert_allclose(history["theta"][first:], thetas[first:], rtol=1e-9)
            require_close(model.trainable_variables, alone.trainable_variables, atol=1e-10)
            steps, found = zip(*record.distances, strict=True)
            assert steps == tuple(range(5, 5 * len(distances) + 1, 5))
            np.testing.assert_allclose(found, distances, rtol=1e-9)


@sizes(2, 3, timeout_s=120)
def case_dense_layers_follow_the_batch():
    """[T] eq. 4.8 for 16 inputs, 12 outputs: up to 9 samples; the batch is 6, then 24, then 6."""
    x, y = np.random.default_rng(2).normal(size=(2, 48, 16))
    calls = []
    with float64():
        results = []
        for exchange in ("allreduce", tfscale.Sharded()):
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Dense(12, name="wide"), keras.layers.Dense(16, name="top")]
            model = keras.Sequential([keras.Input((16,)), *layers])
            model.compile(tfscale.DistributedOptimizer(adam(), exchange=exchange), "mse")
            note = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, layer=layers[0]: calls.append(
                    inspect.dense_route(layer)
                )
            )
            callbacks = [tfscale.callbacks.BatchSizeSchedule({1: 24, 2: 6}), note]
            data = tfscale.data.GlobalBatches(x, y, batch_size=6, seed=7)
            model.fit(data, epochs=3, verbose=0, callbacks=callbacks, validation_data=(x, y))
            results.append(model.variables)
        require_close(*results, atol=1e-12)
    partial = ["partial"] * 8
    assert calls[-18:] == [*partial, *["weights"] * 2, *partial], calls


@sizes(2, 3, 4, timeout_s=120)
def case_ranks_agree_although_their_losses_differ():
    """theta is near a threshold nowhere, but every rank sees another loss: none is averaged."""
    options = {"interval": None, "decay_epochs": (), "saturation": 0.5}
    with float64(), shared_folder() as folder:
        path = folder / "adaptive.jsonl"
        _, history = fit(momentum, path, metrics_are_averaged=False, **options)
        keys = ("batch_size", "learning_rate", "theta")
        every = tfscale.allgather_object([history[key] for key in keys])
        losses = tfscale.allgather_object(history["loss"])
        _, averaged = fit(momentum, path, **options)
    assert all(other == every[0] for other in every)
    assert all(len({*of_epoch}) == len(losses) for of_epoch in zip(*losses, strict=True))
    assert history["batch_size"] == averaged["batch_size"]
    np.testing.assert_allclose(history["theta"], averaged["theta"], rtol=1e-9)
    assert history["batch_size"][-1] > START
