"""A link goes dead: the job ends, names the host, and resumes without it."""

import os
import subprocess
import time

import pytest

from tests.helpers.emulated_cluster import require_cluster
from tests.helpers.killed_job import START_S, Job
from tools.cluster import commands, control
from tools.cluster.state import script_path

NAME = f"lost{os.getpid()}"
LIMIT_S = 60
# Ranks wait for their end: the job must be over long before this sleep.
WAITS = """
import os, sys, time
if os.environ["TFSCALE_RESTART"] == "1":
    print(f"again with {os.environ['PMI_SIZE']} ranks", flush=True)
    sys.exit()
print(f"READY {os.environ['PMI_RANK']} {os.getpid()} {time.time()} .", flush=True)
time.sleep(300)
"""


@pytest.fixture
def layout():
    require_cluster()
    yield control.up(NAME, 2)
    control.down(NAME)


@pytest.mark.timeout(START_S + 120)
def test_a_link_goes_dead(tmp_path, layout):
    hosts = ",".join(f"{node.address}:1" for node in layout.nodes)
    options = ("-H", hosts, "--restarts", "1", "--min-np", "1")
    inside = commands.inside(layout.bridge_namespace)
    environ = commands.run_variables(str(script_path(NAME)), 2, os.cpu_count() or 1)
    with Job(tmp_path, WAITS, options=options, prefix=inside, environ=environ) as job:
        job.ready(0), job.ready(1)
        port = layout.nodes[1].port
        subprocess.run(
            ["ip", "-n", layout.bridge_namespace, "link", "set", port, "down"], check=True
        )
        since = time.time()
        text = "rank 1 on host node1 gives no sign of life"
        while text not in job.output():
            assert time.time() - since < LIMIT_S, job.output()
            time.sleep(0.1)
        # The dead host is asked once more, without an answer, before the restart.
        assert job.process.wait(START_S) == 0, job.output()
        output = job.output()
    assert f"host {layout.nodes[1].address} does not answer and is left out" in output
    assert "again with 1 ranks" in output
