"""Every code block of README and of the pages for users runs: on one process and on two ranks."""

import json
import os
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.launching import launch_script, run_in_folder
from tfscale.launcher import cli, mpi_command, reports
from tfscale.native import cache as library

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "tutorial.md", ROOT / "docs" / "data.md"]
PYTHON = [*DOCUMENTS, ROOT / "docs" / "from-horovod.md", ROOT / "docs" / "adaptive-batch.md"]
# Blocks run in their order and see the names of those before them, as a reader does.
DRIVER = """
import json, sys, traceback
import keras
names = {"__name__": "__main__"}
for number, text in enumerate(json.loads(BLOCKS), 1):
    try:
        exec(compile(text, f"Python block {number}", "exec"), names)
    except SystemExit as error:
        assert not error.code, error
    print(f"block {number} done", flush=True)
"""


def blocks(document: Path, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(
    "document",
    [pytest.param(p, marks=[] if p.stem == "README" else pytest.mark.slow) for p in PYTHON],
    ids=lambda path: path.stem,
)
def test_python_blocks_run(document, size, tmp_path, monkeypatch):
    texts = blocks(document, "python", "py")
    assert texts
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    code = f"import os; os.chdir({str(tmp_path)!r})\nBLOCKS = {json.dumps(texts)!r}\n{DRIVER}"
    result = launch_script(size, code, timeout_s=400)
    assert result.exit_code == 0, result.output[-8000:]
    assert result.output.count(f"block {len(texts)} done") == max(1, size)


@pytest.mark.timeout(420)
def test_the_example_prints_the_same_losses_on_every_number_of_ranks(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    text = blocks(ROOT / "README.md", "python")[0]
    printed = []
    for size in (0, 2, 4):
        result = launch_script(size, text, timeout_s=130)
        assert result.exit_code == 0, result.output[-8000:]
        printed.append(re.findall(r"(\w+: [\d.e+-]+)(?= |$)", result.output, re.MULTILINE))
    assert len(printed[0]) == 3 * 4  # accuracy and loss, of training and validation
    assert printed[0] == printed[1] == printed[2]


def test_the_last_lines_that_the_readme_shows_are_those_of_a_job():
    (shown,) = blocks(ROOT / "README.md", "text")
    percent = re.search(r"(\d+) % of their time", shown)[1]
    n_bytes = 4 * (21 * 32 + 33 * 2)  # parameters of the example, in float32
    training = f"{int(percent) / 100} {n_bytes} allreduce 0"
    report = reports.Report(0, "a", 0, None, False, True, training=training)
    assert shown.endswith(reports.describe_training([report]))


def command_lines(document: Path) -> list[str]:
    lines = (
        "\n".join(blocks(document, "bash", "sh", "shell", "console"))
        .replace("\\\n", " ")
        .splitlines()
    )
    lines = [line.split(" #")[0].strip().removeprefix("$ ") for line in lines]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_commands_exist(document, capsys):
    makefile = (ROOT / "Makefile").read_text()
    lines = command_lines(document)
    assert lines
    for line in lines:
        words = shlex.split(line)
        if words[0] == "make":
            targets = [w for w in words[1:] if "=" not in w]
            assert all(re.search(rf"^{t}:", makefile, re.MULTILINE) for t in targets), line
        elif words[:2] == ["tfscale", "run"]:
            assert cli.main(["run", "--dry-run", *words[2:]]) == 0, line
        elif words[0] == "tfscale":
            with pytest.raises(SystemExit) as end:
                cli.main([words[1], "--help"])
            assert end.value.code == 0, line
    capsys.readouterr()


# Where each command of README runs. `pip install` runs on a wheel of the sources without its
# dependencies, since tests have no network; those that need other hosts run with --dry-run.
WHERE = {
    "pip install '.[mpich,recipes]'": "test_packaging.py::test_an_installed_wheel_compiles_its",
    "tfscale doctor": "test_cli.py::test_doctor_of_a_healthy_machine",
    "tfscale demo": "test_demo.py::test_two_ranks_train_what_one_process_trains",
    "tfscale build --mpicxx /opt/mpi/bin/mpicxx": "test_readme.py::test_a_library_of_another_mpi",
    "tfscale run -np 4 python train.py": "test_readme.py::test_the_example_runs_by_its_commands",
    "tfscale run -np 8 -H node1:4,node2:4 python train.py": "test_readme.py::test_commands_exist",
    "tfscale run --distribute -np 4 python train.py": "test_readme.py::test_an_unchanged_script",
    "tfscale run --restarts 3 --min-np 2": "test_readme.py::test_restarts_are_options_of_run",
    "mpiexec -n 4 python train.py": "test_readme.py::test_the_example_runs_by_its_commands",
    "make train": "test_readme.py::test_make_train_trains",
    "make test": "../../.ci/run::make test",
    "make docs": "../../.ci/run::make docs",
}


def inline_commands(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`((?:pip|tfscale|make|mpiexec|mpirun|srun|python) [^`]+)`", text)
    return [" ".join(span.split()) for span in spans]


def test_every_command_of_the_readme_runs_somewhere():
    readme = ROOT / "README.md"
    assert {*command_lines(readme), *inline_commands(readme)} == {*WHERE}
    for where in WHERE.values():
        file, _, text = where.partition("::")
        path = Path(__file__).parent / file
        if file.startswith("../") and not path.exists():
            continue  # .ci is not copied where the wheel is tested
        assert text in path.read_text(), where


def run_command(words, folder, **env):
    """Run a command in a folder, with `python`, `tfscale` and the MPI of this environment first."""
    programs = (sys.executable, mpi_command.find_mpi().mpiexec)
    path = os.pathsep.join([*(str(Path(p).parent) for p in programs), os.environ["PATH"]])
    result = run_in_folder(words, folder, 400, {"PATH": path, **env})
    assert result.exit_code == 0, result.output + result.errors
    return result.output


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    "command", ["tfscale run -np 4 python train.py", "mpiexec -n 4 python train.py"]
)
def test_the_example_runs_by_its_commands(command, tmp_path):
    (tmp_path / "train.py").write_text(blocks(ROOT / "README.md", "python")[0])
    printed = run_command(command.split(), tmp_path)
    assert len(re.findall(r"val_accuracy: ", printed)) == 3  # epochs, told by one rank


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_example_of_a_test_passes(tmp_path):
    test, fakes = blocks(ROOT / "docs" / "testing.md", "python")
    (tmp_path / "test_training.py").write_text(test)
    (tmp_path / "test_fakes.py").write_text(f"def test_names():\n{textwrap.indent(fakes, '    ')}")
    printed = run_command(["python", "-m", "pytest", "-q", "-p", "no:cacheprovider"], tmp_path)
    assert "3 passed" in printed


UNCHANGED = """
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
model.fit(x, x.sum(axis=1, keepdims=True), epochs=2, batch_size=64, verbose=2)
print("trained")
"""


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_an_unchanged_script_is_distributed(tmp_path):
    (tmp_path / "train.py").write_text(UNCHANGED)
    command = "tfscale run --distribute -np 4 python train.py"
    assert run_command(command.split(), tmp_path).split().count("trained") == 1


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_make_train_trains(tmp_path):
    """The recipe of `make train` at its smallest; what `make library` does is not repeated."""
    folders = f"--data_dir={tmp_path} --run_dir={tmp_path}"
    words = ["make", "-o", "library", "train", f"BIN={Path(sys.executable).parent}"]
    run_command([*words, f"ARGS=--smoke {folders}"], ROOT)
    lines = (tmp_path / "edsr" / "metrics.jsonl").read_text().splitlines()
    assert lines and json.loads(lines[-1])["val_psnr"] > 0


def test_restarts_are_options_of_run(capsys):
    (command,) = (c for c in WHERE if "--restarts" in c)
    words = [*command.split()[2:], "-np", "4", "python", "train.py"]
    assert cli.main(["run", "--dry-run", *words]) == 0
    capsys.readouterr()


def test_a_library_of_another_mpi_is_built_by_its_wrapper(monkeypatch, capsys):
    """Compiling takes a minute: what is asked for is tested here, compiling by `make build`."""
    asked = []

    def build(output_dir, build_dir, mpicxx):
        asked.append(mpicxx)
        return output_dir / "libtfscale_engine.so", output_dir / "libtfscale_ops.so"

    monkeypatch.setattr(library, "build", build)
    (command,) = (c for c in WHERE if "--mpicxx" in c)
    assert cli.main(command.split()[1:]) == 0
    assert asked == ["/opt/mpi/bin/mpicxx"]
    capsys.readouterr()
