"""`python -m tfscale.transparent`: a program sees what it sees when `python` runs it."""

import re
import subprocess
import sys

import keras
import pytest

import tfscale
from tests.helpers.launching import job_words, run_in_folder, write_script
from tfscale.transparent.tables import Tables

# Instead of `distribute`, which needs TensorFlow.
STUB = """
import os, sys, types
stub = types.ModuleType("tfscale.transparent.distribute")
stub.distribute = lambda **settings: None
sys.modules[stub.__name__] = stub
from tfscale.transparent.__main__ import main
sys.path[0] = os.getcwd()  # as with -m
sys.exit(main(sys.argv[1:]))
"""
SCRIPT = """
import inspect, pickle, sys
import beside

class Kept:
    pass

def fail():
    raise ValueError("as asked")

main = sys.modules["__main__"]
print(sys.argv, sys.path[0], __name__, globals().get("__file__"), __doc__, vars(main) is globals())
print(type(pickle.loads(pickle.dumps(Kept()))) is Kept, inspect.getsource(fail) if FILE else "")
print(inspect.signature(lambda x: 1), main.__builtins__ is not None, fail.__annotations__)
if "fail" in sys.argv:
    fail()
if "stop" in sys.argv:
    raise KeyboardInterrupt
sys.exit(sys.argv[-1] if sys.argv[-1] == "text" else 7)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for place in (tmp_path, tmp_path / "sub"):
        (place / "beside.py").touch()
    (tmp_path / "sub" / "t.py").write_text(f"FILE = True\n{SCRIPT}")
    (tmp_path / "wrong.py").write_text("x = = 1\n")
    monkeypatch.setenv("PYTHONPATH", sys.path[0] if sys.path[0] else ".")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outcome(*words):
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if "frozen runpy" not in line]
    return done.returncode, done.stdout, errors


@pytest.mark.parametrize(
    "words",
    [
        ["sub/t.py", "-m", "--", "1"],
        ["sub/t.py", "fail"],
        ["sub/t.py", "text"],
        ["wrong.py"],
        ["-m", "sub.t", "1"],
        ["-c", f"FILE = False\n{SCRIPT}", "1"],
        ["-c", f"FILE = False\n{SCRIPT}", "fail"],
    ],
    ids=["script", "error", "exit text", "syntax", "module", "code", "error in code"],
)
def test_programs_run_as_without_tfscale(words, folder):
    assert outcome("-c", STUB, *words) == outcome(*words)


def test_what_is_missing_is_named(folder):
    for words, text in (["none.py"], "can't open file"), (["--seed", "1"], "is missing"):
        code, _, errors = outcome("-m", "tfscale.transparent", *words)
        assert code == 2 and text in errors[-1]


@pytest.mark.timeout(360)
@pytest.mark.parametrize("report", ["", "tfscale.callbacks.CommunicationReport('report')"])
def test_a_job_prints_once_and_closes_with_its_communication(tmp_path, report):
    """Also beside a callback that takes the events of the steps."""
    command = write_script(
        tmp_path / "train.py",
        "import sys, keras, tfscale, numpy as np\n"
        f"callbacks = [{report}]\n"
        "x = np.random.normal(size=(64, 4))\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "model.compile('adam', 'mse')\n"
        "fit = model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=callbacks)\n"
        "print('first', fit.epoch)\n",
    )
    result = run_in_folder(job_words(["--distribute", "-np", "2"], command), tmp_path, 350)
    assert result.exit_code == 0 and result.output.splitlines() == ["first [0, 1]"], result
    *_, waiting, advice = result.errors.splitlines()
    assert re.search(r"\d+ % of their time waiting for communication", waiting)
    assert re.search(r"a step exchanges 0\.\d*[1-9]\d* MB", waiting)
    assert advice.startswith("tfscale: what to try next: ")


def test_no_table_as_large_as_shard_embeddings_is_told_once(caplog):
    tfscale.init()
    tables = Tables(1 << 30)
    layer = tables.new(lambda cls, *args, **options: "plain", keras.layers.Embedding, 1024, 256)
    assert layer == "plain"
    for _ in range(2):
        tables.warn_if_unused()
    text = "shard_embeddings, 1024 MB: the largest, Embedding(1024, 256), has 1 MB."
    assert caplog.text.count(text) == 1
