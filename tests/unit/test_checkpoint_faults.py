"""Checkpoint in one process: damage, unreadable folders, signals."""

import errno
import functools
import logging
import os
import signal

import pytest

from tests.unit.checkpoint_model import (
    Act,
    Interruption,
    build,
    dataset,
    fit,
    interrupt,
    job,  # noqa: F401
    refuse,
    require_equal,
    steps_in,
)
from tfscale import preemption, start
from tfscale.callbacks import Checkpoint
from tfscale.checkpoints import list_checkpoints
from tfscale.comm import runtime
from tfscale.config import PREEMPTED, ConfigError


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


@pytest.fixture
def received():
    signals = []
    former = signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    yield signals
    signal.signal(signal.SIGTERM, former)


@pytest.mark.parametrize(("way", "step"), [("signal", 5), ("call", 11)])
def test_asked_to_make_room(tmp_path, received, way, step, caplog):
    """SIGTERM is handled while `fit` runs, and by the handler from before, afterwards."""
    whole, _ = fit(None)
    ask = preemption.request_save_and_stop
    if way == "signal":
        ask = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        fit(Checkpoint(tmp_path, every_n_epochs=9), Act(step, ask))
    assert end.value.code == PREEMPTED == 75
    line = f"tfscale: saved step {step + 1} in {tmp_path}, and stopped, as requested: start the job"
    assert line in caplog.text
    assert steps_in(tmp_path) == [step + 1] and not preemption.is_requested()
    model, _ = fit(Checkpoint(tmp_path))
    require_equal(model, whole)
    assert not received
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [1]


def test_sigterm_after_an_error_is_not_swallowed(tmp_path, received):
    with pytest.raises(Interruption):
        build().fit(dataset(), verbose=0, callbacks=[Checkpoint(tmp_path), Act(1, interrupt)])
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


@pytest.mark.parametrize(
    ("what", "number"),
    [("file", errno.EACCES), ("newest", errno.EIO), ("directory", errno.ESTALE)],
)
def test_what_the_system_refuses_is_not_damage(tmp_path, monkeypatch, what, number):
    """Sound, perhaps, and not missing: network file systems report such errors in passing."""
    fit(Checkpoint(tmp_path, 2), Act(7, interrupt))
    newest = list_checkpoints(tmp_path)[0].path
    file = newest / "rank-00000.safetensors"
    path = {"file": file, "newest": newest, "directory": tmp_path}[what]
    refuse(monkeypatch, number, path)
    folder = newest if what == "file" else path
    cause = f"{path.name}: {os.strerror(number)}"
    text = f"read a checkpoint on all ranks. Received: '{folder}', rank 0: {cause}"
    with pytest.raises(ConfigError, match=text):
        fit(Checkpoint(tmp_path, 2))
    monkeypatch.undo()
    older = list_checkpoints(tmp_path)
    assert [found.step for found in older] == [6, 4, 2]
    refuse(monkeypatch, number, older[1].path)  # which is not needed
    assert len(fit(Checkpoint(tmp_path, 2))[1]) == 12 - 6
