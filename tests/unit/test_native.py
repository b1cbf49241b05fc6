"""The build's messages, and what it builds again."""

import io
import re
import sys

import pytest

from tfscale.comm.backends import engine
from tfscale.comm.backends.engine import Library
from tfscale.config import ExchangeError
from tfscale.native import compiler as native
from tfscale.native.cache import prepare_library


def test_an_older_library_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(engine._SIGNATURES, "from_a_later_version", (None, ()))
    with pytest.raises(ExchangeError, match=r"tfscale_from_a_later_version.*`tfscale build`"):
        Library(str(prepare_library()))


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    with pytest.raises(native.BuildError, match="no mpicxx.*pip install mpich"):
        native.find_toolchain()
    monkeypatch.undo()
    monkeypatch.setattr(native.shutil, "which", lambda *_, **__: None)
    with pytest.raises(native.BuildError, match=r"C\+\+17 compiler.*apt-get install g\+\+"):
        native.find_toolchain()
    monkeypatch.setattr(native, "present_tensorflow", lambda: None)
    with pytest.raises(native.BuildError, match=r"the TensorFlow to compile.*>=2\.18,<2\.22'"):
        native.find_tensorflow(tmp_path)


def test_versions_newer_than_the_tested_ones():
    versions = ("2.18.0", "2.21.9", "2.22.0-rc0", "2.23.0.dev20261101", "3.0.0")
    found = [native.is_untested("tensorflow", version) for version in versions]
    assert found == [False, False, True, True, True]


def test_a_version_is_the_same_to_pip_and_where_it_is_imported():
    """The launcher asks pip, and ranks TensorFlow: they must look for the same library."""
    for imported, installed in (
        ("2.22.0-rc1", "2.22.0rc1"),
        ("2.23.0-dev20261101", "2.23.0.dev20261101"),
        ("2.21.0", "2.21.0"),
    ):
        assert native.identity(imported) == native.identity(installed)


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
    prefixes = [tmp_path / "python", tmp_path / ("base" if is_environment else "python")]
    for name, value in zip(("prefix", "base_prefix"), prefixes, strict=True):
        monkeypatch.setattr(native.sys, name, str(value))
    monkeypatch.setattr(native.sys, "executable", str(tmp_path / "python/bin/python"))
    for path, is_beside in ((tmp_path / "loaded", is_environment or conda), ("", True)):
        monkeypatch.setenv("PATH", str(path))
        expected = "python/bin" if is_beside else "loaded"
        assert native.find_tool("mpi-tool") == str(tmp_path / expected / "mpi-tool")


OPENMPI = "#define OMPI_MAJOR_VERSION 5\n#define OMPI_MINOR_VERSION 0\n"


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('#define MPICH_VERSION "4.1.2"\n#define MPI_VERSION 4', "MPICH 4.1.2"),
        ('#define I_MPI_VERSION "2021.13"\n#define MPICH_VERSION "3.4"', "Intel MPI 2021.13"),
        (f"{OPENMPI}#define OMPI_RELEASE_VERSION 6", "Open MPI 5.0.6"),
    ],
)
def test_an_mpi_is_named_by_its_header(header, name, tmp_path):
    (tmp_path / "mpi.h").write_text(header)
    wrapper = tmp_path / "mpicxx"
    wrapper.write_text(f"#!/bin/sh\necho g++ -I{tmp_path} -L{tmp_path} -lmpi\n")
    wrapper.chmod(0o755)
    toolchain = native.find_toolchain(str(wrapper))
    assert toolchain.mpi == name and toolchain.version[0].isdigit()
    assert f"-Wl,-rpath,{tmp_path}" in toolchain.link_flags


def test_a_failing_compiler_shows_its_message(tmp_path):
    source = tmp_path / "wrong.cc"
    source.write_text("int main() { return undeclared; }")
    with pytest.raises(native.BuildError, match="undeclared"):
        native.compile_objects([native.Source(source, [])], tmp_path / "objects", "g++")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_names_each_file_on_a_terminal_and_is_plain_in_a_log(tmp_path, monkeypatch):
    sources = [native.Source(tmp_path / f"{name}.cc", []) for name in ("first", "second")]
    for source in sources:
        source.path.write_text("int x;\n")
    for kind in (Terminal, io.StringIO):
        shown = kind()
        monkeypatch.setattr(sys, "stderr", shown)
        native.compile_objects(sources, tmp_path / kind.__name__, "g++")
        text = shown.getvalue()
        if kind is io.StringIO:
            assert text == "".join(f"Compiling C++: {n} of 2 files\n" for n in (1, 2))
            continue
        assert all(
            re.search(rf"[01] of 2 files: .*{name}\.cc", text) for name in ("first", "second")
        )
        assert text.endswith("2 of 2 files\n") and text.count("\n") == 1
        assert all(len(line) < 80 for line in text.split("\r"))


def test_only_what_changed_is_compiled(tmp_path):
    header, source = tmp_path / "a.h", tmp_path / "a.cc"
    header.write_text("#define A 1\n")
    source.write_text('#include "a.h"\nint a = A;\n')

    def compile_it(flags=(), versions="2.20.0"):
        own = native.Source(source, flags, versions)
        return native.compile_objects([own], tmp_path / "o", "g++")[0].stat().st_mtime_ns

    times = [compile_it()]
    assert compile_it() == times[0]
    times.append(compile_it(["-O1"]))
    header.write_text("#define A 2\n")
    times.append(compile_it(["-O1"]))
    times.append(compile_it(["-O1"], "2.21.0"))
    assert times == sorted(set(times))
