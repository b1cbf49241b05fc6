"""Groups in a `fit`: validation, statistics, when they part, and where one rank stops."""

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import engine_only, sizes
from tests.helpers.equality import OPTIMIZERS
from tests.helpers.ranks import float64, require_error, shared_folder
from tests.parallel.local_fit_model import (
    SGD,
    LocalSGD,
    StopAt,
    distributed,
    ends_at,
    forget_the_stop,
    model_of,
    own_fit,
    start,
    within,
)
from tests.parallel.local_sgd_reference import STEPS, agree, compare, train, train_by_hand


@sizes(2, timeout_s=100)
def case_what_would_show_one_groups_model_is_refused_on_all():
    """On one rank only; and groups whom no callback unites."""
    for callback, text in (
        (keras.callbacks.SwapEMAWeights(), "Received: SwapEMAWeights, which"),
        (keras.callbacks.ModelCheckpoint("never.keras", save_freq=3), "save_freq=3). Use save_fr"),
        (tfscale.callbacks.ModelCheckpoint("never.keras", save_freq=3), "Received: ModelCheck"),
    ):
        given = [callback] if tfscale.rank() == 0 else []
        rule, strategy = SGD(0.1, use_ema=True), LocalSGD(2, 4, "allreduce")
        require_error(
            lambda r=rule, g=given, s=strategy: train(lambda: r, s, callbacks=g),
            *("ConfigError", text),
        )
    average = hvd.callbacks.MetricAverageCallback()
    optimizer = distributed(SGD(0.1), LocalSGD(2, 4, "allreduce"))
    text = "Received: none. Pass tfscale.callbacks.Sync"
    require_error(
        lambda: own_fit(normalised(keras.layers.BatchNormalization()), optimizer, average), text
    )


def normalised(layer):
    return model_of(lambda: [keras.layers.Dense(3), layer, keras.layers.Dense(1)])


class Validated(keras.callbacks.Callback):
    """Notes whether ranks agree on all weights, moving statistics included, when they validate."""

    def __init__(self):
        super().__init__()
        self.agreed = []

    def on_test_begin(self, logs=None):
        self.agreed.append(all([agree(v.numpy()) for v in self.model.weights]))


@sizes(2, 3, timeout_s=120)
def case_validation_sees_the_average_whether_the_length_is_known_or_not():
    """The numbers are those of the model that an epoch's end shows, in either case."""
    n = tfscale.size()
    x = np.random.default_rng(4).normal(size=(24 * n, 2)).astype("float32")
    own = slice(24 * tfscale.rank(), 24 * tfscale.rank() + 24)
    data = tf.data.Dataset.from_tensor_slices((x[own], x[own, :1])).batch(4)
    results = []
    for given in (data, data.filter(lambda x, y: True)):
        for exchange in (LocalSGD(n, 4, "allreduce"), None):  # None: ParameterAveraging
            model, watch = normalised(keras.layers.BatchNormalization(momentum=0.5)), Validated()
            unite = [] if exchange else [tfscale.callbacks.ParameterAveraging()]
            model.compile(distributed(SGD(0.1), exchange) if exchange else SGD(0.1), "mse")
            begin = start(consistency_check=exchange is not None)
            validation = {"validation_data": (x, x[:, :1]), "callbacks": [begin, *unite, watch]}
            history = model.fit(given, epochs=2, verbose=0, **validation)
            assert watch.agreed == [True, True], (given, exchange)
            seen = model.evaluate(x, x[:, :1], verbose=0)
            np.testing.assert_allclose(history.history["val_loss"][-1], seen, rtol=1e-5)
            results.append(history.history["val_loss"])
    np.testing.assert_allclose(results[2:], results[:2], rtol=1e-6)


class Spy(tfscale.SyncBatchNormalization):
    """Notes how many ranks share its statistics."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def _moments(self, inputs, mask):
        self.note(self._process_set.size())
        return super()._moments(inputs, mask)


class Statistics(keras.callbacks.Callback):
    """Keeps the moving variance after the third step of the last epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.found = self.model.layers[1].moving_variance.numpy()


@sizes(4, timeout_s=120)
def case_synchronised_statistics_are_those_of_a_group():
    """Two groups of two ranks, or of all ranks until groups form; also after a restart.

    Groups had begun before the last checkpoint, which forms them before the first epoch.
    """
    with shared_folder() as folder:
        for begin, epochs, more, sizes_of_sets in (
            ("immediately", 2, [], [2]),
            (1, 2, [tfscale.callbacks.Checkpoint(folder)], [4, 2]),
            (1, 3, [tfscale.callbacks.Checkpoint(folder)], [2]),
        ):
            found, statistics = [], Statistics()
            optimizer = distributed(SGD(0.1), LocalSGD(2, 100, "allreduce", start=begin))
            callbacks = [*more, start(), statistics]
            own_fit(normalised(Spy(found.append)), optimizer, *callbacks, epochs=epochs)
            assert list(dict.fromkeys(found)) == sizes_of_sets, found
            every = tfscale.allgather_object(statistics.found)
            assert np.array_equal(every[0], every[1]) and np.array_equal(every[2], every[3])
            assert not np.array_equal(every[0], every[2])


@sizes(2, timeout_s=120)
def case_groups_part_behind_the_first_step_at_a_lower_rate():
    """Lowered when an epoch begins, by its first batch, or by a schedule within that."""
    half = {"initial_lr": 0.1, "multiplier": lambda epoch: 0.1 if epoch else 1.0}
    piecewise = keras.optimizers.schedules.PiecewiseConstantDecay([STEPS], [0.1, 0.01])
    ways = (
        ([keras.callbacks.LearningRateScheduler(lambda e, r: 0.01 if e else 0.1)], 0.1),
        ([hvd.callbacks.LearningRateScheduleCallback(**half)], 0.1),
        ([], piecewise),
    )
    for callbacks, rate in ways:
        watch = Parted()
        strategy = LocalSGD(2, 4, "allreduce", start="after_first_decay")
        train(lambda r=rate: SGD(r), strategy, epochs=2, callbacks=[*callbacks, watch])
        # One step of the second epoch is together; the first of those apart shows it.
        assert watch.apart == STEPS + 1, (callbacks, watch.apart)


class Parted(keras.callbacks.Callback):
    """Notes how many steps all ranks trained together."""

    def __init__(self):
        super().__init__()
        self.n_steps, self.apart = 0, None

    def on_train_batch_end(self, batch, logs=None):
        self.n_steps += 1
        if self.apart is None and not agree(self.model.trainable_variables[0].numpy()):
            self.apart = self.n_steps - 1


@engine_only("ranks ask each other before each step, and stop at once")
@sizes(2, 4, timeout_s=300)
def case_a_stop_amid_an_interval_waits_for_the_average():
    with float64():
        ends_at(4, 4, StopAt(3))
        ends_at(4, 8, StopAt(4))  # too late for that average
        ends_at(7, 14, StopAt(12))  # an interval over two epochs
        ends_at(7, STEPS, StopAt(8))  # no longer than the epoch


@sizes(2, 4, timeout_s=120)
def case_one_rank_stops_between_epochs():
    """The others do not begin the next one, in whose first steps they would be alone."""
    with float64():
        counted = StopAt()
        strategy = tfscale.LocalSGD(2, 7, within())
        model = train("momentum", strategy, 3, callbacks=[counted])
        assert counted.steps == STEPS + (tfscale.rank() != 0)  # Keras counts what is given up
        compare(model, train_by_hand(OPTIMIZERS["momentum"], 2, 7))
        forget_the_stop()
