"""Checkpoint in one process: damage, unreadable folders, full disks, signals, what it refuses."""

import errno
import logging
import os
import signal
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tfscale
from tests.unit.checkpoint_model import (
    BATCH,
    Act,
    Interruption,
    arrays,
    build,
    fit,
    interrupt,
    job,  # noqa: F401
    require_equal,
    steps_in,
)
from tests.unit.test_checkpoint_files import RUN, write
from tfscale import preemption
from tfscale.callbacks import (
    BackupAndRestore,
    BroadcastGlobalVariablesCallback,
    Checkpoint,
    LearningRateScheduleCallback,
)
from tfscale.checkpoints import files as module
from tfscale.checkpoints import list_checkpoints
from tfscale.checkpoints.files import UnreadableError, prune
from tfscale.comm import runtime, start
from tfscale.config import PREEMPTED, ConfigError
from tfscale.data import GlobalBatches


def test_a_damaged_newest_falls_back(tmp_path, caplog):
    whole, _ = fit(None)
    fit(Checkpoint(tmp_path, 2), Act(7, interrupt))
    newest = list_checkpoints(tmp_path)[0]
    assert newest.step == 6
    content = bytearray((newest.path / "rank-00000.safetensors").read_bytes())
    content[len(content) // 2] ^= 4
    (newest.path / "rank-00000.safetensors").write_bytes(content)
    left_over = tmp_path / "step-0000000007-00000000"
    left_over.mkdir()  # by a run that found the disk full
    (tmp_path / f"damaged-{newest.path.name}").mkdir()  # by one that met the same damage
    with caplog.at_level(logging.WARNING, logger="tfscale"):
        model, batches = fit(Checkpoint(tmp_path, 2))
    assert len(batches) == 12 - 4
    require_equal(model, whole)
    assert "rank-00000.safetensors does not match its checksum" in caplog.text
    assert "no rank has finished its part" in caplog.text
    assert (tmp_path / f"damaged-2-{newest.path.name}" / "rank-00000.manifest").exists()
    assert not left_over.exists()


def test_an_archive_behind_a_link_stays(tmp_path):
    """A checkpoint that was moved and linked back is read, but neither deleted nor counted."""
    folder, archive = tmp_path / "run", tmp_path / "archive"
    whole, _ = fit(None, epochs=2)
    fit(Checkpoint(folder, 4), epochs=1)
    (link,) = folder.glob("step-*")
    link.rename(archive)
    link.symlink_to(archive, target_is_directory=True)
    before = {path.name: path.read_bytes() for path in archive.iterdir()}
    model, batches = fit(Checkpoint(folder, 1, keep=2), epochs=2)
    assert len(batches) == 4
    require_equal(model, whole)
    assert link.is_symlink()
    assert {path.name: path.read_bytes() for path in archive.iterdir()} == before
    assert len(list(folder.glob("step-*"))) == 1 + 2


@pytest.fixture
def received():
    signals = []
    former = signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    yield signals
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize(("way", "step"), [("signal", 5), ("call", 5), ("call", 11)])
def test_asked_to_make_room(tmp_path, received, way, step):
    """SIGTERM is handled while `fit` runs, and by the handler from before, afterwards."""
    whole, _ = fit(None)
    ask = preemption.request_save_and_stop
    if way == "signal":
        ask = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    with pytest.raises(SystemExit) as end:
        fit(Checkpoint(tmp_path, every_n_epochs=9), Act(step, ask))
    assert end.value.code == PREEMPTED == 75
    assert steps_in(tmp_path) == [step + 1] and not preemption.is_requested()
    model, _ = fit(Checkpoint(tmp_path))
    require_equal(model, whole)
    assert not received
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [1]


def test_sigterm_after_an_error_is_not_swallowed(tmp_path, received):
    data = GlobalBatches(*arrays(), batch_size=BATCH)
    with pytest.raises(Interruption):
        build().fit(data, verbose=0, callbacks=[Checkpoint(tmp_path), Act(1, interrupt)])
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [1] and not preemption.is_requested()


def test_sigterm_to_a_forked_child_ends_it():
    """Pools of processes that are made within `fit` end their workers so."""
    handler = preemption.TermHandler(lambda: True)
    handler.install()
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    finally:
        handler.remove()
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    assert not preemption.is_requested()


def test_a_forked_child_does_not_leave_the_job(monkeypatch):
    state = runtime._state
    left = []
    monkeypatch.setattr(runtime, "_state", state)  # it comes back afterwards
    monkeypatch.setattr(state.backend, "close", lambda: left.append(os.getpid()), raising=False)
    monkeypatch.setattr(state, "process_id", os.getpid() + 1)
    start._leave_at_exit()
    assert left == [] and runtime._state is state
    monkeypatch.setattr(state, "process_id", os.getpid())
    start._leave_at_exit()
    assert left == [os.getpid()]


def test_what_it_refuses(tmp_path):
    for options in ({"every_n_steps": 0}, {"every_n_epochs": 1.5}, {"every_seconds": 0},
                    {"keep": 0}):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{next(iter(options))} must be"):
            Checkpoint(tmp_path, **options)
    data = GlobalBatches(*arrays(), batch_size=BATCH)
    start = BroadcastGlobalVariablesCallback(0)
    for callbacks in ([start, Checkpoint(tmp_path)], [Checkpoint(tmp_path),
                      BackupAndRestore(str(tmp_path / "b"))]):  # fmt: skip
        with pytest.raises(ConfigError, match="Checkpoint comes before all other callbacks"):
            build().fit(data, verbose=0, callbacks=callbacks)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="need a directory that all ranks write to"):
        fit(Checkpoint(tmp_path / "file"))


