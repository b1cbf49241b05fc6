"""What callbacks refuse: the type of the error, and the words that name its argument."""

import contextlib

import keras
import pytest
import tensorflow as tf

import tfscale
from tests.unit.adaptive_model import adaptive, arrays, make_data, make_model
from tests.unit.callback_models import single_job  # noqa: F401
from tests.unit.served_batches import as_rank
from tfscale.callbacks import (
    BackupAndRestore,
    BatchSizeSchedule,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    LearningRateScaling,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    RankZero,
)
from tfscale.callbacks.adaptive_batch_size import GROWTH_REMEDY, check_compared
from tfscale.callbacks.batch_size_schedule import check_sizes
from tfscale.config import ConfigError
from tfscale.testing import pretend_rank

DECAY = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


def fit(*callbacks, data=None, model=None, rate=0.1, **options):
    model = model or make_model(keras.optimizers.SGD(rate))
    model.fit(data or make_data(), verbose=0, callbacks=list(callbacks), **options)


def grow(*callbacks, data=None, before=(), model=None, rate=0.1, fit_options=None, **options):
    data = data or make_data()
    fit_options = {"data": data, **(fit_options or {})}
    fit(*before, adaptive(data, **options), *callbacks, model=model, rate=rate, **fit_options)


def dataset():
    return tf.data.Dataset.from_tensor_slices(arrays())  # of samples, not of batches


