"""GlobalBatches on real ranks see exactly what one process sees; what `fit` checks of them."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tests.helpers.models import classifier
from tests.helpers.ranks import float64, require_error
from tfscale.callbacks import Callback
from tfscale.data import GlobalBatches
from tfscale.data.slices import epoch_order
from tfscale.testing import require_close, require_equal_ranks

SAMPLES = 96
BATCH_SIZES = (12, 24, 48, 48)  # per epoch; multiples of 1, 2, 3 and 4 ranks


class Grow(keras.callbacks.Callback):
    """Sets the batch size of each epoch; disturbs the rank's random state on the way."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch, logs=None):
        self.data.batch_size = BATCH_SIZES[epoch]
        keras.utils.set_random_seed(tfscale.rank() + 100 * epoch)


def arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(SAMPLES, 4)), rng.integers(0, 3, SAMPLES), rng.uniform(size=SAMPLES)


@sizes(1, 2, 3, 4, timeout_s=120)
def case_growing_batches_and_weights_equal_one_process():
    x, y, weight = arrays()
    classes = {0: 0.5, 1: 1.0, 2: 3.0}
    for own_weights, fit_weights, by_hand in (
        (None, None, np.ones(SAMPLES)),
        (weight, None, weight),
        (None, classes, np.array([classes[label] for label in y])),
    ):
        with float64():
            data = GlobalBatches(x, y, batch_size=12, seed=7, sample_weight=own_weights)
            model = classifier(tfscale.DistributedOptimizer)
            model.fit(data, epochs=4, verbose=0, callbacks=[Grow(data)], class_weight=fit_weights)
            alone = classifier()
            for epoch, batch_size in enumerate(BATCH_SIZES):
                for rows in epoch_order(7, epoch, SAMPLES).reshape(-1, batch_size):
                    alone.train_on_batch(x[rows], y[rows], by_hand[rows])
        require_close(model.get_weights(), alone.get_weights(), atol=1e-12)
        require_equal_ranks(model.variables)
        states = tfscale.allgather_object(data.state())
        assert states == [{"epoch": 4, "batch_size": 48, "seed": 7, "samples": SAMPLES}] * len(
            states
        )


X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
ORDERED = {"shuffle": False, "drop_remainder": False}


def batches(rows=slice(None), batch_size=12, **options):
    return GlobalBatches(X[rows], X[rows, :1], batch_size=batch_size, **options)


class Trained(keras.callbacks.Callback):
    is_so = False

    def on_train_batch_end(self, batch, logs=None):
        self.is_so = True


def fit(validation, train=None, seen=()):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    train = batches() if train is None else train
    callbacks = [Callback(), *seen]
    return model.fit(train, validation_data=validation, epochs=2, verbose=0, callbacks=callbacks)


def require_refused(validation, *texts, train=None):
    """Require the same error on all ranks, before the first step."""
    seen = Trained()
    require_error(lambda: fit(validation, train, [seen]), *texts)
    assert not any(tfscale.allgather_object(seen.is_so))


def is_last():
    return tfscale.rank() == tfscale.size() - 1


@sizes(2, 3)
def case_shares_of_validation_data_are_refused():
    """Each rank would validate on a share of its share."""
    own = slice(tfscale.rank(), None, tfscale.size())
    require_refused(
        batches(own, **ORDERED),
        "ExchangeError: Samples of validation_data of fit, and their order, must be the same on "
        "all ranks. Received: other values on rank 1 than on rank 0. ",
    )
    seed = tfscale.rank()
    require_refused(batches(seed=seed), "Global batches of validation_data of fit must be")


@sizes(2, 3)
def case_data_that_one_rank_cannot_use_is_an_error_on_all():
    """The others would wait for it, or learn of it an epoch later."""
    unusable = batches(**ORDERED)
    unusable._batch_size = 13  # as if made before init()
    last = tfscale.size() - 1
    texts = (
        f"ConfigError: rank {last} cannot use validation_data of fit. Received: ConfigError: "
        "batch_size counts the samples of all ranks together",
    )
    require_refused(unusable if is_last() else batches(**ORDERED), *texts)
    require_refused(unusable if is_last() else None, *texts)
    # As many steps as on the other ranks, but fewer samples.
    rows = slice(23) if is_last() else slice(None)
    train = GlobalBatches(X[rows], X[rows, :1], batch_size=12, **ORDERED)
    require_refused(None, "Global batches of x of fit must be", train=train)


@sizes(2, 3)
def case_validation_data_may_differ_in_kind():
    """Given to one rank only, shared out by hand, or trained on already."""
    fit(batches(**ORDERED) if is_last() else None)
    rows = slice(tfscale.rank(), None, tfscale.size())
    fit((X[rows], X[rows, :1]) if is_last() else batches(**ORDERED))
    seen = batches()
    seen.epoch = tfscale.rank()
    assert len(fit(seen).history["val_loss"]) == 2


@sizes(2)
def case_another_order_of_records_is_refused():
    """Names of files in the order of a set differ between processes."""
    names = [f"file-{i}" for i in range(8)]
    order = names if tfscale.rank() == 0 else names[::-1]

    def batch_of(records):
        return GlobalBatches.from_dataset(
            tf.data.Dataset.from_tensor_slices(records),
            batch_size=4,
            decode=lambda name: (tf.ones(4), tf.ones(1)),
        )

    require_refused(
        None, "their order, must be the same on all ranks. Received: other", train=batch_of(order)
    )
    fit(None, train=batch_of(names))
    tf.random.set_seed(1 + tfscale.rank())
    drawn = tf.data.Dataset.range(8).map(lambda i: tf.random.normal((4,)))
    fit(None, train=GlobalBatches.from_dataset(drawn, batch_size=4, decode=lambda x: (x, x[:1])))
