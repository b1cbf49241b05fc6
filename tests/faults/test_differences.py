"""Ranks that do not do the same, and processes that are none: messages, and what continues."""

import pytest

from tests.faults.test_end_of_job import LIMIT_S, START
from tests.helpers.launching import launch_script

FIRST_PARAMETER = {
    "allreduce": "dense/kernel float32({}, 1)",
    "sharded": "odd/kernel float32(4, {})",
}


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("exchange", FIRST_PARAMETER)
def test_different_models_are_named(exchange):
    """Both ranks say which parameter differs first, though all of them are sent together."""
    code = START + (
        "width = 3 + rank\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(width, name='odd'),\n"
        "                          keras.layers.Dense(1)])\n"
        "optimizer = keras.optimizers.SGD(0.1)\n"
        f"model.compile(hvd.DistributedOptimizer(optimizer, exchange={exchange!r}), loss='mse')\n"
        "model.train_on_batch(x[:4], y[:4])\n"
    )
    result = launch_script(2, code, timeout_s=LIMIT_S)
    assert result.exit_code not in (0, None)
    for rank in (0, 1):
        parameter = FIRST_PARAMETER[exchange].format(3 + rank)
        assert f"rank {rank} has '" in result.output and parameter in result.output, result.output


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(
    "call",
    ["tfscale.allgather(x)", "tfscale.alltoall(x, [2, 2])[0]"],
    ids=["allgather", "alltoall"],
)
def test_rows_of_different_widths_are_refused_in_functions(call):
    """An even number of rows of twice the width would pass for twice as many rows."""
    code = START + (
        f"step = tf.function(lambda x: {call})\n"
        "print('rows', step(tf.zeros([4, 2 * (rank + 1)])).shape)\n"
    )
    result = launch_script(2, code, timeout_s=LIMIT_S)
    assert result.exit_code not in (0, None), result.output
    assert "All ranks must run the same collectives" in result.output
    assert "rows of float32(2,)" in result.output and "rows of float32(4,)" in result.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_forked_children_are_no_ranks():
    """They may leave the job, or end by an error of their own: the job continues."""
    code = START + (
        "def end_of(action):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        action()\n"
        "    for _ in range(100):\n"
        "        done, status = os.waitpid(child, os.WNOHANG)\n"
        "        if done:\n"
        "            return os.waitstatus_to_exitcode(status)\n"
        "        time.sleep(0.1)\n"
        "    os.kill(child, signal.SIGKILL)\n"
        "    return 'no end'\n"
        "def leaves():\n"
        "    tfscale.shutdown()\n"
        "    os._exit(5)\n"
        "def raises():\n"
        "    sys.excepthook(ValueError, ValueError('of a child'), None)\n"
        "    os._exit(6)\n"
        "ends = [end_of(leaves), end_of(raises)]\n"
        "total = tfscale.allreduce(tf.constant(1.0), op=tfscale.Sum).numpy()\n"
        "print(f'rank {rank}: {ends} {total}', flush=True)\n"
    )
    result = launch_script(2, code, timeout_s=LIMIT_S)
    assert result.exit_code == 0, result.output
    for rank in (0, 1):
        assert f"rank {rank}: [5, 6] 2.0" in result.output, result.output
