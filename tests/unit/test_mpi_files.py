"""Files that MPICH has left: those of this user's ended jobs, and of no others."""

import contextlib
import os
import subprocess
import time

import pytest

from tfscale.native import mpi_files


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders that stand for /dev/shm and /tmp, without other jobs of this machine."""
    places = tmp_path / "shm", tmp_path / "tmp"
    for place in places:
        place.mkdir()
    monkeypatch.setattr(mpi_files, "SHARED_MEMORY", places[0])
    monkeypatch.setattr(mpi_files, "_TOPOLOGIES", places[1])
    monkeypatch.setattr(mpi_files, "_start_of_mpiexec", lambda pid: None)
    return places


def test_a_topology_is_not_left_while_a_job_that_may_have_written_it_runs(folders, monkeypatch):
    memory, topology = folders[0] / "mpich_shm_a1", folders[1] / "hydra_hwloc_xmlfile_b2"
    for path in (memory, topology, folders[1] / "hydra_other", folders[0] / "other"):
        path.write_text("x")
    both = [str(memory), str(topology)]
    assert [path for path, _ in mpi_files.find_left()] == both
    # A job that was started an hour before the file was written, and one that was started after.
    for start, expected in ((time.time() - 3600, both[:1]), (time.time() + 3600, both)):
        monkeypatch.setattr(mpi_files, "_start_of_mpiexec", lambda pid, start=start: start)
        assert [path for path, _ in mpi_files.find_left()] == expected


def test_the_start_of_mpiexec_is_known(tmp_path):
    program = tmp_path / "mpiexec"
    program.symlink_to("/bin/sleep")
    before = time.time()
    for words, is_mpiexec in (([str(program), "60"], True), (["sleep", "60"], False)):
        process = subprocess.Popen(words)
        try:
            deadline = time.monotonic() + 30
            while not is_running(process.pid, words[0]) and time.monotonic() < deadline:
                time.sleep(0.01)
            started = mpi_files._start_of_mpiexec(process.pid)
            assert (started is not None) == is_mpiexec
            assert started is None or before - 2 < started < time.time() + 2
        finally:
            process.kill()
            process.wait()
    assert mpi_files._start_of_mpiexec(process.pid) is None  # it has ended


def is_running(pid, program):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip() == os.path.basename(program)
    return False
