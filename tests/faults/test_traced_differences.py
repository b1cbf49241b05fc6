"""Traced collectives that are not the same on all ranks: an error on every rank, never a result."""

import re

import pytest

from tests.helpers.launching import launch_script

LIMIT_S = 150

# By name: what each rank calls, with its `rank` and another `op` on each; what the error says.
CASES = {
    "op": (
        "call(lambda x: tfscale.allreduce(x, op=op), tf.ones([3]))",
        "allreduce SUM (factors 1.0 and 1.0)",
    ),
    "prescale": (
        "call(lambda x: tfscale.allreduce(x, prescale_factor=1.0 + rank), tf.ones([3]))",
        "allreduce SUM (factors 2.0 and 0.5)",
    ),
    "postscale of a group": (
        "call(lambda x: tfscale.grouped_allreduce([x], postscale_factor=2.0 + rank), tf.ones([3]))",
        "allreduce SUM (factors 1.0 and 1.5)",
    ),
    "reducescatter": (
        "call(lambda x: tfscale.reducescatter(x, op=op), tf.ones([4]))",
        "reducescatter SUM (factors 1.0 and 1.0)",
    ),
    "optimizer": ("train(op=op)", "allreduce SUM (factors 1.0 and 0.5)"),
    "sharded optimizer": (
        "train(exchange='sharded', gradient_predivide_factor=1.0 + rank)",
        "factors 0.5 and 1.0",
    ),
    "sparse op": (
        "call(lambda x: sparse(x, 5, op=op), tf.ones([1, 2]))",
        "sparse SUM (factors 1.0 and 0.5)",
    ),
    "sparse factor": (
        "call(lambda x: sparse(x, 5, prescale_factor=1.0 + rank), tf.ones([1, 2]))",
        "sparse SUM (factors 2.0 and 0.5)",
    ),
    "dense shape": ("call(lambda x: sparse(x, 5 + rank), tf.ones([1, 2]))", "dense shape [6, 2]"),
    "models": (
        "train([keras.layers.Dense(3 + rank, name='odd'), keras.layers.Dense(1, name='last')])",
        "last/kernel float32(4, 1)",
    ),
    "sharded models": (
        "train([keras.layers.Dense(3 + rank, name='odd'), keras.layers.Dense(1, name='last')], "
        "exchange='sharded')",
        "odd/kernel float32(2, 4)",
    ),
    "rows of another width": ("call(tfscale.allgather, rows(4))", "rows of float32(4,)"),
    "alltoall of another width": (
        "call(lambda x: tfscale.alltoall(x, [2, 2])[0], rows(4))",
        "rows of float32(4,)",
    ),
    "dense shape known at run time": (
        "call(lambda x, n: sparse(x, n), tf.ones([1, 2]), tf.constant(5 + rank))",
        "rows of [6,2]",
    ),
    "length known at run time": ("dynamic(tfscale.allreduce, [100 + 10 * rank])", "has [110]"),
    "nothing on one rank": ("dynamic(tfscale.allreduce, [0 if rank else 3])", "has [0]"),
    "shape of as many elements": (
        "dynamic(tfscale.allreduce, [3, 2] if rank else [2, 3])",
        "has [3,2]",
    ),
    "lengths in a group": (
        "dynamic(lambda x: tfscale.grouped_allreduce([x, tf.ones([4])]), [2 + rank])",
        "has [3] [4]",
    ),
    "broadcast of less": (
        "dynamic(lambda x: tfscale.broadcast(x, root_rank=1), [3 - 3 * rank])",
        "has [0]",
    ),
    "reducescatter of more": ("dynamic(tfscale.reducescatter, [4 + rank])", "has [5]"),
    "rows of twice the width": ("dynamic(tfscale.allgather, [4, 2 + 2 * rank])", "rows of [4]"),
    "alltoall of twice the width": (
        "dynamic(lambda x: tfscale.alltoall(x, [2, 2])[0], [4, 2 + 2 * rank])",
        "rows of [4]",
    ),
}

SCRIPT = """
import sys
from mpi4py import MPI  # which stays initialised from one job to the next
import keras, numpy as np, tensorflow as tf
import tfscale, tfscale.keras as hvd

def call(function, *inputs):
    return tf.function(function)(*inputs)

def dynamic(function, shape):
    spec = tf.TensorSpec([None] * len(shape), tf.float32)
    return tf.function(function, input_signature=[spec])(tf.ones(shape))

def sparse(values, n_rows, **options):
    shape = tf.stack([n_rows, 2]) if tf.is_tensor(n_rows) else tf.constant([n_rows, 2])
    slices = tf.IndexedSlices(values, tf.constant([0]), shape)
    return tfscale.allreduce(slices, **options).values

def rows(count):
    return tf.zeros([count, 2 * (rank + 1)])

def train(layers=None, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), *(layers or [keras.layers.Dense(1)])])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), "mse")
    return model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))

CASES = {cases!r}
for name in sys.argv[1:] or CASES:
    hvd.init()
    rank = hvd.rank()
    op = tfscale.Sum if rank else tfscale.Average
    try:
        result = "no error: " + str(eval(CASES[name])).replace("\\n", " ")
    except Exception as error:
        result = str(error).replace("\\n", " ")
    print(f"<{name}> rank {rank}: {result} <end>", flush=True)
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture(scope="module")
def outcomes():
    calls = {name: code for name, (code, _) in CASES.items()}
    result = launch_script(
        2,
        SCRIPT.replace("{cases!r}", repr(calls)),
        env={"TFSCALE_STALL_SHUTDOWN_S": "15"},
        timeout_s=LIMIT_S,
    )
    found = re.findall(r"<([^>]*)> rank (\d): (.*?) <end>", result.output)
    return {(name, int(rank)): text for name, rank, text in found}, result


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_error(name, outcomes):
    found, result = outcomes
    for rank in (0, 1):
        text = found.get((name, rank), "nothing: " + result.output[-800:])
        assert "All ranks must" in text and CASES[name][1] in text, text


@pytest.mark.timeout(LIMIT_S + 30)
def test_the_job_ends_well(outcomes):
    assert outcomes[1].exit_code == 0, outcomes[1].output[-3000:]


THREADS = """
import threading
import tensorflow as tf
import tfscale

tfscale.init()
total = tf.function(lambda x: tfscale.allreduce(x, op=tfscale.Sum))
errors = []

def call(value):
    try:
        for _ in range(1000):
            total(tf.fill([1 << 16], value))
    except Exception as error:
        errors.append(error)

total(tf.zeros([1 << 16]))
threads = [threading.Thread(target=call, args=(value,)) for value in (1.0, 2.0)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
raise errors[0]
"""


@pytest.mark.timeout(LIMIT_S + 30)
def test_one_function_on_two_threads_is_refused():
    """Calls of one rank would be paired with any of the other's."""
    result = launch_script(2, THREADS, timeout_s=LIMIT_S)
    assert result.exit_code not in (0, None)
    assert "must be called by one thread at a time" in result.output, result.output
