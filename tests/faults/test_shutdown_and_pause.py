"""Ranks that leave while an exception is on its way, and jobs that are stopped as a whole."""

import os
import re
import signal
import sys
import time

import pytest

from tests.helpers.launching import start_job

LIMIT_S = 120  # starting TensorFlow on a loaded machine takes most of it
SCRIPT = """
import os, sys, time
import keras, numpy as np
import tfscale, tfscale.keras as hvd
hvd.init()
rank = hvd.rank()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.ones((400, 4)), np.ones((400, 1))

class Say(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print(f"READY {os.getpid()} .", flush=True)
            ACTION

def fit():
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Say()]
    model.fit(x, y, batch_size=4, verbose=0, epochs=1, callbacks=callbacks)

"""


def start(tmp_path, action, end):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("ACTION", action) + end)
    limits = {"TFSCALE_STALL_WARNING_S": "2", "TFSCALE_STALL_SHUTDOWN_S": "5"}
    command = [sys.executable, "-u", str(path)]
    return start_job(["-np", "2", "--restarts", "1"], command, limits, tmp_path / "output")


def finish(started):
    """Return exit code and output."""
    deadline = time.monotonic() + LIMIT_S
    try:
        while started.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return started.process.poll(), started.output_tail(100_000)
    finally:
        started.end()


@pytest.mark.timeout(LIMIT_S + 30)
def test_shutdown_in_finally_hides_no_failure(tmp_path):
    """All ranks leave together, and yet the job has failed: it is told, and started again."""
    action = "if rank == 1: raise ValueError('bad sample')"
    end = "try:\n    fit()\nfinally:\n    tfscale.shutdown()\n"
    code, output = finish(start(tmp_path, action, end))
    assert code == 1, output
    assert "ValueError: bad sample" in output
    assert re.search(r"tfscale: rank 1 on host \S+ failed with exit status 1\.", output), output
    assert "tfscale: restart 1 of 1, with 2 ranks" in output


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path):
    """For longer than the time limit of a collective, which somebody was waiting in."""
    # Rank 1 keeps rank 0 waiting, for less than the limit.
    action = "time.sleep(rank * 2.0)"
    started = start(tmp_path, action, "fit()\nprint('done', rank)\n")
    deadline, pids = time.monotonic() + LIMIT_S, []
    while len(pids) < 2 and started.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = re.findall(r"READY (\d+) \.", started.output_tail())
    for pid in pids:
        os.kill(int(pid), signal.SIGSTOP)
    time.sleep(7)  # more than the limit: what is tested
    for pid in pids:
        os.kill(int(pid), signal.SIGCONT)
    code, output = finish(started)
    assert len(pids) == 2, output
    assert code == 0, output
    assert output.count("done") == 2 and "restart" not in output