def test_another_model_is_refused(tmp_path):
    fit(Checkpoint(tmp_path))
    other = build()
    other.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    for model, what in ((build(units=6), "model"), (other, "optimizer")):
        with pytest.raises(ConfigError, match=f"must have the same {what}"):
            fit(Checkpoint(tmp_path), model=model, epochs=4)
    data = GlobalBatches(*arrays(), batch_size=BATCH)
    with pytest.raises(ConfigError, match="must have the same callbacks"):
        build().fit(data, epochs=4, verbose=0, callbacks=[Checkpoint(tmp_path)])


def test_what_stops_an_epoch_of_unknown_length_is_no_end(tmp_path):
    def batches():
        x, y = arrays()
        for first in range(0, len(x), BATCH):
            yield x[first : first + BATCH], y[first : first + BATCH]

    model = build()

    def stop():
        model.stop_training = True

    spec = tuple(tf.TensorSpec((None, n), "float64") for n in (3, 2))
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    fit(Checkpoint(tmp_path, 4), Act(6, stop), model=model, data=data)
    assert steps_in(tmp_path) == [4]


@pytest.mark.parametrize("is_built", [True, False])
def test_rates_of_an_epoch_that_goes_on(tmp_path, is_built):
    """What callbacks set at the epoch's begin stays, also where the data build the model."""
    rates = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(round(float(self.model.optimizer.learning_rate), 6))

    def schedule():
        return LearningRateScheduleCallback(0.1, lambda epoch: 0.1**epoch)

    for stop in (6, -1):
        more = [schedule(), Note()]
        fit(Checkpoint(tmp_path, 2), Act(stop, interrupt), build(is_built=is_built), more=more)
    assert rates == [0.1] * 4 + [0.01] * 2 + [0.01] * 2 + [0.001] * 4


def refuse(monkeypatch, number, *paths):
    """Let no folder of these be listed, and no file of these be opened."""
    for owner, name in ((os, "listdir"), (os, "scandir"), (Path, "open")):
        usual = getattr(owner, name)

        def refusing(path=".", *arguments, usual=usual, **options):
            if str(path) in map(str, paths):
                raise OSError(number, os.strerror(number))
            return usual(path, *arguments, **options)

        monkeypatch.setattr(owner, name, refusing)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["file", "newest", "directory"])
def test_what_the_system_refuses_is_not_damage(tmp_path, monkeypatch, number, what):
    """Sound, perhaps, and not missing: network file systems report such errors in passing."""
    fit(Checkpoint(tmp_path, 2), Act(7, interrupt))
    newest = list_checkpoints(tmp_path)[0].path
    file = newest / "rank-00000.safetensors"
    path = {"file": file, "newest": newest, "directory": tmp_path}[what]
    refuse(monkeypatch, number, path)
    folder = newest if what == "file" else path
    text = rf"read a checkpoint. Received: '{folder}', rank 0: {path.name}: {os.strerror(number)}"
    with pytest.raises(ConfigError, match=text):
        fit(Checkpoint(tmp_path, 2))
    monkeypatch.undo()
    older = list_checkpoints(tmp_path)
    assert [found.step for found in older] == [6, 4, 2]
    refuse(monkeypatch, number, older[1].path)  # which is not needed
    assert len(fit(Checkpoint(tmp_path, 2))[1]) == 12 - 6


def test_nothing_is_deleted_that_cannot_be_listed(tmp_path, monkeypatch):
    folders = [write(tmp_path, step) for step in (10, 20, 30, 40)]
    refuse(monkeypatch, errno.EIO, folders[0], folders[2])
    seen = list_checkpoints(tmp_path)
    assert [found.is_finished for found in seen] == [True, False, True, False]
    with pytest.raises(UnreadableError, match="Input/output error"):
        seen[1].check()
    monkeypatch.undo()  # from now on they could be
    monkeypatch.setattr(module, "list_checkpoints", lambda directory: seen)
    prune(tmp_path, 1, {RUN})
    monkeypatch.undo()
    assert steps_in(tmp_path) == [40, 30, 10]
    refuse(monkeypatch, errno.EIO, tmp_path)
    prune(tmp_path, 1, {RUN})
    with pytest.raises(UnreadableError, match="Input/output error"):
        list_checkpoints(tmp_path)
    monkeypatch.undo()
    prune(tmp_path, 1, {RUN})
    assert steps_in(tmp_path) == [40]


def test_what_cannot_be_deleted_stays(tmp_path, monkeypatch):
    """Another user's, say: rank 0 alone deletes, and the others would wait for it."""
    for step in (10, 20):
        write(tmp_path, step)

    def refuse_to_delete(path, *arguments, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "unlink", refuse_to_delete)
    prune(tmp_path, 1, {RUN})
    assert steps_in(tmp_path) == [20, 10]
