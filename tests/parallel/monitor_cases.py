"""The page of metrics while a `fit` runs, read by rank 0; run by test_monitor.py."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.request

import keras
import numpy as np
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families

import tfscale
from tests.helpers.ranks import Interruption, shared_folder
from tfscale.callbacks import Checkpoint, Synchronize
from tfscale.data import GlobalBatches

X = np.random.default_rng(0).normal(size=(104, 8)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def page(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


def own_page():
    return page(os.environ["TFSCALE_METRICS"].rpartition(":")[2])


def late_rank(found):
    """The rank that others wait for, as the page says it; None while it names none."""
    late = {k[1]: v for k, v in found.items() if k[0] == "tfscale_rank_late_seconds"}
    rank = max(late, key=late.get)
    others = [v for r, v in late.items() if r != rank]
    return int(rank) if late[rank] > 0.5 and max(others) < late[rank] / 2 else None


def new_model(optimizer=None, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer = optimizer or tfscale.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    model.compile(optimizer, loss="mse", metrics=["mae"], **options)
    return model


class Pages(keras.callbacks.Callback):
    """Reads the page of rank 0 where each epoch ends."""

    def __init__(self):
        super().__init__()
        self.pages = []

    def on_epoch_end(self, epoch, logs=None):
        if tfscale.rank() == 0:
            self.pages.append(own_page())


def check_counts(pages, before, epochs=3, n_steps=4, n_samples=104):
    """Pages at the ends of epochs of 104 samples in batches of 32: the last one has 8."""
    for i, found in enumerate(pages, 1):
        assert found["tfscale_epoch",] == i and found["tfscale_epochs",] == epochs
        assert found["tfscale_step",] == found["tfscale_steps_per_epoch",] == n_steps
        n_steps_before, n_samples_before = before
        assert found["tfscale_steps_total",] - n_steps_before == i * n_steps
        assert found["tfscale_samples_total",] - n_samples_before == i * n_samples
        np.testing.assert_allclose(found["tfscale_progress_ratio",], i / epochs)
    assert len(pages) == epochs


def counts_before():
    """Steps and samples of earlier cases, which the page counts on."""
    try:
        found = own_page()
    except OSError:  # nothing has been served yet
        return 0, 0
    return found["tfscale_steps_total",], found["tfscale_samples_total",]


def fit(model, x, before, **options):
    seen = Pages()
    history = model.fit(x, epochs=3, verbose=0, callbacks=[Synchronize(), seen], **options)
    if tfscale.rank() == 0:
        check_counts(seen.pages, before)
        assert seen.pages[-1]["tfscale_ranks",] == tfscale.size()
        found = own_page()
        assert found["tfscale_metric", "loss"] == history.history["loss"][-1]
        assert found["tfscale_metric", "mae"] == history.history["mae"][-1]
        assert found["tfscale_progress_ratio",] == 1 and found["tfscale_remaining_seconds",] == 0
    tfscale.barrier()
    return seen.pages


def case_global_batches():
    data = GlobalBatches(X, Y, batch_size=32, drop_remainder=False)
    pages = fit(new_model(), data, counts_before())
    waited = [k for k in (pages[-1] if pages else {}) if k[0].startswith("tfscale_rank_waiting")]
    assert len(waited) == (tfscale.size() if tfscale.rank() == 0 and tfscale.size() > 1 else 0)
    if pages and tfscale.size() > 1:
        sent = pages[-1]["tfscale_exchanged_bytes_total",]
        assert sent - pages[-2]["tfscale_exchanged_bytes_total",] >= 4 * 41 * 4  # parameters, bytes


def case_own_data_of_each_rank():
    share = X.reshape(-1, 8)[tfscale.rank() :: tfscale.size()]
    fit(new_model(), share, counts_before(), y=share[:, :1], batch_size=32 // tfscale.size())


def case_validation_and_several_steps_per_execution():
    data = GlobalBatches(X, Y, batch_size=32, drop_remainder=False)
    model = new_model(steps_per_execution=3)
    fit(model, data, counts_before(), validation_data=(X, Y), validation_batch_size=13)


def case_eager_steps():
    data = GlobalBatches(X, Y, batch_size=32, drop_remainder=False)
    fit(new_model(run_eagerly=True), data, counts_before())


class Steps(keras.callbacks.Callback):
    """Notes epoch and step of the page of rank 0 where each batch begins; may interrupt."""

    def __init__(self, last=None):
        super().__init__()
        self.last, self.seen = last, []

    def on_train_batch_begin(self, batch, logs=None):
        if tfscale.rank() == 0:
            found = own_page()
            self.seen.append((found["tfscale_epoch",], found["tfscale_step",]))
        if self.last == batch:
            raise Interruption


def case_an_epoch_that_is_resumed():
    with shared_folder() as folder:

        def train(epochs, last=None):
            keras.utils.set_random_seed(1)
            data = GlobalBatches(X, Y, batch_size=32, drop_remainder=False)
            checkpoint = Checkpoint(folder, every_n_steps=1, asynchronous=False)
            steps = Steps(last)
            with contextlib.suppress(Interruption):
                callbacks = [checkpoint, Synchronize(), steps]
                new_model().fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
            checkpoint._handler.remove()
            return steps.seen

        assert train(1, last=3) == [(1, step) for step in range(4)] * (tfscale.rank() == 0)
        resumed = [(1, 2), (1, 3), *((2, step) for step in range(4))]
        seen = train(2)
        assert seen in (resumed, resumed[1:]) or tfscale.rank() > 0, seen
        tfscale.barrier()


def case_under_distribute():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32)
    for fed in ((X, Y, 32), (data, None, None)):
        before = counts_before()
        running = tfscale.distribute(seed=1)
        try:
            seen, model = Pages(), new_model(keras.optimizers.SGD(1e-3))
            x, y, batch_size = fed
            model.fit(x, y, batch_size, epochs=3, verbose=0, callbacks=[seen], shuffle=False)
        finally:
            running.undo()
        if tfscale.rank() == 0:
            check_counts(seen.pages, before)
        tfscale.barrier()


_STOPS = """
import os, signal, sys, time
while os.getppid() == int(sys.argv[1]):
    for number, pause_s in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.1)):
        os.kill(int(sys.argv[1]), number)
        time.sleep(pause_s)
