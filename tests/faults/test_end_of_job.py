"""However a rank ends, the others end too, soon, with a non-zero exit and the reason."""

import re
import time
from dataclasses import dataclass

import pytest

from tests.helpers.launching import launch_script
from tfscale.launcher.mpi_command import find_mpi

LIMIT_S = 90  # starting TensorFlow on a loaded machine takes most of it
LIMITS = {"TFSCALE_STALL_WARNING_S": "1", "TFSCALE_STALL_SHUTDOWN_S": "3"}
START = """
import os, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfscale, tfscale.keras as hvd
from tests.helpers.launching import meet
meet(__file__)
hvd.init()
rank = hvd.rank()
x, y = np.ones((4096, 4)), np.ones((4096, 1))

class At(keras.callbacks.Callback):
    def __init__(self, action):
        super().__init__()
        self.action = action
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and rank == 1:
            self.action()

def fit(action, *layers, exchange="allreduce"):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange), "mse")
    model.fit(x, y, batch_size=4, verbose=0, epochs=20,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), At(action)])

def fail(text):
    print('ALARM', time.time(), flush=True)
    raise ValueError(text)
"""
# In the step of a layer whose gradient fails, others are in the engine by then: nothing tells.
FRAGILE = """
class Fragile(keras.layers.Layer):
    n_steps = 0
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))
    def call(self, x):
        @tf.custom_gradient
        def product(x, w):
            def gradients(up):
                down = tf.matmul(x, up, transpose_a=True)
                down = tf.py_function(self.maybe_fail, [down], tf.float32)
                return tf.matmul(up, w, transpose_b=True), tf.ensure_shape(down, w.shape)
            return tf.matmul(x, w), gradients
        return product(x, tf.convert_to_tensor(self.kernel))
    def maybe_fail(self, gradient):
        self.n_steps += 1
        if self.n_steps == 5 and rank == 1:
            time.sleep(1)  # the others are in the engine by then, which is the case to test
            fail('bad kernel')
        return gradient

fit(lambda: None, keras.layers.Dense(3), Fragile(), exchange=tfscale.Chunked(chunks="per_layer"))
"""


@dataclass
class End:
    """The code of all ranks, patterns of their output, and the exit code; None is any but 0."""

    code: str
    texts: tuple[str, ...] = ()
    exit_code: int | None = None
    size: int = 2
    limits: bool = False
    n_tracebacks: int | None = None


ENDS = {
    "exit with work in flight": End("fit(lambda: sys.exit(3))", ("rank 1 has left the job",)),
    "kill -9": End("fit(lambda: os.kill(os.getpid(), signal.SIGKILL))"),
    "exit code of all ranks": End("sys.exit(5)", exit_code=5),
    "one rank calls a collective less": End(
        "if rank == 0:\n    tfscale.allreduce(tf.ones(3), name='lonely')", ("lonely",)
    ),
    # In a job of three the failed rank's traceback comes after whatever the others print.
    "exception": End(
        "fit(lambda: fail('bad sample'))", ("ValueError: bad sample",), size=3, n_tracebacks=1
    ),
    "an op that fails during a step": End(FRAGILE, ("bad kernel",)),
    # The absent rank, which itself says where it is: the job must end long before its sleep does.
    "a stall": End(
        "def read_data():\n    time.sleep(60)\n"
        "if rank == 1:\n    read_data()\ntfscale.allreduce(tf.ones(3), name='waiting')",
        (
            r"rank 0 \(host \S+\) has waited [\d.]+ s in .*waiting: waiting for rank 1 \(",
            r"rank 1 \(host \S+\) keeps rank 0 \(host \S+\) waiting, in",
            "in read_data",
        ),
        limits=True,
    ),
    # It answers nothing, and its program will never end. The sleep lets rank 0 leave
    # tfscale.init, which waits in another way, before rank 1 stops.
    "the other is stopped": End(
        "if rank == 1:\n    time.sleep(2)\n    os.kill(os.getpid(), signal.SIGSTOP)",
        (r"rank 0 \(host \S+\) has finished, and others .*not answered.*: rank 1 \(host \S+\)\.",),
        limits=True,
    ),
    # The sleep is more than twice the limit: no error, as its communication thread answers.
    "the other is busy": End(
        "if rank == 1:\n    time.sleep(8)\nprint(f'done {rank}')",
        ("is finished and waits for others to finish: waiting for rank 1", "done 1"),
        exit_code=0,
        limits=True,
    ),
}


def run(end, start=START):
    """Run the code of an end; check output and exit code, and how soon after an alarm it came."""
    result = launch_script(
        end.size, f"{start}{end.code}\n", LIMIT_S, LIMITS if end.limits else None
    )
    ended = time.time()
    is_expected = result.exit_code == end.exit_code
    if end.exit_code is None:
        is_expected = result.exit_code not in (0, None)
    assert is_expected, (result.exit_code, result.output)
    for text in end.texts:
        assert re.search(text, result.output), result.output
    if "ALARM" in result.output:
        assert ended - float(result.output.split("ALARM ")[1].split()[0]) < 10, result.output
        *_, last = tracebacks = result.output.split("Traceback (most recent call last)")
        assert end.texts[0] in last, result.output
        assert end.n_tracebacks in (None, len(tracebacks) - 1), result.output


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", ENDS)
def test_job_ends(name):
    run(ENDS[name])


# Rank 0 lives longer than rank 1 takes to fail, so that it could be killed by mistake.
OF_THEIR_OWN = """
import os, time
import tfscale
tfscale.init(backend='single')
if os.environ['PMI_RANK'] == '1':
    raise ValueError('only mine')
time.sleep(2)  # outlives rank 1
print('the other trains', flush=True)
"""
NEVER_STARTS = """
import os
if os.environ["PMI_RANK"] == "1":
    raise ValueError("no data here")
import tfscale
tfscale.init()
"""


@pytest.mark.timeout(LIMIT_S + 30)
def test_jobs_of_their_own_end_alone():
    run(End(OF_THEIR_OWN, ("ValueError: only mine", "the other trains")), start="")


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_rank_that_fails_before_init_ends_the_job():
    """Hydra lets the others wait in MPI's start-up for as long as they like."""
    if (find_mpi() or pytest.fail("no MPI")).kind != "mpich":
        pytest.skip("others end the job themselves")
    texts = ("no data here", r"tfscale\.init\(\) has waited 1 s for ranks")
    run(End(NEVER_STARTS, texts, limits=True), start="")
