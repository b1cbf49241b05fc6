"""However a rank dies under `tfscale run`, the others end soon, and the last lines name it."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.killed_job import START_S, TRAINING, Job, job_of, wait_for_end
from tfscale.native import mpi_files

ENDLESS = f"""{TRAINING}
class Return(Exception):
    pass

class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch in (20, 21) and self.model.optimizer.iterations.numpy() < 100:
            if batch == 20:
                ready()
            elif rank == 1:  # rank 0 is ready as well, or this step would not have ended
                self.act(sys.argv[1])

    def act(self, kind):
        if kind == "exception":
            raise ValueError("bad sample")
        if kind == "return":
            raise Return()
        if kind != "wait":  # os._exit(1) and the like
            eval(kind)

try:
    fit(Act(), epochs=10**6)
except Return:
    pass
"""

# Nearly all the time a rank reads the memory of others.
READING = """
import os, time
import numpy as np, tensorflow as tf
import tfscale
from tests.helpers.launching import meet
meet(__file__)
tfscale.init()
total = tf.function(lambda x: tfscale.allreduce(x, op=tfscale.Sum))
vector = tf.ones(1 << 24)
for step in range(10**6):
    if step == 2:
        print(f"READY {tfscale.rank()} {os.getpid()} {time.time()} .", flush=True)
    np.testing.assert_array_equal(total(vector)[::4096], tfscale.size())
"""

KINDS = {
    "exception": (1, "failed with exit status 1."),
    "os._exit(1)": (1, "failed with exit status 1."),
    "os._exit(0)": (1, "ended with exit status 0 before"),
    "os._exit(75)": (1, "failed with exit status 75. 75 means that"),
    "sys.exit(5)": (5, "failed with exit status 5, leaving the job before"),
    "sys.exit(0)": (1, "ended with exit status 0 before"),
    "return": (1, "ended with exit status 0 before"),
    "SIGKILL": (137, "was killed by signal 9 (SIGKILL)."),
    "SIGTERM": (143, "was killed by signal 15 (SIGTERM)."),
}


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.quick if k == "SIGKILL" else ()) for k in KINDS]
)
def test_death_in_training(tmp_path, kind):
    expected_code, expected_text = KINDS[kind]
    is_sent = kind.startswith("SIG")
    with Job(tmp_path, ENDLESS, "wait" if is_sent else kind) as job:
        pid, since = job.ready(1)
        other, _ = job.ready(0)
        if is_sent:
            since = time.time()
            os.kill(pid, getattr(signal, kind))
        assert job.end(since) == expected_code, job.output()
        wait_for_end([other], since)
        who, where = job.last_lines()
    assert who.startswith(f"tfscale: rank 1 on host {os.uname().nodename} {expected_text}")
    assert where.startswith("tfscale: its last collective was")
    if kind == "exception":
        assert "ValueError: bad sample\ntfscale: rank 1" in job.output()
        assert job.output().count("Traceback") == 1


# 20 of them: make faults-random
N_RANDOM = int(os.environ.get("TFSCALE_TEST_N_RANDOM", "3"))


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(
    ("program", "size", "per_host", "seed"),
    [
        *((ENDLESS, 2, 0, seed) for seed in range(N_RANDOM)),
        *((READING, 3, 0, seed) for seed in range(N_RANDOM)),
        *((READING, 3, 2, seed) for seed in range(N_RANDOM)),
        *((READING, 4, 2, seed) for seed in range(N_RANDOM)),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_death_at_a_random_moment(tmp_path, program, size, per_host, seed):
    """A random rank is killed, a random time after it began; nothing is left."""
    choice = random.Random(seed)
    victim, pause_s = choice.randrange(size), choice.uniform(0.0, 2.0)
    hosts = {"TFSCALE_RANKS_PER_HOST": str(per_host)}
    with Job(tmp_path, program, "wait", size=size, environ=hosts) as job:
        pids = job.pids(size)
        processes = job_of(pids[0])
        files = mpi_files.used_by(processes)
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in processes)
        # Shared memory that has a name would stay.
        assert not re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE)
        time.sleep(pause_s)
        since = time.time()
        os.kill(pids[victim], signal.SIGKILL)
        assert job.end(since) == 137, job.output()
        wait_for_end(processes, since)
        assert f"tfscale: rank {victim} on host" in job.last_lines()[0], job.output()
    assert not [path for path in files if os.path.exists(path)]


LIMITS = {"TFSCALE_STALL_WARNING_S": "2", "TFSCALE_STALL_SHUTDOWN_S": "5"}


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(("size", "per_host"), [(3, 0), (4, 2)])
def test_a_rank_that_is_stopped_while_vectors_are_exchanged(tmp_path, size, per_host):
    hosts = {"TFSCALE_RANKS_PER_HOST": str(per_host)}
    with Job(tmp_path, READING, size=size, environ={**LIMITS, **hosts}) as job:
        pids = job.pids(size)
        os.kill(pids[1], signal.SIGSTOP)
        assert job.process.wait(START_S) not in (0, None), job.output()
        output = job.output()
    assert re.search(r"rank 1 \(host \S+\) does not answer", output), output
    assert "TFSCALE_STALL_SHUTDOWN_S" in output, output


ELSEWHERE = f"""{TRAINING}
place, exchange, folder = sys.argv[1:]
exchange = {{"Chunked": tfscale.Chunked(first_chunk_layers=1, replicated_dense=0),
            "LocalSGD": tfscale.LocalSGD(groups=2, interval=4), "auto": "auto"}}[exchange]

