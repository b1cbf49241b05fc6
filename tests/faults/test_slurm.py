"""Jobs under a real Slurm, on hosts that are network namespaces: two nodes with two ranks each."""

import re

import pytest

from tests.helpers.launching import job_variables, job_words, write_script
from tests.helpers.slurm_hosts import SlurmHosts, require_slurm

LIMIT_S = 600.0  # for TensorFlow in four processes on a busy machine
pytestmark = pytest.mark.timeout(3 * LIMIT_S)

# With an address UCX sends what follows it in memory: whatever programs have left there. This one
# leaves values other than zero, and has been seen to hang, and to be aborted, with UCX.
MPI = """
import {first}
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
sizes = [*range(64, 12000, 8)] * 2
blocks = [ctypes.memset(libc.malloc(size), 90, size) for size in sizes]
for block in blocks[::2] + blocks[1::4]:
    libc.free(block)
from mpi4py import MPI
print("rank", MPI.COMM_WORLD.rank, "of", MPI.COMM_WORLD.allreduce(1), flush=True)
"""
TRAINS = """
import os, sys, time
import keras, numpy as np
import tfscale, tfscale.keras as hvd
folder, waits = sys.argv[1], sys.argv[2:] == ["waits"]
hvd.init()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
n_starts = os.environ.get("SLURM_RESTART_COUNT", "0")

class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        n_steps = int(model.optimizer.iterations.numpy())
        print(f"rank {hvd.rank()}, start {n_starts}: step {n_steps}", flush=True)
        while waits and n_starts == "0" and n_steps == 3 and not tfscale.preemption.is_requested():
            time.sleep(0.05)

callbacks = [tfscale.callbacks.Checkpoint(folder), Watch()]
callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
data = tfscale.data.GlobalBatches(x, x.sum(1, keepdims=True), batch_size=8)
model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
print(f"rank {hvd.rank()} of {hvd.size()} has trained", flush=True)
"""
WAITS = """
import os, time
print("READY", os.environ["SLURM_PROCID"], flush=True)
time.sleep(600)  # the end of the job must come long before
"""
BATCH = """#!/bin/bash
#SBATCH --ntasks=4 --ntasks-per-node=2 --requeue --open-mode=append
{command}
code=$?
echo "exit code $code"
[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    require_slurm()
    with SlurmHosts(tmp_path_factory.mktemp("slurm")) as hosts:
        yield hosts


SRUN = ["srun", "--mpi=pmi2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
RUN = ["--slurm", "-np", "4"]
ALL_STEPS = {rank: [*range(1, 17)] for rank in "0123"}


def steps(output, start):
    """Return the steps that each rank took after a number of starts."""
    found = re.findall(rf"rank (\d), start {start}: step (\d+)\n", output)
    return {rank: [int(step) for one, step in found if one == rank] for rank, _ in found}


@pytest.mark.parametrize(("first", "words"), [("tfscale", SRUN), ("sys", job_words(RUN, []))])
def test_mpi_starts_whatever_memory_holds(hosts, tmp_path, first, words):
    pytest.importorskip("mpi4py")
    command = write_script(tmp_path / "mpi.py", MPI.format(first=first))
    output = hosts.output_of(0, [*words, *command], tmp_path / "output", job_variables(), LIMIT_S)
    assert all(f"rank {rank} of 4\n" in output for rank in range(4)), output


def test_ranks_train_under_a_bare_srun(hosts, tmp_path):
    command = write_script(tmp_path / "train.py", TRAINS)
    words = [*SRUN, *command, str(tmp_path / "checkpoints")]
    output = hosts.output_of(0, words, tmp_path / "output", job_variables(), LIMIT_S)
    assert all(f"rank {rank} of 4 has trained\n" in output for rank in range(4)), output
    assert steps(output, 0) == ALL_STEPS


def test_a_preempted_job_resumes(hosts, tmp_path):
    """A job of a partition with more priority takes the nodes; ranks save, and resume later."""
    command = write_script(tmp_path / "train.py", TRAINS)
    words = job_words(["--slurm"], [*command, str(tmp_path / "checkpoints"), "waits"])
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(BATCH.format(command=" ".join(words)))
    batch = ["sbatch", "--parsable", f"--output={output}"]
    done = hosts.run(0, [*batch, str(script)], job_variables())
    assert done.returncode == 0, done.stderr

    def says(text, n):
        return lambda: output.exists() and output.read_text().count(text) >= n

    hosts.wait_until(says("start 0: step 3\n", 4), "training", LIMIT_S, output)
    urgent = ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    assert hosts.run(0, [*urgent, "--wrap=true"]).returncode == 0
    hosts.wait_until(says("of 4 has trained\n", 4), "the end", LIMIT_S, output)
    text = output.read_text()
    assert text.count("exit code 75\n") == 1, text
    # No step is lost and none is computed twice.
    first, second = steps(text, 0), steps(text, 1)
    assert {rank: first[rank] + second[rank] for rank in first} == ALL_STEPS


def test_a_lost_node_ends_the_job(hosts, tmp_path):
    command = write_script(tmp_path / "waits.py", WAITS)
    words = job_words(RUN, command)
    output = tmp_path / "output"
    job = hosts.start(0, words, output, job_variables())
    hosts.wait_until(lambda: output.read_text().count("READY") == 4, "4 ranks", LIMIT_S, output)
    hosts.lose(2)
    assert job.wait(LIMIT_S) not in (0, 75), output.read_text()
    assert "on host node2 gives no sign of life" in output.read_text().splitlines()[-1]
