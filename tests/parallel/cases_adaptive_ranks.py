"""Growing batches: the noise scale as a signal, ranks that join later, other exchanges."""

import functools

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import float64, require_error, shared_folder
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BroadcastGlobalVariablesCallback,
    MetricAverageCallback,
    ParameterAveraging,
    ThetaMonitor,
)
from tfscale.data.slices import count_active, epoch_order
from tfscale.files import read_json_lines
from tfscale.measure.growth import noise_scale
from tfscale.testing import require_close, require_equal_ranks

SAMPLES = 96


def linear_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def norm_model():
    inputs = keras.Input((3,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(5)(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.activations.tanh(hidden)))


def arrays():
    random = np.random.default_rng(2)
    x = random.normal(size=(SAMPLES, 3))
    return x, x @ np.array([[1.0], [-2.0], [0.5]]) + random.normal(size=(SAMPLES, 1))


def fit(build, start, maximum, epochs, exchange="allreduce", rate=0.0625, **options):
    keras.utils.set_random_seed(4)
    model = build()
    wrapped = {"exchange": exchange, **options.pop("wrapped", {})}
    rule = keras.optimizers.SGD(rate, momentum=0.5)
    model.compile(tfscale.DistributedOptimizer(rule, **wrapped), "mse")
    data = tfscale.data.GlobalBatches(*arrays(), batch_size=24, seed=7)
    before, after = options.pop("before", []), options.pop("after", [])
    options = {"interval": 1, "momentum_correction": False, "log_path": None, **options}
    callbacks = [
        BroadcastGlobalVariablesCallback(0),
        MetricAverageCallback(),
        *before,
        AdaptiveBatchSize(data, maximum, start_batch_size=start, **options),
        *after,
    ]
    history = model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks).history
    return model, history


@functools.cache
def by_hand(build, batch_sizes, rate=0.0625):
    """Train one plain model, its rate growing with the batch; return it and losses of epochs."""
    keras.utils.set_random_seed(4)
    model = build()
    model.compile(keras.optimizers.SGD(rate, momentum=0.5), "mse")
    x, y = arrays()
    losses = []
    for epoch, size in enumerate(batch_sizes):
        model.optimizer.learning_rate = rate * size / batch_sizes[0]
        rows = epoch_order(7, epoch, SAMPLES).reshape(-1, size)
        own = []
        for r in rows:
            model.reset_metrics()  # Keras 3.10 returns the mean since then
            own.append(np.asarray(model.train_on_batch(x[r], y[r])).item())
        losses.append(float(np.mean(own)))
    return model, losses


def gradient_square(model, x, y):
    """Squared norm of the gradient of the mean squared error of a linear model."""
    kernel, bias = (w.astype(np.float64) for w in model.get_weights())
    error = 2 * (x @ kernel + bias - y) / len(x)
    return float(np.sum((x.T @ error) ** 2) + np.sum(error.sum() ** 2))


