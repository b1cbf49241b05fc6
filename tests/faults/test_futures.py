"""Gathers of parameters that are under way when the job ends, or when communication fails."""

import pytest

from tests.helpers.launching import launch_script

START = """
import time
import keras, numpy as np, tensorflow as tf
import tfscale
from tfscale.optimizer import futures
from tests.parallel.futures_model import Posts
tfscale.init()
rank = tfscale.rank()
variables = [keras.Variable(np.ones([1000], "float32"), name=f"v{i}") for i in range(4)]
futures.make_futures(variables)
posts = Posts(variables, 5000)
posts.run(tf.constant(0.0))
futures.drain(variables)
tfscale.barrier()

def run_late(step):
    if rank == 0:
        time.sleep(0.3)
    posts.run(tf.constant(float(step)))

def check(step):
    for v, value in zip(variables, posts.expected(step)):
        np.testing.assert_array_equal(v.numpy(), value)
    print(f"rank {rank} reads step {step}", flush=True)

def error_of(read):
    try:
        read()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
"""
LIMIT_S = 90
pytestmark = pytest.mark.timeout(LIMIT_S + 30)


def output_of(code):
    """Return the output of code that ends with 0 on two ranks."""
    result = launch_script(2, START + code, timeout_s=LIMIT_S)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("end", ["", "tfscale.shutdown()\ncheck(1)\n"])
def test_gathers_under_way_are_waited_for(end):
    """By the end of a program, and by shutdown."""
    output = output_of("run_late(1)\n" + end)
    assert not end or all(f"rank {rank} reads step 1" in output for rank in range(2)), output


def test_a_rank_that_leaves_without_posting():
    """The others keep the old values, and reading says why."""
    output = output_of("""
if rank == 1:
    posts.run(tf.constant(1.0))
    text = error_of(variables[0].numpy)
    assert text.startswith("ExchangeError: rank 0 has left the job"), text
    tfscale.shutdown()
    assert "rank 0 has left" in error_of(lambda: variables[1] + 1)
    variables[0].assign(tf.zeros([1000]))
    assert variables[0].numpy().max() == 0
    assert "rank 0 has left" in error_of(variables[1].numpy)
    print("rank 1 knows", flush=True)
""")
    assert "rank 1 knows" in output, output


def test_communication_fails():
    """Ranks that cut the buffer differently: all readers on all ranks get the same text."""
    output = launch_script(
        2,
        START
        + """
import dataclasses
layout = posts.layouts[0]
cuts = (0, layout.length // 2 + 16 * rank, layout.length)
posts.layouts = (dataclasses.replace(layout, cuts=cuts),)
other = tf.function(lambda: posts.post(1))
other()
text = error_of(variables[0].numpy)
assert text.startswith("ExchangeError") and "different collectives" in text, text
print(f"rank {rank} reads: {text}", flush=True)
assert error_of(variables[0].numpy) == text
inside = tf.function(lambda: variables[0] + 1)
assert "TFSCALE_FAILED" in error_of(inside)
posts.run(tf.constant(2.0))
assert error_of(variables[0].numpy) == text
variables[0].assign(tf.zeros([1000]))
assert variables[0].numpy().max() == 0
print(f"rank {rank} is through", flush=True)
""",
        timeout_s=LIMIT_S,
    ).output
    texts = {line.partition(" reads: ")[2] for line in output.splitlines() if "reads:" in line}
    assert len(texts) == 1, output
    assert output.count("is through") == 2, output
