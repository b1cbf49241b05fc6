"""Traced collectives that are not the same on all ranks: an error on every rank, never a result."""

import re

import pytest

from tests.helpers.launching import launch_script

LIMIT_S = 150

# What each rank calls, with its `rank` and another `op` on each, and what the error says.
CALLS = """
call(lambda x: tfscale.allreduce(x, op=op), [3]) -> allreduce SUM (factors 1.0 and 1.0)
call(lambda x: tfscale.allreduce(x, prescale_factor=1.0 + rank), [3]) -> (factors 2.0 and 0.5)
call(lambda x: group(x, postscale_factor=2.0 + rank), [3]) -> allreduce SUM (factors 1.0 and 1.5)
call(lambda x: tfscale.reducescatter(x, op=op), [4]) -> reducescatter SUM (factors 1.0 and 1.0)
train(op=op) -> allreduce SUM (factors 1.0 and 0.5)
train(exchange='sharded', gradient_predivide_factor=1.0 + rank) -> factors 0.5 and 1.0
call(lambda x: sparse(x, 5, op=op), [1, 2]) -> sparse SUM (factors 1.0 and 0.5)
call(lambda x: sparse(x, 5, prescale_factor=1.0 + rank), [1, 2]) -> sparse SUM (factors 2.0 and 0.5)
call(lambda x: sparse(x, 5 + rank), [1, 2]) -> dense shape [6, 2]
train(other_layers()) -> last/kernel float32(4, 1)
train(other_layers(), exchange='sharded') -> odd/kernel float32(2, 4)
call(tfscale.allgather, [4, 2 + 2 * rank]) -> rows of float32(4,)
call(lambda x: tfscale.alltoall(x, [2, 2])[0], [4, 2 + 2 * rank]) -> rows of float32(4,)
call(lambda x, n: sparse(x, n), [1, 2], tf.constant(5 + rank)) -> rows of [6,2]
dynamic(tfscale.allreduce, [100 + 10 * rank]) -> has [110]
dynamic(tfscale.allreduce, [0 if rank else 3]) -> has [0]
dynamic(tfscale.allreduce, [3, 2] if rank else [2, 3]) -> has [3,2]
dynamic(lambda x: group(x, tf.ones([4])), [2 + rank]) -> has [3] [4]
dynamic(lambda x: tfscale.broadcast(x, root_rank=1), [3 - 3 * rank]) -> has [0]
dynamic(tfscale.reducescatter, [4 + rank]) -> has [5]
dynamic(tfscale.allgather, [4, 2 + 2 * rank]) -> rows of [4]
dynamic(lambda x: tfscale.alltoall(x, [2, 2])[0], [4, 2 + 2 * rank]) -> rows of [4]
"""
CASES = dict(line.split(" -> ") for line in CALLS.strip().splitlines())

SCRIPT = """
import sys
from mpi4py import MPI  # which stays initialised from one job to the next
import keras, numpy as np, tensorflow as tf
import tfscale, tfscale.keras as hvd

def call(function, shape, *more):
    return tf.function(function)(tf.ones(shape), *more)

def dynamic(function, shape):
    spec = tf.TensorSpec([None] * len(shape), tf.float32)
    return tf.function(function, input_signature=[spec])(tf.ones(shape))

def group(*tensors, **options):
    return tfscale.grouped_allreduce(list(tensors), **options)

def sparse(values, n_rows, **options):
    shape = tf.stack([n_rows, 2]) if tf.is_tensor(n_rows) else tf.constant([n_rows, 2])
    slices = tf.IndexedSlices(values, tf.constant([0]), shape)
    return tfscale.allreduce(slices, **options).values

def other_layers():
    return [keras.layers.Dense(3 + rank, name="odd"), keras.layers.Dense(1, name="last")]

def train(layers=None, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), *(layers or [keras.layers.Dense(1)])])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options), "mse")
    return model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))

for number, code in enumerate(CASES):
    hvd.init()
    rank = hvd.rank()
    op = tfscale.Sum if rank else tfscale.Average
    try:
        result = "no error: " + str(eval(code)).replace("\\n", " ")
    except Exception as error:
        result = str(error).replace("\\n", " ")
    print(f"<{number}> rank {rank}: {result} <end>", flush=True)
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
"""


@pytest.fixture(scope="module")
def outcomes():
    """Return the outcome of each rank, by case and rank."""
    environ = {"TFSCALE_STALL_SHUTDOWN_S": "15"}
    script = SCRIPT.replace("(CASES)", f"({list(CASES)!r})")
    result = launch_script(2, script, env=environ, timeout_s=LIMIT_S)
    found = re.findall(r"<(\d+)> rank (\d): (.*?) <end>", result.output)
    names = list(CASES)
    return {(names[int(n)], int(rank)): text for n, rank, text in found}, result


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("call", CASES)
def test_every_rank_gets_the_error(call, outcomes):
    found, result = outcomes
    for rank in (0, 1):
        text = found.get((call, rank), "nothing: " + result.output[-800:])
        begins = re.search("ranks (run different collectives|have tensors of different)", text)
        assert begins and CASES[call] in text, text


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