"""


class LateUntilNamed(keras.callbacks.Callback):
    """Stops this process for 200 ms in each step, as SIGSTOP does; all stop when it is named."""

    def __init__(self, late):
        super().__init__()
        self.late, self.stopper = late, None

    def on_train_begin(self, logs=None):
        if tfscale.rank() == self.late:
            command = [sys.executable, "-S", "-c", _STOPS, str(os.getpid())]
            self.stopper = subprocess.Popen(command)

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.1)  # longer than without, so that the stop falls into each step

    def on_epoch_end(self, epoch, logs=None):
        named = late_rank(own_page()) if tfscale.rank() == 0 else None
        self.model.stop_training = tfscale.broadcast_object(named) == self.late

    def on_train_end(self, logs=None):
        if self.stopper is not None:
            self.stopper.kill()
            self.stopper.wait()


def _name_late_rank(late):
    data = GlobalBatches(X, Y, batch_size=8, shuffle=False)
    stops = LateUntilNamed(late)
    try:
        new_model().fit(data, epochs=1000, verbose=0, callbacks=[Synchronize(), stops])
    finally:
        stops.on_train_end()


def case_late_rank_0_is_named():
    _name_late_rank(0)


def case_late_last_rank_is_named():
    _name_late_rank(tfscale.size() - 1)


def case_scrapes_during_steps():
    """Many readers at once change nothing: losses are those without them."""

    def losses():
        data = GlobalBatches(X, Y, batch_size=8, shuffle=False)
        fit = new_model().fit(data, epochs=3, verbose=0, callbacks=[Synchronize()])
        return fit.history["loss"]

    expected = losses()
    is_over = threading.Event()

    def read():
        while not is_over.is_set():
            own_page()

    readers = [threading.Thread(target=read) for _ in range(3 if tfscale.rank() == 0 else 0)]
    for reader in readers:
        reader.start()
    try:
        assert losses() == expected
    finally:
        is_over.set()
        for reader in readers:
            reader.join()
    tfscale.barrier()
