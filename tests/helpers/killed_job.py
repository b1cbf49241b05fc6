"""A job under `tfscale run` whose ranks a test lets die."""

import contextlib
import os
import time

from tests.helpers.launching import start_job, write_script
from tfscale.launcher.mpi_command import find_processes

START_S = 120  # TensorFlow on a loaded machine
# From the death to the end of the job: seconds by itself, minutes at most on a loaded machine. A
# job that waits for its dead rank ends after ten minutes, the limit of waiting.
DEADLINE_S = 120

# How the text of a script begins that trains a model until something ends it.
TRAINING = """
import os, signal, sys, time
import keras, numpy as np
import tfscale, tfscale.keras as hvd
from tests.helpers.launching import meet
meet(__file__)
hvd.init()
rank = hvd.rank()

def ready():
    print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)

def data():
    x, y = np.ones((512, 4)), np.ones((512, 1))
    return tfscale.data.GlobalBatches(x, y, batch_size=8)

def fit(*callbacks, exchange="allreduce", **options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), exchange=exchange)
    model.compile(optimizer, loss="mse")
    # Last, as a Checkpoint must be first.
    callbacks = [*callbacks, hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(data(), verbose=0, callbacks=callbacks, **options)
    return model
"""


class Job:
    def __init__(self, folder, text, *words, size=2, options=(), prefix=(), environ=None):
        self._started = start_job(
            ["-np", str(size), *options],
            [*write_script(folder / "script.py", text), *words],
            environ,
            folder / "output",
            prefix,
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
        while True:
            is_last = self.process.poll() is not None or time.monotonic() > deadline
            _, found, rest = self.output().partition(f"READY {rank} ")
            if found and " ." in rest:
                pid, at = rest.split()[:2]
                return int(pid), float(at)
            if is_last:
                raise AssertionError(self.output())
            time.sleep(0.05)

    def pids(self, size=2):
        """Wait for the lines of all ranks; return their process ids."""
        return [self.ready(rank)[0] for rank in range(size)]

    def output_of_end(self, code, timeout_s=START_S):
        """Require an exit code of the job; return its output."""
        assert self.process.wait(timeout_s) == code, self.output()
        return self.output()

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


def job_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        marks = [v for v in file.read().split(b"\0") if v.startswith(b"TFSCALE_JOB=")]
    return find_processes(marks[0].partition(b"=")[2].decode())


def listening_addresses(pid):
    """Return the IPv4 addresses, as in /proc/net/tcp, on which sockets of a process listen."""
    with open("/proc/net/tcp") as file:
        lines = [line.split() for line in file.readlines()[1:]]
    listening = {line[9]: line[1].partition(":")[0] for line in lines if line[3] == "0A"}
    found = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(listening.get(os.readlink(entry.path).removeprefix("socket:[")[:-1]))
    return [address for address in found if address]
