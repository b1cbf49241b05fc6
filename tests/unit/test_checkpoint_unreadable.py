"""Folders that the system does not let be listed: sound, perhaps, and not missing."""

import errno
import os

import pytest

from tests.unit.checkpoint_model import (
    Act,
    fit,
    interrupt,
    job,  # noqa: F401
    steps_in,
)
from tests.unit.test_checkpoint_files import RUN, write
from tfscale.callbacks import Checkpoint
from tfscale.checkpoints import files as module
from tfscale.checkpoints import list_checkpoints
from tfscale.checkpoints.files import UnreadableError, prune
from tfscale.config import ConfigError


def refuse(monkeypatch, number, *folders):
    """Let no folder of these be listed."""
    usual = {name: getattr(os, name) for name in ("listdir", "scandir")}
    for name, look in usual.items():

        def refusing(path=".", look=look):
            if str(path) in map(str, folders):
                raise OSError(number, os.strerror(number))
            return look(path)

        monkeypatch.setattr(os, name, refusing)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["newest", "directory"])
def test_training_does_not_begin(tmp_path, monkeypatch, number, what):
    fit(Checkpoint(tmp_path, 2), Act(7, interrupt))
    newest = list_checkpoints(tmp_path)[0].path
    path = newest if what == "newest" else tmp_path
    refuse(monkeypatch, number, path)
    text = rf"read a checkpoint. Received: '{path}', rank 0: {path.name}: {os.strerror(number)}"
    with pytest.raises(ConfigError, match=text):
        fit(Checkpoint(tmp_path, 2))
    monkeypatch.undo()
    assert steps_in(tmp_path) == [6, 4, 2]
    assert len(fit(Checkpoint(tmp_path, 2))[1]) == 12 - 6


def test_an_older_one_is_not_needed(tmp_path, monkeypatch):
    fit(Checkpoint(tmp_path, 2), Act(7, interrupt))
    refuse(monkeypatch, errno.EACCES, list_checkpoints(tmp_path)[1].path)
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
