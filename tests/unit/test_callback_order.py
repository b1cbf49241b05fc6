"""Callbacks in any order: the list that Keras calls, and what the callbacks see."""

import csv
import itertools
import random

import keras
import pytest

from tests.helpers.models import LINE, line_model
from tests.helpers.single_job import single_job  # noqa: F401
from tfscale.callbacks import (
    AdaptiveBatchSize,
    BackupAndRestore,
    BatchSizeSchedule,
    BroadcastGlobalVariablesCallback,
    Callback,
    CommunicationReport,
    LearningRateWarmupCallback,
    MetricAverageCallback,
    ModelCheckpoint,
    ModelDistance,
    ParameterAveraging,
    RankZero,
    Synchronize,
    ThetaMonitor,
)
from tfscale.callbacks.synchronize import ConsistencyCheck, NonTrainableState
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.testing import FakeRanks

ADDED = ["LocalModels", "NonTrainableState", "ConsistencyCheck", "MetricAverageCallback"]
ALL = ["Synchronize", *ADDED]


class Mine(keras.callbacks.Callback):
    """A callback of the script."""


class Edit(Mine):
    """Logs a number."""

    def on_epoch_end(self, epoch, logs=None):
        logs["twice"] = 2 * logs["loss"]


class Own(Callback):
    """A callback of the script that uses the session."""


class Patient(keras.callbacks.EarlyStopping):
    """A callback of Keras that the script has changed."""


def names_of(callbacks):
    return [type(callback).__name__ for callback in callbacks]


def arranged(*callbacks, model=None):
    return names_of(keras.callbacks.CallbackList(callbacks, model=model or line_model()).callbacks)


def test_every_order_of_tfscales_own_gives_the_same_list(tmp_path):
    data, model = GlobalBatches(LINE, LINE, batch_size=4), line_model()
    own = [
        BackupAndRestore(tmp_path),
        BroadcastGlobalVariablesCallback(0),
        NonTrainableState(),
        ConsistencyCheck(),
        MetricAverageCallback(),
        ParameterAveraging(),
        CommunicationReport(tmp_path),
        ModelDistance(),
        ThetaMonitor(tmp_path),
        AdaptiveBatchSize(data, 8, log_path=None),
        BatchSizeSchedule({1: 8}),
        LearningRateWarmupCallback(0.1),
    ]
    expected = names_of(own)
    expected[2:3] = ["LocalModels", "NonTrainableState", "NonTrainableState"]
    expected[5:6] = ["ConsistencyCheck", "ConsistencyCheck"]
    draw = random.Random(1)
    for _ in range(40):
        assert arranged(*draw.sample(own, len(own)), model=model) == expected


PLATEAU, STOP = keras.callbacks.ReduceLROnPlateau, keras.callbacks.EarlyStopping
LISTS = [
    # What Keras has decides and writes after ranks are synchronised.
    ([STOP(), Synchronize()], [*ALL, "EarlyStopping"]),
    ([Patient(), Mine(), Synchronize()], [*ALL, "Patient", "Mine"]),
    ([ModelCheckpoint("m.keras"), PLATEAU(), Synchronize()], [*ALL, "ModelCheckpoint", "ReduceLR"]),
    ([RankZero(keras.callbacks.CSVLogger("f")), Synchronize()], [*ALL, "RankZero"]),
    ([STOP(), Own(), Synchronize(), Edit()], [*ALL, "EarlyStopping", "Own", "Edit"]),
    # What the script puts in front logs numbers that are averaged.
    ([Edit(), keras.callbacks.CSVLogger("f"), Synchronize()], ["Edit", *ALL, "CSVLogger"]),
    ([Edit(), STOP(), Mine(), Synchronize()], ["Edit", *ALL, "EarlyStopping", "Mine"]),
    ([Own(), RankZero(Mine()), Synchronize(), Mine()], ["Own", "RankZero", *ALL, "Mine"]),
    ([keras.callbacks.LambdaCallback(), Synchronize()], ["LambdaCallback", *ALL]),
    ([Edit(), Synchronize(), BackupAndRestore("b")], ["BackupAndRestore", "Edit", *ALL]),
    # After one of tfscale's own it follows, whichever that is.
    ([ModelDistance(), Mine(), Synchronize()], [*ALL, "ModelDistance", "Mine"]),
    ([Synchronize(), Mine(), ModelDistance()], [*ALL, "ModelDistance", "Mine"]),
]


