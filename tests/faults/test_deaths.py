"""However a rank dies under `tfscale run`, the others end soon, and the last lines name it."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.killed_job import START_S, Job, job_of, wait_for_end
from tfscale.comm import mpi_files

TRAINING = """
import os, sys, time
import keras, numpy as np
import tfscale.keras as hvd
from tfscale.data import GlobalBatches
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
x, y = np.ones((512, 4)), np.ones((512, 1))

def fail():
    raise ValueError("bad sample")

class Return(Exception):
    pass

def leave():
    raise Return()

actions = {"exception": fail, "wait": lambda: None, "return": leave,
           "os._exit(1)": lambda: os._exit(1), "os._exit(0)": lambda: os._exit(0),
           "os._exit(75)": lambda: os._exit(75),
           "sys.exit(5)": lambda: sys.exit(5), "sys.exit(0)": lambda: sys.exit(0)}

class Report(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and self.model.optimizer.iterations.numpy() < 100:
            print(f"READY {hvd.rank()} {os.getpid()} {time.time()} .", flush=True)
            if hvd.rank() == 1:
                actions[sys.argv[1]]()

try:
    model.fit(GlobalBatches(x, y, batch_size=8), verbose=0, epochs=10**6,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Report()])
except Return:
    pass
"""


# Nearly all the time a rank reads the memory of others.
READING = """
import os, time
import numpy as np, tensorflow as tf
import tfscale
tfscale.init()
total = tf.function(lambda x: tfscale.allreduce(x, op=tfscale.Sum))
vector = tf.ones(1 << 24)
for step in range(10**6):
    if step == 2:
        print(f"READY {tfscale.rank()} {os.getpid()} {time.time()} .", flush=True)
    np.testing.assert_array_equal(total(vector)[::4096], tfscale.size())
"""

KINDS = {
    "exception": (1, "rank 1 on host {host} failed with exit status 1."),
    "os._exit(1)": (1, "rank 1 on host {host} failed with exit status 1."),
    "os._exit(0)": (1, "rank 1 on host {host} ended with exit status 0 before"),
    "os._exit(75)": (1, "rank 1 on host {host} failed with exit status 75. 75 means that"),
    "sys.exit(5)": (5, "rank 1 on host {host} failed with exit status 5, leaving the job before"),
    "sys.exit(0)": (1, "rank 1 on host {host} ended with exit status 0 before"),
    "return": (1, "rank 1 on host {host} ended with exit status 0 before"),
    "SIGKILL": (137, "rank 1 on host {host} was killed by signal 9 (SIGKILL)."),
    "SIGTERM": (143, "rank 1 on host {host} was killed by signal 15 (SIGTERM)."),
}


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.quick if k == "SIGKILL" else ()) for k in KINDS]
)
def test_death_in_training(tmp_path, kind):
    expected_code, expected_text = KINDS[kind]
    is_sent = kind.startswith("SIG")
    with Job(tmp_path, TRAINING, "wait" if is_sent else kind) as job:
        pid, since = job.ready(1)
        other, _ = job.ready(0)
        if is_sent:
            since = time.time()
            os.kill(pid, getattr(signal, kind))
        assert job.end(since) == expected_code, job.output()
        wait_for_end([other], since)
        who, where = job.last_lines()
    assert who.startswith("tfscale: " + expected_text.format(host=os.uname().nodename))
    assert where.startswith("tfscale: its last collective was")
    if kind == "exception":
        assert "ValueError: bad sample\ntfscale: rank 1" in job.output()
        assert job.output().count("Traceback") == 1


def kill_at_a_random_moment(folder, seed, program=TRAINING, size=2):
    """A random rank is killed, a random time after training began; nothing is left."""
    choice = random.Random(seed)
    victim, pause_s = choice.randrange(size), choice.uniform(0.0, 2.0)
    with Job(folder, program, "wait", size=size) as job:
        pids = [job.ready(rank)[0] for rank in range(size)]
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


# 20 of them: make faults-random
N_RANDOM = int(os.environ.get("TFSCALE_TEST_N_RANDOM", "3"))


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize("seed", range(N_RANDOM))
def test_death_at_a_random_moment(tmp_path, seed):
    kill_at_a_random_moment(tmp_path, seed)


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize("seed", range(N_RANDOM + 2))
def test_death_at_a_random_moment_while_others_read_its_memory(tmp_path, seed):
    kill_at_a_random_moment(tmp_path, seed, READING, size=3)


ELSEWHERE = """
import os, signal, sys, time
import keras, numpy as np
import tfscale, tfscale.keras as hvd
from tfscale.data import GlobalBatches
hvd.init()
place, exchange, folder = sys.argv[1:]
exchange = {"Chunked": tfscale.Chunked(first_chunk_layers=1, replicated_dense=0),
            "LocalSGD": tfscale.LocalSGD(groups=2, interval=4), "auto": "auto"}[exchange]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), exchange=exchange), loss="mse")
x, y = np.ones((512, 4)), np.ones((512, 1))
data = lambda: GlobalBatches(x, y, batch_size=8)

def ready():
    print(f"READY {hvd.rank()} {os.getpid()} {time.time()} .", flush=True)

def die():
    if hvd.rank() == 1:
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

if hvd.rank() == 0:
    ready()
callbacks = [tfscale.callbacks.Synchronize(), Die()]
if place == "saving":
    callbacks.insert(0, tfscale.callbacks.Checkpoint(folder, every_n_steps=10))
    sys.addaudithook(watch)
model.fit(data(), verbose=0, epochs=2, callbacks=callbacks, validation_data=data())
if place == "predict":
    model.predict(x, batch_size=8, verbose=0, callbacks=[Die()])
    tfscale.allreduce(np.ones(1))
"""
CELLS = [
    (place, exchange)
    for place in ("evaluate", "predict", "saving")
    for exchange in ("Chunked", "LocalSGD", "auto")
]
# Each place and each exchange once; all with FAULTS_ALL=1.
IN_CI = CELLS if os.environ.get("FAULTS_ALL") else CELLS[::4]


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize(("place", "exchange"), IN_CI)
def test_death_outside_of_steps(tmp_path, place, exchange):
    with Job(tmp_path, ELSEWHERE, place, exchange, str(tmp_path / "saved")) as job:
        pid, since = job.ready(1)
        other, _ = job.ready(0)
        assert job.end(since) == 137, job.output()
        wait_for_end([pid, other], since)
        assert job.last_lines()[0].startswith("tfscale: rank 1 on host"), job.output()
