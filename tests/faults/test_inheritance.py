"""Ranks and their children: inherited variables and sockets, and files left on a host."""

import os
import re
import shutil
import signal
import time

import pytest

from tests.helpers.killed_job import START_S, Job, job_of, listening_addresses
from tfscale.launcher.mpi_command import find_mpi
from tfscale.native import mpi_files

pytestmark = pytest.mark.timeout(2 * START_S)
# Open MPI names its files and variables otherwise; CI has MPICH, so nothing is skipped there.
mpich_only = pytest.mark.skipif(
    (find_mpi() or pytest.fail("no MPI")).kind != "mpich", reason="names and variables are MPICH's"
)
WAITS = """
import os, sys, time
import numpy as np
import tfscale
rank = os.environ["PMI_RANK"]
if sys.argv[1] == "in init":
    print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
    if rank == "1":
        time.sleep(100)
tfscale.init()
if sys.argv[1] == "64 MB":
    total = tfscale.allreduce(np.ones(1 << 24, np.float32), op=tfscale.Sum)
    assert (total.numpy() == tfscale.size()).all()
print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
time.sleep(100)
"""


def wait_until(is_true, timeout_s=START_S):
    deadline = time.monotonic() + timeout_s
    while not (value := is_true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def existing(paths):
    return [path for path in paths if os.path.exists(path)]


def in_memory(paths):
    return {path for path in paths if path.startswith("/dev/shm/")}


@mpich_only
def test_what_mpi_has_made_while_it_starts_is_removed(tmp_path):
    with Job(tmp_path, WAITS, "in init") as job:
        pids = job.pids()
        assert wait_until(lambda: in_memory(mpi_files.used_by(pids))), job.output()
        files = mpi_files.used_by(job_of(pids[0]))
        assert existing(files) == list(files)
        os.kill(pids[1], signal.SIGKILL)
        job.output_of_end(137)
    assert not existing(files)


@mpich_only
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_job_that_is_killed_leaves_no_file(tmp_path, victim):
    with Job(tmp_path, WAITS, "later") as job:
        pids = job.pids()
        files = mpi_files.used_by(job_of(pids[0]))
        # Ranks share memory that has no name any more, whatever ends them.
        assert in_memory(files) and not any(map(os.path.exists, in_memory(files)))
        wait_until(lambda: not any(map(os.path.exists, files)), 10)
        assert not existing(files)
        if victim == "rank":
            os.kill(pids[1], signal.SIGKILL)
        else:
            job.process.kill()
        job.process.wait(START_S)
        assert not existing(files)


def with_shared_memory(size):
    """The prefix of a command that gives it a /dev/shm of its own."""
    mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    return ("unshare", "-m", "sh", "-c", mount, "sh")


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount"
)


@mpich_only
@needs_mount
@pytest.mark.parametrize("least_read_bytes", ["32768", "0"])  # 0: by messages
def test_16_mb_of_shared_memory_are_enough_for_larger_vectors(tmp_path, least_read_bytes):
    prefix, environ = with_shared_memory("16m"), {"TFSCALE_HOST_MEMORY": least_read_bytes}
    with Job(tmp_path, WAITS, "64 MB", prefix=prefix, environ=environ) as job:
        job.pids()


@mpich_only
@needs_mount
def test_too_little_shared_memory_is_said_at_once(tmp_path):
    prefix = with_shared_memory("1500k")
    with Job(tmp_path, WAITS, "later", options=("--restarts", "3"), prefix=prefix) as job:
        output = job.output_of_end(1)
    said = r"2 ranks on a host need 2 times 1\.1 MB in /dev/shm\. Received: [01]\.\d MB free\."
    assert re.search(said, output), output  # the other rank may have taken some
    assert "restart 1" not in output


@mpich_only
def test_ranks_of_a_host_listen_on_the_loopback_interface_only(tmp_path):
    with Job(tmp_path, WAITS, "later") as job:
        pids = job.pids()
        addresses = [address for pid in pids for address in listening_addresses(pid)]
    assert [address for address in addresses if address != "0100007F"] == []


CHILDREN = """
import os, subprocess, sys
import numpy as np, tensorflow as tf
import tfscale
tfscale.init()
code = "import tfscale; tfscale.init(); print('child in a job of', tfscale.size())"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
print(done.stdout + done.stderr, flush=True)
assert np.asarray(tfscale.allreduce(np.ones(3, np.float32), op=tfscale.Sum)).sum() == 6

def end_of(action):
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def communicates():
    try:
        tfscale.allreduce(np.ones(3, np.float32), op=tfscale.Sum)
    except tfscale.ExchangeError as error:
        print("child fails:", error, flush=True)
        os._exit(3)

def leaves():
    tfscale.shutdown()
    os._exit(5)

def raises():
    sys.excepthook(ValueError, ValueError("of a child"), None)
    os._exit(6)

ends = [end_of(action) for action in (communicates, leaves, raises)]
print(f"ends of children: {ends}", flush=True)
tfscale.allreduce(np.ones(3, np.float32), op=tfscale.Sum)
"""


def test_children_of_a_rank_are_no_ranks(tmp_path):
    """Programs that it starts are jobs of their own; forked ones may end as they like."""
    with Job(tmp_path, CHILDREN) as job:
        output = job.output_of_end(0, 2 * START_S)
    assert output.count("child in a job of 1\n") == 2, output
    assert output.count("ends of children: [3, 5, 6]") == 2, output
    for rank in range(2):
        assert f"forked by rank {rank}. Start helpers as programs of their own" in output