def die():
    if rank == 1:
        ready()
        os.kill(os.getpid(), signal.SIGKILL)

class Die(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        if place == "evaluate" and batch == 5:
            die()
    def on_predict_batch_end(self, batch, logs=None):
        if batch == 5:
            die()

def watch(event, words):  # of Python itself: files that are opened to be written
    if event == "open" and str(words[0]).startswith(folder) and "w" in (words[1] or ""):
        die()

if rank == 0:
    ready()
callbacks = [Die()]
if place == "saving":
    callbacks.insert(0, tfscale.callbacks.Checkpoint(folder, every_n_steps=10))
    sys.addaudithook(watch)
model = fit(*callbacks, exchange=exchange, epochs=2, validation_data=data())
if place == "predict":
    model.predict(np.ones((512, 4)), batch_size=8, verbose=0, callbacks=[Die()])
    tfscale.allreduce(np.ones(1))
"""
PLACES, EXCHANGES = ("evaluate", "predict", "saving"), ("Chunked", "LocalSGD", "auto")
CELLS = [(place, exchange) for place in PLACES for exchange in EXCHANGES]
# Each place and each exchange once; all with FAULTS_ALL=1.
IN_CI = CELLS if os.environ.get("FAULTS_ALL") else CELLS[::4]


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(("place", "exchange"), IN_CI)
def test_death_outside_of_steps(tmp_path, place, exchange):
    with Job(tmp_path, ELSEWHERE, place, exchange, str(tmp_path / "saved")) as job:
        pid, since = job.ready(1)
        other, _ = job.ready(0)
        assert job.end(since) == 137, job.output()
        wait_for_end([pid, other], since)
        assert job.last_lines()[0].startswith("tfscale: rank 1 on host"), job.output()


SHUTS_DOWN = f"""{TRAINING}
class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            ready()
            if sys.argv[1] == "raise" and rank == 1:
                raise ValueError("bad sample")
            # Rank 0 waits for rank 1 in a collective when the job is stopped; less than the limit.
            time.sleep(2.0 * rank)

try:
    fit(Act())
    print(f"done {{rank}} .", flush=True)
finally:
    tfscale.shutdown()
"""


@pytest.mark.timeout(3 * START_S)
def test_shutdown_in_finally_hides_no_failure(tmp_path):
    """All ranks leave together, and yet the job has failed: it is told, and started again."""
    with Job(tmp_path, SHUTS_DOWN, "raise", options=["--restarts", "1"], environ=LIMITS) as job:
        output = job.output_of_end(1, 2 * START_S)
    assert "ValueError: bad sample" in output
    assert re.search(r"tfscale: rank 1 on host \S+ failed with exit status 1\.", output), output
    assert "tfscale: restart 1 of 1, with 2 ranks" in output


@pytest.mark.timeout(3 * START_S)
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path):
    """For longer than the time limit of a collective, which somebody was waiting in."""
    with Job(tmp_path, SHUTS_DOWN, "wait", environ=LIMITS) as job:
        pids = job.pids()
        for number, pause_s in ((signal.SIGSTOP, 7), (signal.SIGCONT, 0)):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(pause_s)  # more than the limit: what is tested
        output = job.output_of_end(0)
    assert all(f"done {rank} ." in output for rank in range(2)), output


CATCHES = """
import tensorflow as tf
import tfscale
tfscale.init()
if tfscale.rank() == 0:
    try:
        tfscale.allreduce(tf.ones(3))
    except tfscale.ExchangeError:
        print("caught", flush=True)
"""


def test_an_error_of_communication_that_the_program_catches_is_told(tmp_path):
    with Job(tmp_path, CATCHES) as job:
        output = job.output_of_end(0)
    told = (
        r"rank 0 on host \S+ ended well, but a collective failed there, .*: rank 1 has left the job"
    )
    assert "caught" in output and re.search(told, output.splitlines()[-1]), output