@sizes(2, 3, 4)
def case_noise_scale_is_that_of_the_norms():
    """At a rate of 0 all steps see the same parameters, so the estimate is known exactly.

    A batch of 4 feeds two ranks; what the others repeat has weight 0.
    """
    (x, y), size = arrays(), tfscale.size()
    for batch, n_active, options in (
        (24, size, {}),
        (24, size, {"exchange": tfscale.Chunked(first_chunk_layers=1)}),
        (4, 2, {"active_ranks": "grow"}),
    ):
        options = {"signal": "noise_scale", "interval": 9, "rate": 0.0, **options}
        with float64():
            model, history = fit(linear_model, batch, 2 * batch, 1, **options)
        order = epoch_order(7, 0, SAMPLES)
        small, large = (
            np.mean([gradient_square(model, x[rows], y[rows]) for rows in order.reshape(-1, n)])
            for n in (batch // n_active, batch)
        )
        expected = noise_scale(small, batch // n_active, large, batch)
        np.testing.assert_allclose(history["noise_scale"], [expected], rtol=1e-9)
        every = tfscale.allgather_object(history["noise_scale"])
        assert all(other == every[0] for other in every)


@sizes(2)
def case_noise_scale_drives_growth():
    with float64():
        _, history = fit(linear_model, 12, 48, 12, signal="noise_scale")
    assert history["batch_size"][0] == 12
    for scale, now, coming in zip(
        history["noise_scale"], history["batch_size"], history["batch_size"][1:], strict=False
    ):
        assert coming == (min(2 * now, 48) if scale >= 2 * now else now)
    assert history["batch_size"][-1] > 12


@sizes(2)
def case_several_callbacks_measure_norms_of_gradients():
    options = {"signal": "noise_scale", "active_ranks": "grow"}
    with float64(), shared_folder() as folder:
        _, alone = fit(linear_model, 4, 48, 4, **options)
        for name in ("before", "after"):
            monitor = ThetaMonitor(folder / name, has_norms=True)
            _, history = fit(linear_model, 4, 48, 4, **options, **{name: [monitor]})
            tfscale.barrier()
            rows = read_json_lines(folder / name / "theta.jsonl")
            assert history["batch_size"] == alone["batch_size"]
            np.testing.assert_array_equal(history["noise_scale"], alone["noise_scale"])
            finite = [n if np.isfinite(n) else None for n in alone["noise_scale"]]
            assert [row["noise_scale"] for row in rows] == finite
        # One rank has no gradient of its own: nothing can be compared.
        monitor = ThetaMonitor(folder / "one", has_norms=True)
        fit(linear_model, 1, 2, 1, active_ranks="grow", after=[monitor])
        tfscale.barrier()
        (row,) = read_json_lines(folder / "one" / "theta.jsonl")
        assert row["noise_scale"] is None


@sizes(2)
def case_noise_scales_are_of_batches_of_one_size():
    """8 steps, then 4: the second record has 2 steps of 12 samples, and one of 24."""
    with float64(), shared_folder() as folder:
        monitor = ThetaMonitor(folder, 3, has_norms=True)
        model, _ = fit(linear_model, 12, 24, 2, rate=0.0, after=[monitor], log_path=None)
        tfscale.barrier()
        rows = read_json_lines(folder / "theta.jsonl")
    (x, y), order = arrays(), epoch_order(7, 1, SAMPLES).reshape(-1, 24)[0]
    small = np.mean([gradient_square(model, x[own], y[own]) for own in order.reshape(2, 12)])
    expected = noise_scale(small, 12, gradient_square(model, x[order], y[order]), 24)
    np.testing.assert_allclose(rows[2]["noise_scale"], expected, rtol=1e-9)


@sizes(2)
def case_noise_scale_needs_whole_gradients_of_all_ranks():
    every = [tfscale.add_process_set([rank]) for rank in range(2)]
    own = every[tfscale.rank()]
    train = functools.partial(fit, linear_model, 12, 48, 1, signal="noise_scale")
    for wrapped, received in (
        ({"exchange": "sharded"}, "exchange="),
        ({"exchange": tfscale.LocalSGD(2, 3)}, "exchange=LocalSGD"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step above 1"),
        ({"process_set": own}, "1 of 2 ranks"),
    ):
        text = "the sum of all ranks' whole gradients in every step"
        require_error(functools.partial(train, wrapped=wrapped), text, received)
    for process_set in every:
        tfscale.remove_process_set(process_set)


@sizes(2, 3, 4, timeout_s=180)
def case_ranks_join_as_the_batch_grows():
    """Batches of 2, 4, 8, 16: some ranks rest in the beginning; all equal one process."""
    batch_sizes = (2, 4, 8, 16)
    active = [count_active(size, tfscale.size()) for size in batch_sizes]
    assert active[0] == 1 and active[-1] == (tfscale.size() if tfscale.size() != 3 else 2)
    exchanges = ("allreduce", tfscale.Chunked(first_chunk_layers=1, replicated_dense=1), "sharded")
    for exchange in exchanges:
        with float64():
            model, history = fit(linear_model, 2, 16, 4, exchange, rate=0.01, active_ranks="grow")
            alone, losses = by_hand(linear_model, batch_sizes, rate=0.01)
        assert tuple(history["batch_size"]) == batch_sizes
        np.testing.assert_allclose(history["loss"], losses, rtol=1e-9)
        require_close(model.get_weights(), alone.get_weights())
        require_equal_ranks(model.variables)


@sizes(3, 4, timeout_s=120)
def case_resting_ranks_and_batch_normalization():
    """Only statistics of batches of two or more; finite, and equal on all ranks after averaging.

    While one rank trains, its batch is the whole batch, so all is that of one process.
    """
    options = {"rate": 0.01, "active_ranks": "grow"}
    with float64():
        model, _ = fit(norm_model, 2, 3, 1, interval=9, **options)
        alone, _ = by_hand(norm_model, (2,), rate=0.01)
        require_close(model.get_weights(), alone.get_weights())
        model, history = fit(norm_model, 2, 24, 5, **options)
    assert history["batch_size"] == [2, 4, 8, 16, 24]
    assert all(np.isfinite(w).all() for w in model.get_weights())
    require_equal_ranks(model.variables)


@sizes(2, 4)
def case_exchanges_that_do_not_average_all_ranks_are_refused():
    groups = tfscale.LocalSGD(groups=tfscale.size(), interval=2)
    grown = functools.partial(fit, linear_model, 2, 8, 1, groups, active_ranks="grow")
    require_error(grown, "average in every step", "LocalSGD")
    model = linear_model()
    model.compile("sgd", "mse")
    data = tfscale.data.GlobalBatches(*arrays(), batch_size=24)
    adaptive = AdaptiveBatchSize(data, 48, active_ranks="grow", log_path=None)
    callbacks = [BroadcastGlobalVariablesCallback(0), adaptive, ParameterAveraging()]
    require_error(lambda: model.fit(data, verbose=0, callbacks=callbacks), "Received: Parameter")
