"""The shared library's stamp, and the build's messages."""

import json

import pytest

from tfscale.comm import native
from tfscale.comm.backends import engine
from tfscale.comm.backends.engine import Library
from tfscale.comm.native import library_path
from tfscale.config import ExchangeError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / native.LIBRARY_NAME).write_bytes(b"")
    stamp = {"tensorflow": native.present_tensorflow(), "mpi": "MPICH", "mpicxx": "mpicxx"}
    (tmp_path / native.STAMP_NAME).write_text(json.dumps(stamp))
    return tmp_path


def test_a_library_that_fits(folder):
    assert native.library_path(folder) == str(folder / native.LIBRARY_NAME)


def test_a_library_for_another_tensorflow_is_refused(folder):
    (folder / native.STAMP_NAME).write_text(json.dumps({"tensorflow": "2.17.1"}))
    with pytest.raises(ExchangeError, match=r"built with 2\.17\.1.*tfscale build"):
        native.library_path(folder)


def test_no_library_names_the_command(tmp_path):
    with pytest.raises(ExchangeError, match="Received: none in .* tfscale build"):
        native.library_path(tmp_path)
    assert native.read_stamp(tmp_path) is None


def test_an_older_library_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(engine._SIGNATURES, "from_a_later_version", (None, ()))
    with pytest.raises(ExchangeError, match=r"tfscale_from_a_later_version.*`tfscale build`"):
        Library(library_path())


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    with pytest.raises(native.BuildError, match="no mpicxx.*pip install mpich"):
        native.find_toolchain()
    monkeypatch.setattr(native, "installed_tensorflow", lambda: None)
    with pytest.raises(native.BuildError, match="needs the TensorFlow"):
        native.find_tensorflow(tmp_path)


@pytest.mark.parametrize("is_environment", [True, False])
@pytest.mark.parametrize("conda", [True, False])
def test_an_mpi_on_the_path_comes_before_that_beside_the_system_s_python(
    monkeypatch, tmp_path, is_environment, conda
):
    for folder in ("python/bin", "loaded"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "mpi-tool").touch(0o755)
    if conda:
        (tmp_path / "python/conda-meta").mkdir()
    monkeypatch.setattr(native.sys, "prefix", str(tmp_path / "python"))
    monkeypatch.setattr(
        native.sys, "base_prefix", str(tmp_path / ("base" if is_environment else "python"))
    )
    monkeypatch.setattr(native.sys, "executable", str(tmp_path / "python/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / "loaded"))
    expected = "python/bin" if is_environment or conda else "loaded"
    assert native.find_tool("mpi-tool") == str(tmp_path / expected / "mpi-tool")
    monkeypatch.setenv("PATH", "")
    assert native.find_tool("mpi-tool") == str(tmp_path / "python/bin/mpi-tool")


def test_a_failing_compiler_shows_its_message(tmp_path):
    source = tmp_path / "wrong.cc"
    source.write_text("int main() { return undeclared; }")
    with pytest.raises(native.BuildError, match="undeclared"):
        native.compile_objects([source], tmp_path / "objects", "g++", [])


def test_only_what_changed_is_compiled(tmp_path):
    (tmp_path / "room").mkdir()
    header = tmp_path / "room" / "a.h"
    header.write_text("#define A 1\n")
    source = tmp_path / "room" / "a.cc"
    source.write_text('#include "a.h"\nint a = A;\n')

    def compile_it(flags=(), versions="2.20.0"):
        made = native.compile_objects([source], tmp_path / "o", "g++", flags, versions)
        return made[0].stat().st_mtime_ns

    times = [compile_it()]
    assert compile_it() == times[0]
    times.append(compile_it(["-O1"]))
    header.write_text("#define A 2\n")
    times.append(compile_it(["-O1"]))
    times.append(compile_it(["-O1"], "2.21.0"))
    assert times == sorted(set(times))


def test_progress_is_shown_while_files_are_compiled(tmp_path, capsys):
    (tmp_path / "room").mkdir()
    sources = [tmp_path / "room" / f"f{n}.cc" for n in range(3)]
    for n, source in enumerate(sources):
        source.write_text(f"int value_{n} = {n};\n")
    native.compile_objects(sources, tmp_path / "o", "g++", [])
    assert capsys.readouterr().err.splitlines() == [
        "Compiling C++: 1 of 3 files",
        "Compiling C++: 3 of 3 files",
    ]
    native.compile_objects(sources, tmp_path / "o", "g++", [])
    assert capsys.readouterr().err == ""
