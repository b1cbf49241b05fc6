"""The last words of a rank, read after its death."""

import os
import subprocess
import sys

import pytest

from tfscale.checkpoints import preemption
from tfscale.comm import process
from tfscale.comm.process import STATUS_VARIABLE


@pytest.fixture
def status(monkeypatch):
    descriptor = process.create()
    monkeypatch.setenv(STATUS_VARIABLE, process.path_of(descriptor))
    process.file_path.cache_clear()
    yield descriptor
    process.file_path.cache_clear()
    os.close(descriptor)


def test_what_a_rank_starts_is_no_rank(status):
    assert process.file_path()
    code = "from tfscale.comm import process as s; s.write_state(s.FINISHED)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert process.read(status) == process.RankStatus("")


def test_a_dead_process_is_read(status):
    code = (
        "import os; from tfscale.comm import process as s\n"
        "s.write_state(s.JOINED); s.write_error('first\\n'); s.write_error('second\\n')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code])
    assert process.read(status) == process.RankStatus("joined", "", "first\n")


def test_states_replace_each_other_and_leave_other_texts_as_they_are(status):
    process.write_state(process.JOINED)
    preemption.request_save_and_stop()
    assert process.read(status).was_asked and not process.read(status).has_saved
    preemption.forget_request()
    process.write_training(0.25, 3e6, "allreduce")
    process.write_training(0.5, 1e6, "auto")
    process.write_error("x" * 100_000 + "why\n")
    process.write_state(process.FINISHED)
    found = process.read(status)
    assert found.was_asked and found.has_saved
    assert (found.state, found.training) == (process.FINISHED, "0.5000 1000000 auto 0 32")
    assert found.error.endswith("xwhy\n")  # long ones keep their end


def test_nobody_watches(monkeypatch):
    monkeypatch.delenv(STATUS_VARIABLE, raising=False)
    process.file_path.cache_clear()
    process.write_state(process.JOINED)
    process.write_error("text")
    assert not process.file_path()
    monkeypatch.setenv(STATUS_VARIABLE, "/proc/1/fd/no")
    process.file_path.cache_clear()
    process.write_error("text")  # who watched has died: no error
