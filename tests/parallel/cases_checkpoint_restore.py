"""What ranks get back after a restart, where they did not hold the same."""

from __future__ import annotations

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import require_error, shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.cases_backup import InterruptAfter, train
from tests.parallel.cases_checkpoint import check
from tests.parallel.cases_equality import BATCH, float64
from tests.parallel.cases_nonfinite import BAD, STEPS, data
from tests.parallel.checkpoint_runs import Run
from tfscale.callbacks import BackupAndRestore, MetricAverageCallback
from tfscale.comm import runtime


@sizes(2, timeout_s=120)
def case_a_callback_that_one_rank_has():
    """Horovod's idiom: rank 0 alone saves models, and all ranks lower the learning rate."""

    def plateau(first):
        lower = keras.callbacks.ReduceLROnPlateau("loss", patience=2, mode="max", min_lr=1e-9)
        return [*first, lower]

    with shared_folder() as folder:

        def callbacks(data):
            is_first = runtime.rank() == 0
            return plateau([keras.callbacks.ModelCheckpoint(folder / "m.keras")] * is_first)

        # Two epochs without progress end with the third, in which both runs continue.
        check(Run(callbacks=callbacks), 12, 10)


class Statistics(keras.callbacks.Callback):
    """Keeps the moving statistics after each step; the mean of the ranks is not made yet."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        layer = self.model.layers[1]
        self.seen.append([layer.moving_mean.numpy(), layer.moving_variance.numpy()])


def normalized(optimizer, **options):
    """Train with moving statistics; return the model and what they were after each step."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    # No step changes the kernel before it: statistics of a step depend on its samples alone.
    first = layers.Dense(4, trainable=False)
    model = keras.Sequential(
        [keras.Input((6,)), first, layers.BatchNormalization(momentum=0.5), layers.Dense(3)]
    )
    model.compile(optimizer, "mse", **options)
    x, clean, y = data()
    batches = tfscale.data.GlobalBatches(x, y, batch_size=BATCH, shuffle=False)
    seen = Statistics()
    unite = tfscale.callbacks.NonTrainableState()
    history = model.fit(
        batches, verbose=0, callbacks=[seen, unite], validation_data=(clean[:BATCH], y[:BATCH])
    )
    return model, seen.seen, history.history


@sizes(1, 2, 3, timeout_s=200)
def case_a_skipped_step_leaves_statistics_finite():
    """On the bad rank they are those of the step before; what follows is averaged and finite."""
    is_bad = tfscale.rank() == tfscale.size() - 1
    scaled = keras.optimizers.LossScaleOptimizer
    for wrap, passes, options in (
        (lambda inner: inner, 1, {}),
        (lambda inner: inner, 1, {"run_eagerly": True}),
        (lambda inner: inner, 2, {}),
        (lambda inner: scaled(inner, initial_scale=2.0), 1, {}),
    ):
        with float64():
            optimizer = tfscale.DistributedOptimizer(
                wrap(keras.optimizers.SGD(0.01)), nonfinite="skip", backward_passes_per_step=passes
            )
            model, seen, history = normalized(optimizer, **options)
        assert len(seen) == STEPS and np.all(np.isfinite(seen)), (passes, options)
        stayed = [np.array_equal(*pair) for pair in zip(seen[BAD], seen[BAD - 1], strict=True)]
        assert stayed == [is_bad, is_bad], (passes, options)
        assert not np.array_equal(seen[BAD + 1][0], seen[BAD][0])
        every = tfscale.allgather_object([v.numpy() for v in model.layers[1].variables[2:]])
        for own, theirs in zip(every[0], every[-1], strict=True):
            np.testing.assert_array_equal(own, theirs)
        assert np.isfinite(history["val_loss"][0])
        assert np.isnan(history["loss"][0]) == is_bad  # as docs/exchanges.md says


def interrupted(folder, *more):
    """Return the folder of rank 0's backup, taken before the third of four epochs."""
    own = folder / f"of-rank-{runtime.rank()}"
    train([BackupAndRestore(own), *more, InterruptAfter(2)], 1 + runtime.rank())
    return own


@sizes(2, timeout_s=120)
def case_a_backup_that_rank_0_cannot_read():
    """The other ranks do not wait for it; nor where they cannot even be told of a folder."""
    with shared_folder() as folder:
        own = interrupted(folder)
        if runtime.rank() == 0:
            for path in own.glob("step-*/rank-00001.safetensors"):
                path.write_bytes(b"")
        text = "damaged ones only"
        require_error(lambda: train([BackupAndRestore(own)], 1), "ConfigError", text)
        if runtime.rank() == 0:
            (folder / "file").touch()
        text = "a directory that rank 0 can write to"
        require_error(lambda: train([BackupAndRestore(folder / "file")], 1), "ConfigError", text)


@sizes(2, timeout_s=120)
def case_numbers_of_callbacks_in_a_backup():
    """The rate falls after two epochs without progress, on all ranks."""

    def callbacks(folder):
        models = [keras.callbacks.ModelCheckpoint(folder / "m.keras")] * (runtime.rank() == 0)
        lower = keras.callbacks.ReduceLROnPlateau("loss", min_delta=1e9, patience=2)
        return [MetricAverageCallback(), *models, lower]

    with float64(), shared_folder() as folder:
        expected = train(callbacks(folder), 1 + runtime.rank())
        own = interrupted(folder, *callbacks(folder))
        restored = train([BackupAndRestore(own), *callbacks(folder)], 50 + runtime.rank())
        for value, wanted in zip(restored, expected, strict=True):
            np.testing.assert_array_equal(value, wanted)
