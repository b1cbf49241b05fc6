"""What a rank says of itself, read after its death."""

import os
import subprocess
import sys

import pytest

from tfscale.launcher import rank_status
from tfscale.launcher.launch import STATUS_VARIABLE


@pytest.fixture
def status(monkeypatch):
    descriptor = rank_status.create()
    monkeypatch.setenv(STATUS_VARIABLE, rank_status.path_of(descriptor))
    rank_status.file_path.cache_clear()
    yield descriptor
    rank_status.file_path.cache_clear()
    os.close(descriptor)


def test_what_a_rank_starts_is_no_rank(status):
    assert rank_status.is_watched()
    code = "from tfscale.launcher import rank_status as s; s.write_state(s.FINISHED)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert rank_status.read(status).state == ""


def test_an_empty_file(status):
    assert rank_status.is_watched()
    assert rank_status.read(status) == rank_status.RankStatus("", "", "")


def test_a_dead_process_is_read(status):
    code = (
        "import os; from tfscale.launcher import rank_status as s\n"
        "s.write_state(s.JOINED); s.write_error('first\\n'); s.write_error('second\\n')\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code])
    assert rank_status.read(status) == rank_status.RankStatus("joined", "", "first\n")


def test_states_replace_each_other(status):
    rank_status.write_state(rank_status.FINISHED)
    rank_status.write_state(rank_status.JOINED)
    assert rank_status.read(status).state == rank_status.JOINED


def test_long_errors_keep_their_end(status):
    rank_status.write_error("x" * 100_000 + "the end")
    assert rank_status.read(status).error.endswith("xthe end")


def test_nobody_watches(monkeypatch):
    monkeypatch.delenv(STATUS_VARIABLE, raising=False)
    rank_status.file_path.cache_clear()
    rank_status.write_state(rank_status.JOINED)
    rank_status.write_error("text")
    assert not rank_status.is_watched()
    monkeypatch.setenv(STATUS_VARIABLE, "/proc/1/fd/no")
    rank_status.file_path.cache_clear()
    rank_status.write_error("text")  # who watched has died: no error
