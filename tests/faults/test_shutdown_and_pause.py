"""Ranks that leave while an exception is on its way, and jobs that are stopped as a whole."""

import os
import re
import signal
import time

import pytest

from tests.helpers.killed_job import START_S, Job

SCRIPT = """
import os, sys, time
import keras, numpy as np
import tfscale, tfscale.keras as hvd
hvd.init()
rank = hvd.rank()

class Act(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20:
            print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
            if sys.argv[1] == "raise" and rank == 1:
                raise ValueError("bad sample")
            time.sleep(2.0 * rank)  # keeps rank 0 waiting, for less than the limit

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Act()]
try:
    model.fit(np.ones((400, 4)), np.ones((400, 1)), batch_size=4, verbose=0, callbacks=callbacks)
    print(f"done {rank} .", flush=True)
finally:
    tfscale.shutdown()
"""
LIMITS = {"TFSCALE_STALL_WARNING_S": "2", "TFSCALE_STALL_SHUTDOWN_S": "5"}


@pytest.mark.timeout(3 * START_S)
def test_shutdown_in_finally_hides_no_failure(tmp_path):
    """All ranks leave together, and yet the job has failed: it is told, and started again."""
    with Job(tmp_path, SCRIPT, "raise", options=["--restarts", "1"], environ=LIMITS) as job:
        code, output = job.process.wait(2 * START_S), job.output()
    assert code == 1, output
    assert "ValueError: bad sample" in output
    assert re.search(r"tfscale: rank 1 on host \S+ failed with exit status 1\.", output), output
    assert "tfscale: restart 1 of 1, with 2 ranks" in output


@pytest.mark.timeout(3 * START_S)
def test_a_job_that_is_stopped_as_a_whole_goes_on(tmp_path):
    """For longer than the time limit of a collective, which somebody was waiting in."""
    with Job(tmp_path, SCRIPT, "wait", environ=LIMITS) as job:
        pids = [job.ready(rank)[0] for rank in range(2)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(7)  # more than the limit: what is tested
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        code, output = job.process.wait(START_S), job.output()
    assert code == 0, output
    assert all(f"done {rank} ." in output for rank in range(2)), output
