"""Averaged independent training equals NumPy's averages; resumed, and stopped."""

import contextlib
import itertools
import tempfile

import keras
import numpy as np

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.ranks import InterruptAt, Interruption, StopAt, float64, require_error
from tests.parallel.backup_runs import BATCH, network
from tests.parallel.local_fit_model import forget_the_stop
from tfscale.callbacks import BackupAndRestore, BroadcastGlobalVariablesCallback, ParameterAveraging
from tfscale.testing import require_close, require_equal_ranks, require_identical

N_LOCAL, STEPS, RATE = 4, 3, 0.05


def model_and_data(optimizer=None, n_outputs=2):
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(n_outputs)])
    model.compile(optimizer or keras.optimizers.SGD(RATE), loss="mse")
    n = N_LOCAL * STEPS * tfscale.size()
    random = np.random.default_rng(3)
    x, y = random.normal(size=(n, 5)), random.normal(size=(n, n_outputs))
    batch = N_LOCAL * tfscale.size()
    return model, tfscale.data.GlobalBatches(x, y, batch_size=batch, shuffle=False), (x, y)


def train_alone(weights, x, y, rank):
    """One epoch of plain SGD of a linear model on the batches of one rank."""
    kernel, bias = (w.copy() for w in weights)
    batch = N_LOCAL * tfscale.size()
    for begin in range(rank * N_LOCAL, len(x), batch):
        samples, targets = x[begin : begin + N_LOCAL], y[begin : begin + N_LOCAL]
        error = 2 * (samples @ kernel + bias - targets) / targets.size
        kernel -= RATE * samples.T @ error
        bias -= RATE * error.sum(axis=0)
    return [kernel, bias]


def start():
    return BroadcastGlobalVariablesCallback(0, consistency_check=False, non_trainable="local")


def flat(weights):
    return np.concatenate([w.ravel() for w in weights])


def check(callback, averaged_epochs, lam, n_epochs=4, n_outputs=2):
    """Compare with all ranks' models trained here and averaged after some epochs; return ours."""
    with float64():
        model, data, (x, y) = model_and_data(n_outputs=n_outputs)
        common = model.get_weights()
        model.fit(data, epochs=n_epochs, verbose=0, callbacks=[start(), callback])
    everyone = [common] * tfscale.size()
    for epoch in range(n_epochs):
        everyone = [train_alone(w, x, y, r) for r, w in enumerate(everyone)]
        if epoch in averaged_epochs:
            norm = np.linalg.norm
            distances = [norm(flat(common) - flat(w)) for w in everyone]
            scales = [norm(flat(common)) + norm(flat(w)) for w in everyone]
            gammas = np.exp(-lam * np.array(distances) / scales)
            layers = zip(*everyone, strict=True)
            common = [np.average(parts, axis=0, weights=gammas) for parts in layers]
            everyone = [common] * tfscale.size()
    require_close(model.get_weights(), everyone[tfscale.rank()], atol=1e-12)
    assert callback.n_averages == len(averaged_epochs)
    return model


@sizes(2, 3, timeout_s=240)
def case_averages_equal_numpy():
    """Uniform, weighted by distance, and only where models have diverged."""
    for averaging, epochs in (
        (ParameterAveraging(), range(4)),
        (ParameterAveraging(2), (1, 3)),
        (ParameterAveraging("end"), (3,)),
        (ParameterAveraging(when=tfscale.Divergence(0.0)), range(4)),
        (ParameterAveraging(when=tfscale.Divergence(1e6)), ()),
    ):
        check(averaging, epochs, lam=0.0)
    for lam in (1.0, 10.0):
        check(ParameterAveraging(weights=tfscale.DistanceWeights(lam)), range(4), lam)


@sizes(2)
def case_distributed_optimizer_is_refused():
    wrapped = tfscale.DistributedOptimizer(keras.optimizers.SGD(RATE))
    model, data, _ = model_and_data(wrapped)
    averaging = {"callbacks": [ParameterAveraging()]}
    require_error(lambda: model.fit(data, **averaging), "ConfigError", "DistributedOptimizer")


EPOCHS, STEPS_PER_EPOCH = 5, 5


def train(averaging, before=(), after=(), seed=1):
    """Return the model after a `fit` of its own batches, whole or interrupted."""
    keras.utils.set_random_seed(seed + tfscale.rank())
    model = network()
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    random = np.random.default_rng(1)
    x, y = (random.normal(size=(STEPS_PER_EPOCH * BATCH, width)) for width in (4, 1))
    data = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, seed=4)
    callbacks = [*before, start(), averaging, *after]
    with contextlib.suppress(Interruption):
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return model


def state_of(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def every_second():
    return ParameterAveraging(2, weights=tfscale.DistanceWeights(1.0))


@sizes(2, 3, timeout_s=200)
def case_each_ranks_own_model_goes_on():
    """Within two averages ranks differ, also in momentum; the last average is the common one.

    Interrupted in an epoch, whose beginning is the last that was written. Seeds of the second run
    are others: all must come from the backup.
    """
    with float64():
        whole = every_second()
        expected = state_of(train(whole))
        every = tfscale.allgather_object(expected[0])
        assert not np.array_equal(every[0], every[1])  # the last epoch is not averaged
        for epoch in (1, 3):
            folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
            folder = folder if tfscale.rank() == 0 else f"{folder}-not-there-{tfscale.rank()}"
            train(every_second(), [BackupAndRestore(folder)], [InterruptAt(epoch)])
            resumed = every_second()
            require_identical(
                state_of(train(resumed, [BackupAndRestore(folder)], seed=50)), expected
            )
            assert resumed.n_averages == whole.n_averages == EPOCHS // 2


@sizes(2, 3, timeout_s=200)
def case_one_rank_stops_within_an_epoch_or_at_its_end():
    """All ranks have ended after the second epoch, with as many averages."""
    for step, rank, position in itertools.product(
        (None, 1), (0, tfscale.size() - 1), ("before", "after")
    ):
        averaging = ParameterAveraging()
        model = train(averaging, **{position: [StopAt(step, rank=rank)]})
        assert set(tfscale.allgather_object(averaging.n_averages)) == {2}
        every = tfscale.allgather_object(model.get_weights()[0])
        assert all(np.array_equal(other, every[0]) for other in every)
        forget_the_stop()


@sizes(2, timeout_s=60)
def case_a_stop_of_one_rank_is_the_end_of_a_backup():
    """The others begin an epoch that does not count, and must not write what they hold in it."""
    folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
    backup = BackupAndRestore(folder, delete_checkpoint=False)
    averaging = ParameterAveraging()
    train(averaging, [backup], [StopAt(rank=0)])
    assert set(tfscale.allgather_object(averaging.n_averages)) == {2}
    forget_the_stop()
    again = StopAt(99, rank=0)
    train(ParameterAveraging(), [BackupAndRestore(folder)], [again])
    assert set(tfscale.allgather_object(again.epochs[0])) == {2}


@sizes(2, 3, timeout_s=80)
def case_moving_averages_of_ranks_are_averaged():
    """Keras ends `fit` with each rank's moving averages of its own weights in the model."""
    with float64():
        rule = keras.optimizers.SGD(RATE, use_ema=True, ema_momentum=0.5)
        model, data, _ = model_and_data(rule)
        model.fit(data, epochs=2, verbose=0, callbacks=[start(), ParameterAveraging(1)])
        means = [v.numpy() for v in rule._model_variables_moving_average]
        every = tfscale.allgather_object(means)
        require_close(model.get_weights(), [np.mean(rank, 0) for rank in zip(*every, strict=True)])
    require_equal_ranks(model.trainable_variables)
