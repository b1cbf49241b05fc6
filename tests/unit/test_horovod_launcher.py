"""The mpirun that `tools/build_horovod.py` puts in front of the real one."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "build_horovod.py"
MPICH = "HYDRA build details:\\n    Version: 5.0.2"
OPENMPI = "mpirun (Open MPI) 5.0.11"


@pytest.fixture(scope="module")
def tool():
    if not TOOL.exists():
        pytest.skip("no sources of tools here")
    spec = importlib.util.spec_from_file_location("build_horovod", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool, tmp_path):
    """Run the wrapper around an mpirun that prints a version, or its arguments."""

    def run(version, *arguments):
        real = tmp_path / "real"
        script = f'[ "$1" = --version ] && echo "{version}" || printf "%s\\n" "$@"'
        tool.write_program(real, f"#!/bin/sh\n{script}\n")
        tool.write_program(tmp_path / "mpirun", tool.MPIRUN.format(mpirun=real))
        command = [str(tmp_path / "mpirun"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return run


def test_open_mpi_takes_long_options_with_two_dashes_and_mpich_the_words_as_they_are(run):
    assert run(OPENMPI, "--version").strip() == OPENMPI
    options = "--tag-output -np 2 -H localhost:2 -bind-to none -map-by slot -mca pml ob1 -x PATH"
    own = ["python", "train.py", "-mca", "-bind-to", "a b"]  # the program's own
    long = "--tag-output -np 2 -H localhost:2 --bind-to none --map-by slot --mca pml ob1 -x PATH"
    assert run(OPENMPI, *options.split(), *own).splitlines() == [*long.split(), *own]
    assert "MPICH" in run(MPICH, "--version")  # which Horovod recognises
    assert run(MPICH, *options.split(), *own).splitlines() == [*options.split(), *own]


def test_a_wheel_that_is_there_is_installed_without_the_folder_of_a_build(
    tool, monkeypatch, tmp_path
):
    def run(words, cwd=None, **options):
        assert cwd is None or cwd.is_dir()
        folders.append(cwd)

    folders = []
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "build" / "horovod")
    monkeypatch.setattr(tool, "build_wheel", lambda wheels, jobs: wheels / "horovod.whl")
    monkeypatch.setattr(tool, "install_launcher", lambda: None)
    monkeypatch.setattr(tool.subprocess, "run", run)
    monkeypatch.setattr(tool.sys, "argv", ["build_horovod.py", "--wheel-dir", str(tmp_path)])
    tool.main()
    assert folders[-1] == tool.FOLDER
