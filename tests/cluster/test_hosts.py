"""Two hosts of two ranks: each link moves what hosts owe each other, whatever their ranks."""

import json
import os
import sys

import pytest

from tests.cluster.host_bytes import VALUES
from tests.helpers.emulated_cluster import require_cluster
from tests.helpers.environment import QUIET
from tools.cluster import control, running
from tools.cluster.commands import Shape

pytestmark = pytest.mark.timeout(0)  # the run has a limit of its own
NAME, HOSTS, SIZE = f"hosts{os.getpid()}", 2, 4
# Vectors that each host sends; rank 1 is the root of the broadcast.
SENT = {
    "allreduce": [1.0, 1.0],
    "reducescatter": [0.5, 0.5],
    "allgather": [0.5, 0.5],
    "broadcast": [1.0, 0.0],
    "alltoall": [1.0, 1.0],  # half of the vector of each of two ranks
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    require_cluster()
    folder = tmp_path_factory.mktemp("hosts")
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tests.cluster.host_bytes", str(folder / "result")]
    control.up(NAME, HOSTS)
    try:
        control.set_shape(NAME, Shape(2e9))
        with (folder / "log").open("w+") as log:
            result = running.run(
                NAME, SIZE, command, {**QUIET, "PYTHONPATH": path}, log, timeout_s=300
            )
            log.seek(0)
            assert result.exit_code == 0, log.read()[-3000:]
    finally:
        control.down(NAME)
    return json.loads((folder / "result").read_text())


@pytest.mark.parametrize("name", SENT)
def test_a_host_sends_each_byte_once(measured, name):
    expected = [4 * VALUES * vectors for vectors in SENT[name]]
    slack = 4 * VALUES * 0.06  # headers, and answers to what was received
    assert measured[name]["bytes"] == pytest.approx(expected, rel=0.06, abs=slack)
