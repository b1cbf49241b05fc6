"""Every kind of failure under every exchange: the job ends and names the rank, or recovers.

CI runs the cells of `IN_CI`; `make faults` runs all of them, `make faults REPEAT=3` thrice.
"""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.launching import start_job

EXCHANGES = ("allreduce", "chunked", "sharded", "dense", "local", "adaptive")
START_S = 120  # TensorFlow on a loaded machine
# The second one holds for init too: on a loaded machine ranks come to it seconds apart.
LIMITS = {"TFSCALE_STALL_WARNING_S": "2", "TFSCALE_STALL_SHUTDOWN_S": "20"}
# From the start of the job to its end: the limits above, and what starting and ending take.
DEADLINE_S = START_S + 60
DIED = r"rank 1 on host \S+ "
ENDS = {
    "exception": ["injected at rank 1", DIED + "failed with exit status 1"],
    "os._exit": [DIED + "failed with exit status 7"],
    "SIGKILL": [DIED + r"was killed by signal 9 \(SIGKILL\)"],
    "SIGTERM": [DIED + r"was killed by signal 15 \(SIGTERM\)"],
    "SIGSTOP": [r"TFSCALE_STALL_SHUTDOWN_S", r"rank 1 \(host \S+\) does not answer"],
    "NaN": [r"gradients must be finite.*in step \d+, on .*rank 1 in"],
    "short data": [r"rank 1 ended its epoch after step"],
    "other model": [r"Model must be the same on all ranks\. Received: .* on rank 1\b"],
    "no callbacks": [
        r"Received: BroadcastGlobalVariablesCallback\S* .*on rank 0 and none on rank 1\."
    ],
    "other optimizer": [r"momentum=0\.9 on rank 0 and momentum=0\.8 on rank 1\b"],
}
RECOVERS = {
    "NaN skipped": [r"gradients must be finite.*on rank 1 in .*All ranks skip it; 1 skipped"],
    "same data": ["Ranks 0, 1 were given the same samples"],
}
# What is different where the data is cut by tfscale, or layers need a prepared model.
UNDER = {
    ("short data", "adaptive"): [r"Numbers of steps .*steps=12 on rank 0 and steps=11 on rank 1"],
    ("same data", "adaptive"): [],
}
CELLS = [(kind, exchange) for kind in (*ENDS, *RECOVERS) for exchange in EXCHANGES]
# Each kind once, with the exchanges in turn, so that each exchange comes twice.
IN_CI = [CELLS[i * len(EXCHANGES) + i % len(EXCHANGES)] for i in range(len(ENDS) + len(RECOVERS))]
REPEAT = int(os.environ.get("FAULTS_REPEAT", "1"))
IS_ALL = bool(os.environ.get("FAULTS_ALL"))


def run(kind, exchange, folder):
    """Return the exit code and what was printed; None where the job did not end in time."""
    script = Path(__file__).with_name("job.py")
    command = [sys.executable, str(script), exchange, kind]
    started = start_job(["-np", "2"], command, LIMITS, folder / "output")
    deadline = time.monotonic() + DEADLINE_S
    try:
        while started.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return started.process.poll(), started.output_tail(100_000)
    finally:
        started.end()


def check(kind, exchange, code, output):
    """The outcome is the one of the kind, and the right rank is named."""
    expected = {**ENDS, **RECOVERS}[kind]
    for pattern in UNDER.get((kind, exchange), expected):
        assert re.search(pattern, output), f"{pattern} is not in:\n{output}"
    weights = re.findall(r"weights of rank \d: (\w+) \.", output)
    if kind in RECOVERS:
        assert code == 0, output
        assert len(weights) == 2, output
        assert weights[0] == weights[1], output
    else:
        assert code not in (0, None), output
        assert not weights, output


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize("repetition", range(REPEAT))
@pytest.mark.parametrize(
    ("kind", "exchange"), CELLS if IS_ALL else IN_CI, ids=lambda value: str(value).replace(" ", "-")
)
def test_cell(kind, exchange, repetition, tmp_path):
    del repetition
    check(kind, exchange, *run(kind, exchange, tmp_path))
