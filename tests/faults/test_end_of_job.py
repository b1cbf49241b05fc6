"""However a rank ends, the others end too, soon, with a non-zero exit and the reason."""

import re
import time

import pytest

from tests.helpers.launching import launch_script
from tfscale.launcher.mpi_command import find_mpi

START = """
import os, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfscale, tfscale.keras as hvd
hvd.init()
rank = hvd.rank()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
x, y = np.ones((4096, 4)), np.ones((4096, 1))
started = time.monotonic()

class At(keras.callbacks.Callback):
    def __init__(self, action):
        super().__init__()
        self.action = action
    def on_train_batch_end(self, batch, logs=None):
        if batch == 20 and rank == 1:
            print("rank 1 ends now", flush=True)
            self.action()

def fit(action):
    model.fit(x, y, batch_size=4, verbose=0, epochs=20,
              callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), At(action)])
"""
LIMIT_S = 90  # starting TensorFlow on a loaded machine takes most of it

ENDINGS = {
    "exit with work in flight": ("fit(lambda: sys.exit(3))", "rank 1 has left the job"),
    "kill -9": ("fit(lambda: os.kill(os.getpid(), signal.SIGKILL))", ""),
    "one rank calls a collective less": (
        "if rank == 0:\n    tfscale.allreduce(tf.ones(3), name='lonely')",
        "lonely",
    ),
}


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("ending", ENDINGS)
def test_job_ends(ending):
    code, expected = ENDINGS[ending]
    result = launch_script(2, START + code + "\n", timeout_s=LIMIT_S)
    assert result.exit_code not in (0, None), result.output
    assert expected in result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_traceback_of_the_failed_rank_comes_last():
    """In a job of three, after whatever the others print, and within ten seconds of the error."""
    code = START + (
        "def fail():\n"
        "    print('ALARM', time.time(), flush=True)\n"
        "    raise ValueError('bad sample')\n"
        "fit(fail)\n"
    )
    result = launch_script(3, code, timeout_s=LIMIT_S)
    ended = time.time()
    assert result.exit_code not in (0, None)
    assert ended - float(result.output.split("ALARM ")[1].split()[0]) < 10
    tracebacks = result.output.split("Traceback (most recent call last)")
    assert "ValueError: bad sample" in tracebacks[-1]
    assert len(tracebacks) == 2, result.output


FRAGILE = (
    START
    + """
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
            time.sleep(1)  # the other gradients are in the engine by then, which nothing tells
            print('ALARM', time.time(), flush=True)
            raise ValueError('bad kernel')
        return gradient

layers = [keras.layers.Dense(3), Fragile(), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
exchange = tfscale.Chunked(chunks="per_layer")
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange=exchange), "mse")
fit(lambda: None)
"""
)


@pytest.mark.timeout(LIMIT_S + 30)
def test_an_op_that_fails_amid_a_step_is_told_at_once():
    """Although what another layer has handed over waits for the exchange that never comes."""
    result = launch_script(2, FRAGILE, timeout_s=LIMIT_S)
    ended = time.time()
    assert result.exit_code not in (0, None), result.output
    assert ended - float(result.output.split("ALARM ")[1].split()[0]) < 10, result.output
    assert "bad kernel" in result.output.split("Traceback (most recent call last)")[-1]


@pytest.mark.timeout(LIMIT_S + 30)
def test_jobs_of_their_own_end_alone():
    # Rank 0 lives longer than rank 1 takes to fail, so that it could be killed by mistake.
    code = (
        "import os, time\n"
        "import tfscale\n"
        "tfscale.init(backend='single')\n"
        "if os.environ['PMI_RANK'] == '1':\n"
        "    raise ValueError('only mine')\n"
        "time.sleep(2)\n"
        "print('the other trains', flush=True)\n"
    )
    result = launch_script(2, code, timeout_s=LIMIT_S)
    assert "ValueError: only mine" in result.output
    assert "the other trains" in result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_stall_is_reported_and_ends_the_job():
    # The absent rank: the job must end long before this sleep does.
    code = START + (
        "def read_data():\n    time.sleep(60)\n"
        "if rank == 1:\n    read_data()\ntfscale.allreduce(tf.ones(3), name='waiting')\n"
    )
    env = {"TFSCALE_STALL_WARNING_S": "1", "TFSCALE_STALL_SHUTDOWN_S": "3"}
    result = launch_script(2, code, timeout_s=LIMIT_S, env=env)
    assert result.exit_code not in (0, None)
    waited = r"rank 0 \(host \S+\) has waited [\d.]+ s in .*waiting: waiting for rank 1 \("
    assert re.search(waited, result.output), result.output
    # The absent rank itself says where it is.
    assert re.search(r"rank 1 \(host \S+\) keeps rank 0 \(host \S+\) waiting, in", result.output)
    assert "in read_data" in result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_rank_that_has_finished_does_not_wait_for_ever():
    """The other was stopped: it answers nothing, and its program will never end."""
    # Not at once: the other may still be in tfscale.init, which waits in another way.
    code = START + "if rank == 1:\n    time.sleep(2)\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    env = {"TFSCALE_STALL_WARNING_S": "1", "TFSCALE_STALL_SHUTDOWN_S": "3"}
    result = launch_script(2, code, timeout_s=LIMIT_S, env=env)
    assert result.exit_code not in (0, None), result.output
    text = (
        r"rank 0 \(host \S+\) has finished, and others have not answered.*: rank 1 \(host \S+\)\."
    )
    assert re.search(text, result.output), result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_rank_that_has_finished_waits_for_one_that_is_busy():
    """Longer than the limit: its communication thread answers."""
    # Twice the limit and more: the sleep is what is tested.
    code = START + "if rank == 1:\n    time.sleep(8)\nprint(f'done {rank}')\n"
    env = {"TFSCALE_STALL_WARNING_S": "1", "TFSCALE_STALL_SHUTDOWN_S": "3"}
    result = launch_script(2, code, timeout_s=LIMIT_S, env=env)
    assert result.exit_code == 0, result.output
    assert "is finished and waits for others to finish: waiting for rank 1" in result.output
    assert "done 1" in result.output


NEVER_STARTS = """
import os
if os.environ["PMI_RANK"] == "1":
    raise ValueError("no data here")
import tfscale
tfscale.init()
"""


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_rank_that_fails_before_init_ends_the_job():
    """Hydra lets the others wait in MPI's start-up for as long as they like."""
    if (find_mpi() or pytest.fail("no MPI")).kind != "mpich":
        pytest.skip("others end the job themselves")
    env = {"TFSCALE_STALL_WARNING_S": "1", "TFSCALE_STALL_SHUTDOWN_S": "3"}
    result = launch_script(2, NEVER_STARTS, timeout_s=LIMIT_S, env=env)
    assert result.exit_code not in (0, None), result.output
    assert "no data here" in result.output
    assert "tfscale.init() has waited 1 s for ranks" in result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_exit_code_of_all_ranks_is_kept():
    result = launch_script(2, START + "sys.exit(5)\n", timeout_s=LIMIT_S)
    assert result.exit_code == 5, result.output
