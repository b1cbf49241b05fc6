"""An unchanged script in which one rank ends, or fails in a step: the job ends and names it."""

import os
import re

import pytest

from tests.helpers.killed_job import START_S, Job, wait_for_end

SCRIPT = """
import os, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfscale
place, kind = sys.argv[1:]

class End(keras.callbacks.Callback):
    def end(self, batch):
        if batch != 2:
            return
        print(f"READY {tfscale.rank()} {os.getpid()} {time.time()} .", file=sys.stderr, flush=True)
        if tfscale.rank() != 1:
            return
        if kind == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exception":
            raise ValueError("bad sample")
        eval(kind)

    def on_train_batch_end(self, batch, logs=None):
        self.end(batch if place == "fit" else -1)
    def on_test_batch_end(self, batch, logs=None):
        self.end(batch)
    def on_predict_batch_end(self, batch, logs=None):
        self.end(batch)

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((64, 2), "float32"), np.ones((64, 1), "float32")
options = dict(batch_size=4, verbose=0, callbacks=[End()])
if place == "predict":
    model.predict(x, **options)
else:
    getattr(model, place)(x, y, **options)
print("all ran")
"""
ENDS = {
    "SIGKILL": (137, "was killed by signal 9 (SIGKILL)."),
    "exception": (1, "failed with exit status 1."),
    "sys.exit(5)": (5, "failed with exit status 5, leaving the job before"),
    "sys.exit(0)": (1, "ended with exit status 0 before"),
    "os._exit(3)": (3, "failed with exit status 3."),
}
PLACES = ("fit", "evaluate", "predict")
CELLS = [(place, kind, size) for size in (2, 3) for place in PLACES for kind in ENDS]
# Each place, kind and number of ranks at least once; all with FAULTS_ALL=1.
IN_CI = CELLS if os.environ.get("FAULTS_ALL") else CELLS[::6]


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(("place", "kind", "size"), IN_CI)
def test_a_rank_ends(tmp_path, place, kind, size):
    code, text = ENDS[kind]
    options = ("--distribute", "--seed", "1")
    with Job(tmp_path, SCRIPT, place, kind, size=size, options=options) as job:
        pids = job.pids(size)
        _, since = job.ready(1)
        assert job.end(since) == code, job.output()
        wait_for_end(pids, since)
        named = [line for line in job.output().splitlines() if line.startswith("tfscale: rank")]
    assert named[-1].startswith(f"tfscale: rank 1 on host {os.uname().nodename} {text}"), named
    assert "all ran" not in job.output()
    if kind == "exception":
        assert "ValueError: bad sample" in job.output()


# One rank's rows alone are bad; `shapes` fails in the kernels of operations.
FAILS = """
import sys
import keras, numpy as np, tensorflow as tf
kind = sys.argv[1]

class Model(keras.Sequential):
    def train_step(self, data):
        x, y = data
        if kind == "assert":
            tf.debugging.assert_less(tf.reduce_max(x), 100.0, message="a value is too large")
        elif kind == "shapes":
            kept = tf.boolean_mask(x, x[:, 0] < 100.0)
            x = tf.minimum(x, tf.reshape(kept, tf.shape(x)))
        return super().train_step((x, y))

model = Model([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x, y = np.ones((64, 2), "float32"), np.ones((64, 1), "float32")
x[int(sys.argv[2])] = 1000.0
model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
print("all ran")
"""
TEXTS = {"assert": "a value is too large", "shapes": "Incompatible shapes: [4,2] vs. [3,2]"}
# The last row of a batch is the last rank's: the first batch is verified, the sixth is not.
STEPS = [
    ("assert", 7, ()),
    ("shapes", 7, ("--verify", "off")),
    ("assert", 47, ()),
    ("shapes", 47, ("--verify", "2")),
    ("assert", 40, ("--verify", "off")),
]


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize(("kind", "row", "verify"), STEPS)
def test_a_step_fails_on_one_rank(tmp_path, kind, row, verify):
    options = ("--distribute", "--seed", "1", *verify)
    with Job(tmp_path, FAILS, kind, str(row), options=options) as job:
        output = job.output_of_end(1)
    assert TEXTS[kind] in output and "all ran" not in output, output
    failing = 1 if row % 8 == 7 else 0
    assert re.search(rf"tfscale: rank {failing} on host \S+ failed with exit status 1", output)
