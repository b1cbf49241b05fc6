"""Two nodes on this machine: an allreduce moves what the formula says, and nothing is left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.emulated_cluster import require_cluster
from tests.helpers.environment import QUIET
from tfscale.config import ConfigError, ExchangeError
from tfscale.launcher.mpi_command import find_processes
from tools.cluster import commands, control, running
from tools.cluster.commands import Shape
from tools.cluster.control import existing
from tools.cluster.state import read_state

NAME = f"test{os.getpid()}"
N_BYTES, N_REPEATS = 4 << 20, 5
ALLREDUCE = f"""
import socket, sys
import tensorflow as tf
import tfscale
tfscale.init()
assert socket.gethostname() == f"node{{tfscale.rank()}}", socket.gethostname()
assert (tfscale.local_rank(), tfscale.local_size()) == (0, 1)
assert (tfscale.cross_rank(), tfscale.cross_size()) == (tfscale.rank(), tfscale.size())
ones = tf.ones({N_BYTES} // 4)
for _ in range({N_REPEATS}):
    total = tfscale.allreduce(ones, op=tfscale.Sum)
assert float(tf.reduce_min(total)) == float(tf.reduce_max(total)) == tfscale.size()
tfscale.shutdown()
"""


@pytest.fixture(scope="module")
def cluster():
    require_cluster()
    control.up(NAME, 2)
    yield NAME
    control.down(NAME)
    assert read_state(NAME) is None
    assert not list(Path("/run/netns").glob(f"tfscale-{NAME}-*"))
    assert not find_processes(f"wire-{NAME}")


def _environment():
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    return {**QUIET, "PYTHONPATH": path}


def test_an_allreduce_moves_what_the_formula_says(cluster, tmp_path):
    control.set_shape(cluster, Shape(1e9))
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-c", ALLREDUCE]
        result = running.run(cluster, 2, command, _environment(), log, timeout_s=120)
        log.seek(0)
        assert result.exit_code == 0, log.read()[-3000:]
    expected = N_REPEATS * 2 * (2 - 1) / 2 * N_BYTES  # Patarasuk and Yuan, 2009
    for node, ways in result.bytes.items():
        for way, moved in ways.items():
            assert expected <= moved <= 1.1 * expected, (node, way, moved, expected)


ANSWERS = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
    port.bind(("", 7777))
    print("ready", flush=True)
    while True:
        port.sendto(*port.recvfrom(100))
"""
# Prints the seconds of each answer that comes; an answer to an earlier question is none.
ASKS = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
    port.settimeout(1.0)
    for i in range(int(sys.argv[2])):
        at = time.monotonic()
        port.sendto(str(i).encode(), (sys.argv[1], 7777))
        try:
            while port.recv(100) != str(i).encode():
                pass
            print(time.monotonic() - at)
        except TimeoutError:
            pass
"""


def test_packets_are_delayed_and_lost_while_programs_run(cluster):
    """By the kernel's netem, or by a program where it has none."""
    asking, answering = existing(cluster).layout.nodes

    def ask(n):
        words = (sys.executable, "-c", ASKS, answering.address, str(n))
        command = commands.inside(asking.namespace, *words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return [float(word) for word in done.stdout.split()]

    command = commands.inside(answering.namespace, sys.executable, "-c", ANSWERS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            control.set_shape(cluster, Shape(1e9, delay_ms=20.0))
            # Two links, there and back.
            assert min(ask(3)) >= 4 * 0.02
            control.set_shape(cluster, Shape(1e9, loss_percent=30.0))
            # Each passes with 0.7 ** 4: none or all of 40 are as good as impossible.
            assert 0 < len(times := ask(40)) < 40 and min(times) < 4 * 0.02
            control.set_link(cluster, 1, is_up=False)
            assert not ask(2)
            control.set_link(cluster, 1, is_up=True)
            control.set_shape(cluster, Shape(1e9))
            assert len(ask(5)) == 5
        finally:
            process.kill()


def test_a_sum_is_right_on_bad_links(cluster, tmp_path):
    control.set_shape(cluster, Shape(1e9, delay_ms=2.0, loss_percent=1.0, reorder_percent=10.0))
    with (tmp_path / "log").open("w+") as log:
        command = [sys.executable, "-c", ALLREDUCE]
        result = running.run(cluster, 2, command, _environment(), log, timeout_s=300)
        log.seek(0)
        assert result.exit_code == 0, log.read()[-3000:]
    control.set_shape(cluster, None)
    assert not find_processes(f"wire-{cluster}")


def test_ranks_that_exchange_nothing_are_noticed(cluster):
    with pytest.raises(ExchangeError, match="must move bytes over each link"):
        running.run(cluster, 2, ["true"], timeout_s=60)


def test_exit_codes_come_back(cluster):
    assert running.run(cluster, 2, ["sh", "-c", "exit 3"], timeout_s=60).exit_code == 3


def test_down_after_a_crash_ends_what_was_left(cluster):
    """The process that ran it is killed; mpiexec and its ranks live on until `down`."""
    code = f"from tools.cluster import running; running.run({cluster!r}, 2, ['sleep', '300'])"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **_environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    job = _wait_for(lambda: next(iter(getattr(read_state(cluster), "jobs", {})), None))
    _wait_for(lambda: len(find_processes(job)) >= 5)  # mpiexec, two proxies, two ranks
    process.kill()
    process.wait()
    assert find_processes(job)
    control.down(cluster)
    assert not find_processes(job)
    control.down(cluster)  # nothing left to do
    with pytest.raises(ConfigError, match="must be up"):
        control.read_bytes(cluster)


def _wait_for(look, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
