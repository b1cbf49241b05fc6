"""`tfscale.run` from programs and from notebooks, with the real kernel of Jupyter."""

import asyncio
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest

import tfscale
from tests.helpers.killed_job import is_alive
from tests.helpers.launching import job_variables
from tfscale.comm.process import discover

LIMIT_S = 280  # only ends a hang
pytestmark = pytest.mark.timeout(LIMIT_S + 20)


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Folders of the test's own, for what is left there; ranks without an accelerator."""
    (tmp_path / "tmp").mkdir()
    variables = {"TMPDIR": "tmp", "IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "jupyter"}
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name, value in job_variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)  # start-up messages are left out
    yield
    assert not list((tmp_path / "tmp").glob("tfscale-run-*"))


def rank():
    return discover(os.environ).rank


def until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Point:
    def __init__(self, x):
        self.x = x


def test_results_of_functions_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_CALLER", "yes")
    monkeypatch.syspath_prepend(str(tmp_path / "added"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    monkeypatch.setitem(sys.modules, "loaded_by_the_caller", sys)
    offset = 10

    class Local(Point):
        pass

    def closure(factor, extra=0):
        surroundings = os.getcwd(), os.environ["OF_THE_CALLER"], sys.path, sys.argv
        is_new = not {"loaded_by_the_caller", "tensorflow"} & sys.modules.keys()
        return Local(factor * rank() + offset + extra), surroundings, is_new, os.environ["MORE"]

    results = tfscale.run(closure, (2,), {"extra": 0.5}, np=2, env={"MORE": "a=b"})
    assert [(type(r[0]), r[0].x) for r in results] == [(Local, 10.5), (Local, 12.5)]
    for _, found, is_new, more in results:
        assert found == (str(tmp_path), "yes", sys.path, sys.argv)
        assert is_new and more == "a=b"
    assert tfscale.run(lambda: offset, np=1) == [10]


def test_results_are_of_any_size():
    results = tfscale.run(lambda: np.full(50 << 20, rank() + 1, np.uint8), np=2)
    assert [r.nbytes for r in results] == [50 << 20] * 2
    assert [(r.min(), r.max()) for r in results] == [(1, 1), (2, 2)]


class Watching(io.StringIO):
    """An output that makes a file when rank 0 writes that it waits for it."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def write(self, text):
        if "waiting" in text:
            self.file.touch()
        return super().write(text)


def test_the_output_of_rank_0_is_shown_while_it_runs(tmp_path, monkeypatch):
    def wait(file):
        print("waiting: ä on rank", rank())
        until(file.exists)

    for all_output in (False, True):
        output = Watching(tmp_path / f"seen {all_output}")
        monkeypatch.setattr(sys, "stdout", output)
        tfscale.run(wait, (output.file,), np=2, all_output=all_output)
        ranks = sorted(re.findall(r"waiting: ä on rank\s+(\d)", output.getvalue()))
        assert ranks == (["0", "1"] if all_output else ["0"])


def fails():
    if rank() == 1:
        raise FileNotFoundError(2, "no data", "x.csv")
    time.sleep(LIMIT_S)


def test_the_error_of_a_rank_has_its_traceback_and_number():
    with pytest.raises(tfscale.RankError, match="rank 1 failed: FileNotFoundError") as error:
        tfscale.run(fails, np=2)
    assert (error.value.rank, error.value.exit_code) == (1, 1)
    assert isinstance(error.value.__cause__, FileNotFoundError)
    assert error.value.__cause__.filename == "x.csv"
    text = str(error.value)
    assert 'raise FileNotFoundError(2, "no data", "x.csv")' in text and __file__ in text
    assert "tfscale/launcher" not in text
    with pytest.raises(tfscale.RankError, match="killed by signal 9") as error:
        tfscale.run(lambda: os.kill(os.getpid(), signal.SIGKILL), np=1)
    assert (error.value.rank, error.value.exit_code) == (0, 137)
    with pytest.raises(tfscale.RankError, match="rank 0 ended before the function returned"):
        tfscale.run(sys.exit, np=1)


def test_results_that_cannot_be_pickled_are_named():
    with pytest.raises(tfscale.RankError) as error:
        tfscale.run(lambda: {"rows": (i for i in "ab")}, np=1)
    assert "Received: the result['rows'], of type builtins.generator" in str(error.value)


def test_a_function_is_called_again_after_a_failure(capfd):
    def once():
        if os.environ["TFSCALE_RESTART"] == "0" and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.environ["TFSCALE_RESTART"]

    assert tfscale.run(once, np=2, restarts=1) == ["1", "1"]
    assert "tfscale: restart 1 of 1, with 2 ranks." in capfd.readouterr().err


def test_hosts_share_the_working_folder(tmp_path, monkeypatch):
    """Hosts by other names of this one, where MPICH starts ranks without ssh."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_LAUNCHER", "fork")
    found = tfscale.run(lambda: [*Path().glob(".tfscale-run-*")], hosts="127.0.0.2,127.0.0.3", np=2)
    assert len(found[0]) == 1 and found[0] == found[1]
    assert not found[0][0].exists()


def calls_again():
    try:
        tfscale.run(print, np=2)
    except tfscale.ConfigError as error:
        return str(error)


def test_a_rank_cannot_call_it():
    (text,) = tfscale.run(calls_again, np=1)
    assert "Received: a call on rank 0 of 1." in text


def test_arguments_of_horovod():
    assert tfscale.run(pow, (2, 3), num_proc=2, use_mpi=True, start_timeout=300) == [8, 8]


SCRIPT = """
import os, sys, time
import tfscale
print("BODY", flush=True)

class Point:
    pass

def work():
    import pickle
    pickle.loads(pickle.dumps(Point()))  # as tfscale.broadcast_object
    print(f"READY {os.getpid()} .", flush=True)
    while "wait" in sys.argv:
        time.sleep(0.05)
    return Point()

try:
    results = tfscale.run(work, np=2, all_output=True)
    print("RESULTS", [type(r) is Point for r in results], flush=True)
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
"""


def start_script(tmp_path, *words):
    (tmp_path / "script.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read_pids(lines):
    """Read until both ranks have written their process ids; return these."""
    text, pids = "", []
    while len(pids) < 2:
        line = lines.readline()
        assert line, text
        text += line
        pids = [int(pid) for pid in re.findall(r"READY (\d+) \.", text)]
    return pids


def test_a_script_without_a_guard_does_not_start_again(tmp_path):
    output, _ = start_script(tmp_path).communicate(timeout=LIMIT_S)
    assert output.count("BODY") == 1
    assert "RESULTS [True, True]" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_caller(tmp_path, number):
    with start_script(tmp_path, "wait") as script:
        pids = read_pids(script.stdout)
        script.send_signal(number)
        output, _ = script.communicate(timeout=LIMIT_S)
        assert ("INTERRUPTED" in output) == (number == signal.SIGINT)
    if number == signal.SIGINT:
        assert not any(map(is_alive, pids))
    until(lambda: not any(map(is_alive, pids)))
    until(lambda: not list((tmp_path / "tmp").glob("tfscale-run-*")))


class Client(nbclient.NotebookClient):
    """Runs a notebook, and acts when an output appears."""

    on_output = staticmethod(lambda client, text: None)

    def process_message(self, msg, cell, cell_index):
        text = msg["content"].get("text", "") if msg["msg_type"] == "stream" else ""
        self.on_output(self, text)
        return super().process_message(msg, cell, cell_index)


def run_notebook(tmp_path, cells, on_output=lambda client, text: None):
    """Run cells; return the output of each."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    resources = {"metadata": {"path": str(tmp_path)}}
    client = Client(notebook, timeout=LIMIT_S, resources=resources)
    client.on_output = on_output
    client.execute()
    return ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]


TRAINING = """
def train(rate):
    print("waiting for the file")
    while not Path("seen").exists():
        time.sleep(0.05)
    layers = [keras.Input((8,)), Doubled(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(rate), loss="mse")
    history = model.fit(x, x.sum(axis=1), batch_size=16, epochs=2, verbose=2)
    return tfscale.rank(), tfscale.size(), history.history["loss"], model.get_weights()
"""
# AutoGraph reads the source of `call`, which is in no file.
LAYER = """
class Doubled(keras.layers.Layer):
    def call(self, inputs):
        @tf.function
        def double(values):
            if tf.reduce_sum(values) > -1e9:
                return values * 2
            return values
        return double(inputs)
"""


@pytest.mark.timeout(3 * LIMIT_S)  # TensorFlow starts in the kernel, and then on two ranks
def test_a_notebook_trains_a_model_of_its_cells(tmp_path):
    cells = [
        "import time\nfrom pathlib import Path\nimport keras, numpy as np\nimport tensorflow as tf",
        "import tfscale\ntfscale.init()  # TensorFlow has started here, too\n" + LAYER,
        "x = np.random.default_rng(1).normal(size=(64, 8)).astype('float32')" + TRAINING,
        "results = tfscale.run(train, (0.01,), np=2, distribute=True, seed=1)",
        "for rank, size, losses, weights in results: print(rank, size, losses)\n"
        "print(all((a == b).all() for a, b in zip(results[0][3], results[1][3])))",
        "keras.utils.set_random_seed(1)\nprint(np.allclose(train(0.01)[2], results[0][2]))",
    ]

    def on_output(client, text):
        if "waiting for the file" in text:
            (tmp_path / "seen").touch()

    *_, training, shown, alone = run_notebook(tmp_path, cells, on_output)
    assert training.count("waiting for the file") == 1 and training.count("Epoch 2/2") == 1
    assert re.fullmatch(r"0 2 \[.*\]\n1 2 \[.*\]\nTrue\n", shown), shown
    assert alone.endswith("True\n")


def test_errors_and_interrupts_in_a_notebook(tmp_path):
    # The function waits until it is interrupted: its rank must not end by itself.
    cells = [
        "import os, time, tfscale\ndef fail():\n    return 1 / len('')",
        "try:\n    tfscale.run(fail, np=1)\nexcept tfscale.RankError as error:\n    print(error)",
        "def wait():\n    print(f'READY {os.getpid()} .')\n    time.sleep(1e6)",
        "try:\n    tfscale.run(wait, np=1)\nexcept KeyboardInterrupt:\n    print('INTERRUPTED')",
    ]
    asked = []

    def on_output(client, text):
        if "READY" in text:
            asked.append(asyncio.ensure_future(client.km.interrupt_kernel()))

    _, failed, _, interrupted = run_notebook(tmp_path, cells, on_output)
    assert "return 1 / len('')" in failed and "ZeroDivisionError" in failed
    assert "tfscale: rank 0 on host" in failed
    (pid,) = re.findall(r"READY (\d+)", interrupted)
    assert "INTERRUPTED" in interrupted and not Path("/proc", pid).exists()
