"""GlobalBatches under Keras's own loops: what is trained on, epoch by epoch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.models import Recorder, classifier
from tests.helpers.ranks import float64
from tests.unit.served_batches import as_rank, make, served
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches

pytestmark = pytest.mark.filterwarnings("error:.*ran out of data", "error:.*shuffle=True")


class At(keras.callbacks.Callback):
    """Runs functions at moments of a fit: At(on_epoch_begin=lambda callback, epoch: ...)."""

    def __init__(self, **actions):
        super().__init__()
        for hook, action in actions.items():
            setattr(self, hook, lambda number, logs=None, action=action: action(self, number))


def expected(samples, batch_sizes, **options):
    data = make(samples, batch_size=batch_sizes[0], **options)
    batches = []
    for epoch, batch_size in enumerate(batch_sizes):
        data.epoch, data.batch_size = epoch, batch_size
        batches += served(data)
    return batches


@pytest.mark.parametrize("steps_per_execution", [1, 2, 4, 3])
def test_order_is_ours_whatever_fit_shuffles(steps_per_execution):
    if steps_per_execution == 3 and tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15):
        # An epoch has 4 steps, no multiple of 3: Keras before 3.15 takes that for missing data.
        pytest.skip("older Keras warns at the end of such epochs, whatever the data")
    for options in ({}, {"shuffle": False}):
        model = Recorder(steps_per_execution=steps_per_execution)
        model.fit(make(40, batch_size=10), epochs=3, verbose=0, **options)
        assert model.trained == expected(40, [10] * 3)


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_batch_size_changes_inside_one_fit(hook, capsys):
    sizes = [10, 4, 4, 20, 20]
    data, model, seen = make(40, batch_size=10), Recorder(), []

    def change(callback, epoch):
        coming = epoch + (hook == "on_epoch_end")
        data.batch_size = sizes[min(coming, 4)]

    def note(callback, epoch):
        seen.append(int(callback.params["steps"]))

    keras.utils.set_random_seed(1)
    model.fit(data, epochs=5, verbose=2, callbacks=[At(on_epoch_end=note), At(**{hook: change})])
    assert model.trained == expected(40, sizes)
    assert seen == [40 // size for size in sizes]
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if "loss" in line] == [
        "4/4", "10/10", "10/10", "2/2", "2/2",
    ]  # fmt: skip


def test_a_change_amid_an_epoch_waits_for_the_next():
    data, model = make(40, batch_size=10), Recorder()
    change = At(on_train_batch_end=lambda _, step: setattr(data, "batch_size", 20))
    model.fit(data, epochs=2, verbose=0, callbacks=[change])
    assert model.trained == expected(40, [10, 20])


def test_evaluation_on_the_same_data_changes_nothing():
    data, model = make(40, batch_size=10), Recorder()

    def evaluate(callback, step):
        if step == 1:
            callback.model.evaluate(data, verbose=0)

    callbacks = [At(on_train_batch_end=evaluate), At(on_epoch_end=evaluate)]
    model.fit(data, epochs=3, verbose=0, validation_data=data, callbacks=callbacks)
    assert model.trained == expected(40, [10] * 3)
    assert data.epoch == 3
    model.evaluate(data, verbose=0)
    assert data.epoch == 3 and len(model.tested) == 4 * (3 + 3 + 1 + 1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_batch_size_of_validation_data_changes_inside_one_fit(by_hand, capsys):
    data, model = make(40, batch_size=10), Recorder()
    valid = make(12, batch_size=4, shuffle=False, drop_remainder=False)

    def change(callback, epoch):
        valid.batch_size = (4, 6, 5)[epoch]

    def evaluate(callback, epoch):
        callback.model.evaluate(valid, verbose=0)

    callbacks = [At(on_epoch_begin=change), *([At(on_epoch_end=evaluate)] if by_hand else [])]
    options = {} if by_hand else {"validation_data": valid}
    model.fit(data, epochs=3, verbose=0, callbacks=callbacks, **options)
    assert [len(batch) for batch in model.tested] == [4, 4, 4, 6, 6, 5, 5, 2]
    assert model.trained == expected(40, [10] * 3)


def test_epochs_count_on_over_fits_and_respect_initial_epoch():
    data, model = make(40, batch_size=10), Recorder()
    model.fit(data, epochs=2, verbose=0)
    model.fit(data, epochs=1, verbose=0)
    model.fit(data, initial_epoch=5, epochs=6, verbose=0)
    epochs = [expected(40, [10] * 6)[4 * e : 4 * e + 4] for e in (0, 1, 2, 5)]
    assert model.trained == [batch for epoch in epochs for batch in epoch]
    fresh = Recorder()
    fresh.fit(make(40, batch_size=10), initial_epoch=5, epochs=6, verbose=0)
    assert fresh.trained == epochs[-1]


def test_an_epoch_broken_off_is_served_again():
    data, model = make(40, batch_size=10), Recorder()

    def stop(callback, step):
        callback.model.stop_training = step == 1

    def fail(callback, step):
        raise KeyboardInterrupt

    model.fit(data, epochs=2, verbose=0, callbacks=[At(on_train_batch_end=stop)])
    model.evaluate(data, verbose=0)
    assert data.epoch == 0 and len(model.trained) == 2
    with pytest.raises(KeyboardInterrupt) as kept:  # keeps the old iterators alive
        model.fit(data, epochs=2, verbose=0, callbacks=[At(on_train_batch_end=fail)])
    model.fit(data, epochs=2, verbose=0)
    assert kept and model.trained[3:] == expected(40, [10, 10])


@pytest.mark.parametrize(("name", "value"), [("steps_per_epoch", 2), ("batch_size", 5)])
def test_arguments_that_contradict_the_data_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"Received: {name}"):
        Recorder().fit(make(40, batch_size=10), epochs=2, verbose=0, **{name: value})


class Identity(keras.Model):
    def call(self, x):
        return x


TEN = np.arange(10, dtype="float32")[:, None]


def test_predict_serves_this_ranks_slices():
    data = as_rank(GlobalBatches(TEN, TEN, batch_size=4, shuffle=False, drop_remainder=False), 1, 2)
    assert Identity().predict(data, verbose=0).ravel().tolist() == [2, 3, 6, 7, 9]
    records = tf.data.Dataset.from_tensor_slices(TEN)
    data = as_rank(GlobalBatches.from_dataset(records, batch_size=5, shuffle_buffer=0))
    assert Identity().predict(data, verbose=0).ravel().tolist() == list(range(10))


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({}, "shuffled data of which 2 samples"),
        ({"drop_remainder": False}, "shuffled data of which 0 samples"),
        ({"shuffle": False, "drop_remainder": True}, "unshuffled data of which 2 samples"),
    ],
)
def test_predict_needs_each_sample_in_order(options, received):
    with pytest.raises(ConfigError, match=f"Received: {received}"):
        Identity().predict(as_rank(GlobalBatches(TEN, batch_size=4, **options)), verbose=0)


# A real model.


def make_arrays():
    rng = np.random.default_rng(0)
    return rng.normal(size=(30, 4)), rng.integers(0, 3, 30)


def test_class_weight_with_sample_weight_is_an_error():
    data = as_rank(GlobalBatches(*make_arrays(), batch_size=10, sample_weight=np.ones(30)))
    with pytest.raises(ValueError, match="class_weight"):
        classifier().fit(data, class_weight={0: 1.0, 1: 1.0, 2: 2.0}, verbose=0)


def test_growing_batches_do_not_retrace():
    with float64():
        data, model, traces = as_rank(GlobalBatches(*make_arrays(), batch_size=2)), classifier(), []
        layer_call = model.layers[0].call
        model.layers[0].call = lambda *a, **k: traces.append(1) or layer_call(*a, **k)
        grow = At(on_epoch_begin=lambda _, epoch: setattr(data, "batch_size", (2, 6, 30)[epoch]))
        model.fit(data, epochs=3, verbose=0, callbacks=[grow])
    assert len(traces) <= 2
    assert model.optimizer.iterations == 15 + 5 + 1