@pytest.mark.parametrize(("given", "expected"), LISTS)
def test_callbacks_of_keras_and_of_the_script_keep_their_order(given, expected):
    found = arranged(*given)
    assert [name[: len(short)] for name, short in zip(found, expected, strict=True)] == expected


def test_a_file_has_what_the_script_logs_and_metrics_of_all_ranks(tmp_path):
    models = [line_model() for _ in range(2)]

    def body(rank):
        file = keras.callbacks.CSVLogger(tmp_path / f"{rank}")
        callbacks = [Edit(), file, MetricAverageCallback()]
        targets = LINE + rank
        return models[rank].fit(LINE, targets, 4, 2, verbose=0, callbacks=callbacks).history

    histories = FakeRanks(2).run(body)
    assert histories[0] == histories[1] and len(histories[0]["twice"]) == 2
    for rank in range(2):
        with open(tmp_path / f"{rank}") as file:
            rows = list(csv.DictReader(file))
        for key in ("loss", "twice"):
            assert [float(row[key]) for row in rows] == histories[0][key]


def test_a_list_that_the_script_made():
    model = line_model()
    given = [STOP("loss"), Mine(), Synchronize()]
    made = keras.callbacks.CallbackList(given, add_history=True, model=model, epochs=2)
    for _ in range(2):
        model.fit(LINE, LINE, 4, 2, verbose=0, callbacks=made)
        assert names_of(made.callbacks) == [*ALL, "EarlyStopping", "Mine", "History"]
    assert len(model.history.history["loss"]) == 4


def test_a_callback_that_joins_when_training_begins():
    class Join(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            late.set_params(self.params)
            late.set_model(self.model)
            made.callbacks.append(late)

    model, late = line_model(), NonTrainableState()
    given = [STOP("loss"), Join(), MetricAverageCallback()]
    made = keras.callbacks.CallbackList(given, add_history=True, model=model)
    model.fit(LINE, LINE, 4, verbose=0, callbacks=made)
    own = ["NonTrainableState", "MetricAverageCallback"]
    assert names_of(made.callbacks) == [*own, "EarlyStopping", "Join", "History"]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_hooks_of_all_methods_are_called_in_order(method):
    called = []

    def noting(kind):
        class Noting(kind):
            def on_train_begin(self, logs=None):
                super().on_train_begin(logs)
                called.append(kind)

            def on_test_begin(self, logs=None):
                super().on_test_begin(logs)
                called.append(kind)

            def on_predict_begin(self, logs=None):
                super().on_predict_begin(logs)
                called.append(kind)

        return Noting

    model, kinds = line_model(), [NonTrainableState, MetricAverageCallback, STOP]
    for order in itertools.permutations(kinds):
        called.clear()
        arguments = {"x": LINE, "verbose": 0, "callbacks": [noting(kind)() for kind in order]}
        arguments |= {} if method == "predict" else {"y": LINE}
        getattr(model, method)(**arguments)
        assert called == kinds


class Group(keras.callbacks.Callback):
    """Calls the hooks of another callback."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set_model(self, model):
        super().set_model(model)
        self.inner.set_model(model)


def test_what_synchronize_adds_is_in_a_list_or_refused():
    assert arranged(Group(Synchronize()), STOP()) == ["Group", *ADDED, "EarlyStopping"]
    with pytest.raises(ConfigError, match="Synchronize must be in a list of callbacks"):
        Synchronize().set_model(line_model())
