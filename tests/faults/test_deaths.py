"""However a rank dies under `tfscale run`, the others end soon, and the last lines name it."""

import os
import random
import signal
import sys
import time

import pytest

from tests.helpers.launching import start_job

DEADLINE_S = 10  # from the death to the end of the job
START_S = 120  # TensorFlow on a loaded machine
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

actions = {"exception": fail, "wait": lambda: None,
           "os._exit(1)": lambda: os._exit(1), "os._exit(0)": lambda: os._exit(0)}

class Report(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and self.model.optimizer.iterations.numpy() < 100:
            print(f"READY {hvd.rank()} {os.getpid()} {time.time()} .", flush=True)
            if hvd.rank() == 1:
                actions[sys.argv[1]]()

model.fit(GlobalBatches(x, y, batch_size=8), verbose=0, epochs=10**6,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), Report()])
"""


class Job:
    """A running `tfscale run` of two ranks, and what it printed."""

    def __init__(self, folder, text, *words, options=()):
        script = folder / "script.py"
        script.write_text(text)
        self._started = start_job(
            ["-np", "2", *options],
            [sys.executable, "-u", str(script), *words],
            None,
            folder / "output",
        )
        self.process = self._started.process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._started.end()

    def output(self):
        return self._started.output_tail(100_000)

    def ready(self, rank, timeout_s=START_S):
        """Wait for the line "READY rank pid time ."; return process id and time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            _, found, rest = self.output().partition(f"READY {rank} ")
            if found and " ." in rest:
                pid, at = rest.split()[:2]
                return int(pid), float(at)
            time.sleep(0.05)
        raise AssertionError(self.output())

    def end(self, since):
        """Wait until the job ends, `DEADLINE_S` after `since` at most; return its exit code."""
        code = self.process.wait(START_S)
        assert time.time() - since < DEADLINE_S, self.output()
        return code

    def last_lines(self):
        return self.output().splitlines()[-2:]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pids, since):
    while any(is_alive(pid) for pid in pids):
        assert time.time() - since < DEADLINE_S
        time.sleep(0.05)


KINDS = {
    "exception": (1, "rank 1 on host {host} failed with exit status 1."),
    "os._exit(1)": (1, "rank 1 on host {host} failed with exit status 1."),
    "os._exit(0)": (1, "rank 1 on host {host} ended with exit status 0 before"),
    "SIGKILL": (137, "rank 1 on host {host} was killed by signal 9 (SIGKILL)."),
    "SIGTERM": (143, "rank 1 on host {host} was killed by signal 15 (SIGTERM)."),
}


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize("kind", KINDS)
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


def kill_at_a_random_moment(folder, seed):
    """A random rank of two is killed, a random time after training began."""
    choice = random.Random(seed)
    victim, pause_s = choice.randrange(2), choice.uniform(0.0, 2.0)
    with Job(folder, TRAINING, "wait") as job:
        pids = [job.ready(rank)[0] for rank in range(2)]
        time.sleep(pause_s)
        since = time.time()
        os.kill(pids[victim], signal.SIGKILL)
        assert job.end(since) == 137, job.output()
        wait_for_end(pids, since)
        assert f"tfscale: rank {victim} on host" in job.last_lines()[0], job.output()


# 20 of them: make faults-random
N_RANDOM = int(os.environ.get("TFSCALE_TEST_N_RANDOM", "3"))


@pytest.mark.timeout(START_S + 60)
@pytest.mark.parametrize("seed", range(N_RANDOM))
def test_death_at_a_random_moment(tmp_path, seed):
    kill_at_a_random_moment(tmp_path, seed)


@pytest.mark.timeout(START_S + 60)
def test_launcher_killed(tmp_path):
    with Job(tmp_path, TRAINING, "wait") as job:
        pids = [job.ready(rank)[0] for rank in range(2)]
        since = time.time()
        job.process.kill()
        wait_for_end(pids, since)


# From here on without TensorFlow: what ends a rank is none of its business.
PLAIN = """
import os, signal, sys, time
kind, rank = sys.argv[1], int(os.environ["PMI_RANK"])
n_signals = 0

def on_term(*_):
    global n_signals
    n_signals += 1

if kind == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif kind == "saves":
    signal.signal(signal.SIGTERM, on_term)
if kind == "fails once" and os.environ["TFSCALE_RESTART"] == "0" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "exits" and rank == 1:
    time.sleep(0.5)
    print(f"READY 1 {os.getpid()} {time.time()} .", flush=True)
    sys.exit(3)
if kind == "fails once":
    print(f"rank {rank} after {os.environ['TFSCALE_RESTART']}", flush=True)
    sys.exit()
print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
deadline = time.time() + 100
while not n_signals and time.time() < deadline:
    time.sleep(0.05)
time.sleep(1)  # it is saving
print(f"rank {rank} had {n_signals} signal", flush=True)
sys.exit(75)
"""


@pytest.mark.timeout(START_S)
def test_exit_before_init(tmp_path):
    with Job(tmp_path, PLAIN, "exits", options=("--restarts", "3")) as job:
        _, since = job.ready(1)
        assert job.end(since) == 3
    # It would end so again, so it was not started again.
    assert job.last_lines()[-1].endswith("failed with exit status 3, before tfscale.init().")
    assert "restart 1" not in job.output()


@pytest.mark.timeout(START_S)
def test_ranks_save_when_the_launcher_is_asked_to_end(tmp_path):
    with Job(tmp_path, PLAIN, "saves", options=("--restarts", "3")) as job:
        job.ready(0), job.ready(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(START_S) == 75, job.output()
    for rank in range(2):
        assert f"rank {rank} had 1 signal" in job.output()


@pytest.mark.timeout(START_S)
def test_ranks_that_do_not_end_are_killed(tmp_path):
    with Job(tmp_path, PLAIN, "ignores SIGTERM", options=("--grace-s", "1")) as job:
        pids = [job.ready(rank)[0] for rank in range(2)]
        since = time.time()
        job.process.send_signal(signal.SIGTERM)
        assert job.end(since) == 128 + signal.SIGTERM, job.output()
        wait_for_end(pids, since)


@pytest.mark.timeout(START_S)
def test_launcher_killed_with_ranks_that_ignore_signals(tmp_path):
    with Job(tmp_path, PLAIN, "ignores SIGTERM") as job:
        pids = [job.ready(rank)[0] for rank in range(2)]
        since = time.time()
        job.process.kill()
        wait_for_end(pids, since)


@pytest.mark.timeout(START_S)
def test_a_job_is_started_again(tmp_path):
    with Job(tmp_path, PLAIN, "fails once", options=("--restarts", "3")) as job:
        assert job.process.wait(START_S) == 0, job.output()
    for rank in range(2):
        assert f"rank {rank} after 1" in job.output()
    assert "tfscale: restart 1 of 3, with 2 ranks." in job.output()


@pytest.mark.timeout(START_S)
def test_a_job_is_started_again_with_fewer_ranks(tmp_path):
    options = ("--restarts", "3", "--min-np", "1")
    with Job(tmp_path, PLAIN, "fails once", options=options) as job:
        assert job.process.wait(START_S) == 0, job.output()
    assert "rank 0 after 1" in job.output()
    assert "rank 1 after 1" not in job.output()
