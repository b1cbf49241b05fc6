"""`tfscale run --metrics`, and the cases of monitor_cases.py on ranks that serve metrics."""

import os
import re
import socket
import threading
import time
from pathlib import Path

import keras
import pytest

import tfscale
from tests.helpers.cases import cases_of
from tests.helpers.certificates import write_certificate
from tests.helpers.launching import start_job, write_script
from tests.helpers.status_server import status_server
from tests.parallel import monitor_cases
from tests.parallel.monitor_cases import late_rank, page
from tfscale.testing import require_ok, spawn

CASES = cases_of("tests.parallel.monitor_cases")
SCRIPT = """
import os, sys, time
import keras, numpy as np

class Late(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            time.sleep(0.2)

x = np.random.default_rng(0).normal(size=(52, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, epochs=10_000, verbose=0, callbacks=[Late()])
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("size", [1, 2])
def test_every_case(size):
    alone = [c for c in CASES if "late" not in c and "distribute" not in c]
    cases = CASES if size > 1 else alone
    require_ok(spawn(size, cases, 120.0, {"TFSCALE_METRICS": f":{free_port()}"}))


def serves_nothing():
    data = monitor_cases.GlobalBatches(monitor_cases.X, monitor_cases.Y, batch_size=8)
    monitor_cases.new_model().fit(data, verbose=0, callbacks=[monitor_cases.Synchronize()])
    assert "tfscale metrics" not in {thread.name for thread in threading.enumerate()}


def test_no_thread_where_nobody_asks():
    require_ok(spawn(2, [serves_nothing]))


@pytest.mark.timeout(240)
def test_unchanged_script(tmp_path):
    port = free_port()
    options = ["--distribute", "--metrics", f":{port}", "-np", "2"]
    command = write_script(tmp_path / "train.py", SCRIPT)
    job = start_job(options, command, {}, tmp_path / "output")
    try:
        found, named = {}, None
        # At first the rank that traces its step more slowly is late.
        while job.process.poll() is None and named != 1:
            try:
                found = page(port)
                named = late_rank(found)
            except (OSError, ValueError):
                time.sleep(0.1)  # no rank serves yet, or none has numbers
        assert named == 1, job.output_tail(10_000)
        epoch, step = found["tfscale_epoch",], found["tfscale_step",]
        assert found["tfscale_steps_total",] == 7 * (epoch - 1) + step
        # A step that runs has been counted already where its batch is read.
        n_samples = found["tfscale_samples_total",] - 52 * (epoch - 1)
        assert n_samples in (min(8 * step, 52), min(8 * (step + 1), 52))
    finally:
        job.end()


PAGES = """
import os, urllib.request
import keras, numpy as np

def show(moment):
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        url = "http://127.0.0.1" + os.environ["TFSCALE_METRICS"]
        page = urllib.request.urlopen(url, timeout=60).read().decode()
        for name in ("ranks", "epoch", "steps_total", "samples_total"):
            (line,) = [s for s in page.splitlines() if s.startswith(f"tfscale_{name} ")]
            print(moment, line, flush=True)

show("begin")
x = np.random.default_rng(0).normal(size=(52, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0)
show("end")
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [1, 2])
def test_an_unchanged_script_is_seen_from_its_beginning_on(size, tmp_path):
    options = ["--distribute", "--metrics", f":{free_port()}", "-np", str(size)]
    command = write_script(tmp_path / "train.py", PAGES)
    job = start_job(options, command, {}, tmp_path / "output")
    try:
        job.process.wait()
        output = job.output_tail(10_000)
    finally:
        job.end()
    for moment, *numbers in (("begin", 0, 0, 0), ("end", 3, 21, 156)):
        for name, number in zip(("epoch", "steps_total", "samples_total"), numbers, strict=True):
            assert f"{moment} tfscale_{name} {number}\n" in output, output
        assert f"{moment} tfscale_ranks {size}\n" in output


@pytest.mark.timeout(240)
def test_restarts_are_counted(tmp_path):
    port = free_port()
    text = "import os, signal\nif os.environ['TFSCALE_RESTART'] == '0':\n"
    text += "    os.kill(os.getpid(), signal.SIGKILL)\n"
    command = write_script(tmp_path / "train.py", text + SCRIPT)
    options = ["--distribute", "--restarts", "2", "--metrics", f":{port}", "-np", "2"]
    job = start_job(options, command, {}, tmp_path / "output")
    try:
        found = {}
        while job.process.poll() is None and not found:
            try:
                found = page(port)
            except OSError:
                time.sleep(0.1)  # no rank serves yet
        assert found["tfscale_restarts",] == 1, job.output_tail(10_000)
    finally:
        job.end()


def test_a_port_in_use_ends_the_job_before_it_trains():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        results = spawn(2, [serves_nothing], 120.0, {"TFSCALE_METRICS": address})
    text = next(result.text for result in results if result.rank == 0)
    assert re.search(rf"TFSCALE_METRICS {address}: Address already in use", text), text


def trains_for_a_trainjob():
    data = monitor_cases.GlobalBatches(monitor_cases.X, monitor_cases.Y, batch_size=8)
    callbacks = [monitor_cases.Synchronize(), WaitsForPosts()]
    monitor_cases.new_model().fit(data, epochs=4, verbose=0, callbacks=callbacks)


class WaitsForPosts(keras.callbacks.Callback):
    """Lets rank 0 wait in the second epoch until its thread has posted something."""

    def on_epoch_begin(self, epoch, logs=None):
        posted = Path(os.environ["POSTED"])
        while epoch == 1 and tfscale.rank() == 0 and not posted.exists():
            time.sleep(0.01)  # the thread posts within a turn of a second


def test_a_trainjob_shows_progress(tmp_path):
    (tmp_path / "token").write_text("jwt")
    certificate = write_certificate(tmp_path, "127.0.0.1")
    with status_server(certificate, tmp_path / "token") as server:
        posted = tmp_path / "posted"
        is_over = threading.Event()

        def look():
            while not server.posts and not is_over.wait(0.01):
                pass
            posted.touch()

        looking = threading.Thread(target=look)
        looking.start()
        try:
            environ = {**server.variables, "POSTED": str(posted)}
            require_ok(spawn(2, [trains_for_a_trainjob], 120.0, environ))
        finally:
            is_over.set()
            looking.join()
        statuses = [body["trainerStatus"] for _, _, body in server.posts]
    percent = [status["progressPercentage"] for status in statuses]
    assert percent == sorted(percent) and percent[0] <= 50
    assert {token for _, token, _ in server.posts} == {"Bearer jwt"}
    assert percent[-1] == 100, "the last post, when the program ends"
    values = {metric["name"]: metric["value"] for metric in statuses[-1]["metrics"]}
    assert values["currentEpoch"] == values["totalEpochs"] == "4" and float(values["loss"]) > 0