class LooksAtValues(keras.Model):
    """A model that cannot be built from shapes alone."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.compile("sgd", "mse")

    def call(self, x):
        return self.out(x[x.numpy()[0, 0] > 0 :])


def silent():
    """Return a model whose step reports no loss."""
    model = make_model()
    model.train_step = lambda data: {"other": 0.0}
    model.compile("sgd", "mse", run_eagerly=True)
    return model


REFUSED = [
    # AdaptiveBatchSize
    ("max_batch_size=96, samples=48", lambda: grow(maximum=96)),
    ("start_batch_size=6, max_batch_size=3", lambda: grow(maximum=3)),
    ("Received: data=tuple", lambda: grow(data=arrays())),
    ("parts of a batch with 1, 4 rows", lambda: grow(data=dataset())),
    ("another object, GlobalBatches", lambda: grow(fit_options={"data": make_data()})),
    ("BatchSizeSchedule and AdaptiveBatch", lambda: grow(BatchSizeSchedule({1: 12}))),
    ("BatchSizeSchedule and AdaptiveBatch", lambda: grow(before=[BatchSizeSchedule({1: 12})])),
    ("Received: steps_per_epoch", lambda: grow(fit_options={"steps_per_epoch": 3})),
    (r"learning_rate=ExponentialDecay.*ScalableSchedule", lambda: grow(rate=DECAY)),
    *(
        (f"Two callbacks set the learning rate.*{name}", lambda c=other: grow(c, warmup_epochs=2))
        for name, other in (
            ("Scheduler", keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate)),
            ("Schedule", LearningRateScheduleCallback(0.1, 0.5)),
            ("Warmup", LearningRateWarmupCallback(0.1, warmup_epochs=3)),
            ("Plateau", keras.callbacks.ReduceLROnPlateau()),
        )
    ),
    ("its shapes cannot", lambda: grow(model=LooksAtValues())),
    ("logs=", lambda: grow(model=silent())),
    ("Received: one process", lambda: grow(signal="noise_scale")),
    (r"interval=\(1, 9\)", lambda: grow(signal="noise_scale", interval=(1, 9))),
    ("active_ranks='some'", lambda: grow(active_ranks="some")),
    ("rule='best'", lambda: grow(rule="best")),
    ("signal='loss'", lambda: grow(signal="loss")),
    ("factor=1", lambda: grow(factor=1)),
    ("interval=0", lambda: grow(interval=0)),
    ("high=2", lambda: grow(interval=(4, 2))),
    ("start_batch_size=30", lambda: grow(start_batch_size=30)),
    (
        r"\[6, 9, 18\].*batch_size=9, size=2",
        lambda: check_sizes(as_rank(make_data(), 0, 2), [6, 9, 18], "max", GROWTH_REMEDY),
    ),
    # BatchSizeSchedule and LearningRateScaling
    ("Received: none", lambda: BatchSizeSchedule({})),
    ("epoch=-1", lambda: BatchSizeSchedule({-1: 4})),
    ("batch_size=0", lambda: BatchSizeSchedule({1: 0})),
    ("=2.5", lambda: BatchSizeSchedule({1: 2.5})),
    ("Received: size=49, samples=48", lambda: fit(BatchSizeSchedule({1: 49}))),
    ("=9, size=2", lambda: fit(BatchSizeSchedule({1: 9}), data=as_rank(make_data(), 0, 2))),
    ("learning_rate=ExponentialDecay", lambda: fit(BatchSizeSchedule({1: 12}), rate=DECAY)),
    ("=Scalable", lambda: fit(BatchSizeSchedule({1: 12}), rate=tfscale.ScalableSchedule(DECAY))),
    ("parts of a batch with 1, 4 rows", lambda: fit(BatchSizeSchedule({1: 12}), data=dataset())),
    ("Schedule and Batch", lambda: fit(*(BatchSizeSchedule({n: 12}) for n in (1, 2)))),
    ("rule='cubic'", lambda: LearningRateScaling(0.1, 6, 12, "cubic")),
    ("batch_size=0", lambda: LearningRateScaling(0.1, 6, 0)),
    ("warmup_epochs=-1", lambda: LearningRateScaling(0.1, 6, 12, warmup_epochs=-1)),
    # Learning rates, broadcast
    ("optimizer with a float", lambda: fit(LearningRateScheduleCallback(0.1, 0.5), rate=DECAY)),
    ("non_trainable='median'", lambda: BroadcastGlobalVariablesCallback(0, non_trainable="median")),
    ("root_rank=1", lambda: fit(BroadcastGlobalVariablesCallback(1))),
    # Checkpoint, BackupAndRestore
    ("every_n_steps must", lambda: Checkpoint("c", every_n_steps=0)),
    ("every_n_epochs must", lambda: Checkpoint("c", every_n_epochs=1.5)),
    ("every_seconds must", lambda: Checkpoint("c", every_seconds=0)),
    ("keep must", lambda: Checkpoint("c", keep=0)),
    ("Received: Checkpoint with", lambda: fit(BackupAndRestore("b"), Checkpoint("c"))),
    ("directory must be one that all ranks write to", lambda: fit(Checkpoint(__file__))),
    ("backup_dir must", lambda: BackupAndRestore("")),
    ("save_freq must", lambda: BackupAndRestore("b", save_freq="batch")),
    ("save_freq must", lambda: BackupAndRestore("b", save_freq=0)),
    # RankZero: what communicates, changes the model, or decides where to begin
    ("does not communicate", lambda: RankZero(MetricAverageCallback())),
    ("does not communicate", lambda: RankZero(print)),
    *(
        ("leaves the model as it is", lambda other=other: RankZero(other))
        for other in (
            keras.callbacks.ReduceLROnPlateau(),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.EarlyStopping(restore_best_weights=True),
        )
    ),
    ("BackupAndRestore among", lambda: RankZero(keras.callbacks.BackupAndRestore("backup"))),
    ("BackupAndRestore among", lambda: RankZero(BackupAndRestore("backup"))),
]


@pytest.mark.parametrize(("words", "call"), REFUSED, ids=[words for words, _ in REFUSED])
def test_refused(words, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.parametrize(
    ("size", "sizes", "lonely"),
    [(2, [2, 4, 8], 2), (4, [2, 3, 6], 2), (2, [4, 8], None), (4, [3], None)],
)
def test_noise_scale_needs_two_ranks_with_samples(size, sizes, lonely):
    text = f"batch size {lonely}, which feeds one of {size} ranks"
    refused = pytest.raises(ConfigError, match=text) if lonely else contextlib.nullcontext()
    with pretend_rank(size=size), refused:
        check_compared(sizes)
