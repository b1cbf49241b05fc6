"""The library that fits: in the package, in the user's cache, or compiled at its first use."""

import errno
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfscale import start
from tfscale.comm.backends import engine
from tfscale.config import ExchangeError, Settings
from tfscale.launcher import cli, doctor, mpi_command
from tfscale.native import cache as library
from tfscale.native import compiler as native

ANSWER = {"version": "2", "compile": [], "link": []}
MPI = mpi_command.Mpi("mpich", "5.0.2", "/bin/mpiexec")
VERSION = native.present_tensorflow()
# A process that compiles by writing a file, once the other one waits, and notes that it did.
COMPILER = """
import sys, time
from pathlib import Path
from tfscale.native import cache as library, compiler as native

def build(output_dir, build_dir):
    with open(sys.argv[1], "a") as notes:
        notes.write("compiled\\n")
    deadline = time.monotonic() + 50
    while not waits.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    (output_dir / native.LIBRARY_NAME).write_bytes(b"made")
    digest = native.sha256(b"made")
    (output_dir / native.STAMP_NAME).write_text(f'{{"sha256": "{digest}"}}')
    return output_dir / native.LIBRARY_NAME

def say(who, text, usual=library._say):
    usual(who, text)
    if text.startswith("waiting"):
        waits.touch()

waits = Path(sys.argv[1] + "-waits")
native.build, library.PACKAGED, library._say = build, Path("/none"), say
print(library.prepare_library(who=sys.argv[2]))
"""


def put(folder, **stamp):
    """Write a library that cannot be loaded, with a build record."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / native.LIBRARY_NAME).write_bytes(b"library")
    digest = native.sha256(b"library")
    stamp = {"tensorflow": VERSION, "mpi": "MPICH 5.0.2", "sha256": digest, **stamp}
    stamp = {name: value for name, value in stamp.items() if value is not None}
    (folder / native.STAMP_NAME).write_text(json.dumps(stamp))
    return folder / native.LIBRARY_NAME


@pytest.fixture
def places(tmp_path, monkeypatch):
    package, cache = tmp_path / "package", tmp_path / "home" / "tfscale"
    package.mkdir()
    monkeypatch.setattr(library, "PACKAGED", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    return package, cache


def wanted():
    return native.identity(VERSION, native.find_toolchain())


@pytest.fixture
def compiled(monkeypatch):
    """Builds that are done without a compiler."""
    calls = []

    def build(output_dir, build_dir):
        calls.append(output_dir)
        return put(output_dir, **wanted())

    monkeypatch.setattr(native, "build", build)
    return calls


def test_the_cache_folder(monkeypatch):
    for value, expected in (
        ("/a", "/a/tfscale"),
        ("a", "~/.cache/tfscale"),
        ("", "~/.cache/tfscale"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert library.cache_folder() == Path(expected).expanduser()


def test_the_key_names_everything_that_a_library_depends_on():
    stamp = wanted()
    assert set(stamp) == {"sources", "tensorflow", "machine", "compiler", "mpicxx", "mpi"}
    keys = {library.key_of({**stamp, name: "another"}) for name in stamp} | {library.key_of(stamp)}
    assert len(keys) == 1 + len(stamp)
    assert library.key_of(dict(reversed(stamp.items()))) == library.key_of(stamp)


@pytest.mark.parametrize(
    ("stamp", "fitting", "others"),
    [
        ({}, ("", "mpich", "intel", "srun"), ("openmpi",)),
        ({"mpi": "Open MPI 5.0.6"}, ("openmpi",), ("mpich",)),
        ({"mpi": "Open MPI v4.1.4, package: Debian"}, ("openmpi",), ("mpich",)),
        ({"tensorflow": "2.17.1"}, (), ("",)),
        ({"tensorflow": None}, (), ("",)),
        ({"sources": "of another version"}, (), ("",)),
        ({"machine": "another, glibc 2.36"}, (), ("",)),
    ],
)
def test_the_library_in_the_package_is_used_if_it_fits(places, stamp, fitting, others):
    path = put(places[0], **stamp)
    assert {library.find_library(kind) for kind in fitting} <= {path}
    assert {library.find_library(kind) for kind in others} == {None}


def test_a_wheel_of_several_tensorflow_versions_picks_one(places):
    put(places[0] / "tensorflow-2.17", tensorflow="2.17.1")
    path = put(places[0] / "tensorflow-own")
    assert library.find_library() == path


def test_what_does_not_fit_is_compiled_into_the_cache_once(places, compiled, capsys):
    put(places[0], tensorflow="2.17.1")
    path = library.prepare_library()
    key = library.key_of(wanted())
    assert path == places[1] / key / native.LIBRARY_NAME
    assert [folder.parent.parent for folder in compiled] == [places[1]]
    told = capsys.readouterr().err
    assert f"compiling the library for TensorFlow {VERSION}" in told and f"in {path.parent}" in told
    assert library.prepare_library() == library.find_library() == path
    assert len(compiled) == 1 and capsys.readouterr().err == ""
    assert places[1].stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700


def test_a_host_without_compiler_uses_what_another_one_compiled(places, compiled, monkeypatch):
    path = library.prepare_library("mpich")
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    assert library.prepare_library("mpich") == path
    with pytest.raises(native.BuildError, match="no mpicxx"):
        library.prepare_library("openmpi")


@pytest.mark.parametrize("found", ["2.19.0", "2.22.0"])
def test_a_tensorflow_without_library_and_compiler(places, monkeypatch, found):
    """Libraries of other versions are never loaded, from the package or the cache."""
    monkeypatch.setattr(native, "present_tensorflow", lambda: found)
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    for number, version in enumerate(("2.20.0", VERSION, "2.22.1", "2.23.0", None)):
        put(places[0] / f"tensorflow-{number}", tensorflow=version)
        stamp = {**native.identity(""), "tensorflow": version, "mpicxx": "", "compiler": ""}
        put(places[1] / f"{number}", **stamp)
    places[1].chmod(0o700)
    with pytest.raises(native.BuildError, match="pip install mpich") as error:
        library.prepare_library()
    remedy = "TensorFlow that was tested, 2.18 to 2.21 instead of 2.22.0: pip install"
    assert (f"{remedy} 'tensorflow<2.22'." in str(error.value)) is (found == "2.22.0")
    check = doctor.check_library(MPI)
    assert (check.status, check.detail) == ("missing", str(error.value))
    path = put(places[0] / "tensorflow-own", tensorflow=found)
    assert library.prepare_library() == path and doctor.check_library(MPI).status == "ok"


@pytest.mark.parametrize("which", ["cache", "library"])
def test_a_folder_that_others_may_write_to_is_refused(places, compiled, monkeypatch, which):
    folder = library.prepare_library().parent
    folder = folder if which == "library" else folder.parent
    with monkeypatch.context() as patch:
        patch.setattr(library.os, "geteuid", lambda: 12345)
        with pytest.raises(ExchangeError, match=f"{places[1]} must be .*Received: user id"):
            library.prepare_library()
    folder.chmod(0o770)
    with pytest.raises(ExchangeError, match=f"{folder} must be .*Received: .*, mode 0770"):
        library.prepare_library()


def test_a_cache_that_cannot_be_written_is_named(places, compiled, monkeypatch):
    (places[0] / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(places[0] / "file" / "below"))
    with pytest.raises(
        ExchangeError, match="Could not write the library.*file.*Set XDG_CACHE_HOME"
    ):
        library.prepare_library()


def test_two_processes_compile_once(places, tmp_path):
    words = [sys.executable, "-c", COMPILER, str(tmp_path / "notes")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*words, f"rank {rank}"], **pipes) for rank in range(2)]
    outs, errors = zip(*(process.communicate(timeout=60) for process in started), strict=True)
    assert [process.returncode for process in started] == [0, 0], errors
    assert (tmp_path / "notes").read_text() == "compiled\n"
    assert outs[0] == outs[1] and Path(outs[0].strip()).read_bytes() == b"made"
    told = "".join(errors)
    assert told.count("compiling the library") == told.count("waiting for ") == 1, told


def test_what_a_killed_process_left_is_removed(places, compiled):
    left = places[1] / "unfinished-1"
    left.mkdir(parents=True)
    places[1].chmod(0o700)
    assert library.prepare_library().exists()
    assert not left.exists()


DAMAGE = {
    "no record": lambda library, record: record.unlink(),
    "empty record": lambda library, record: record.write_bytes(b""),
    "cut record": lambda library, record: record.write_bytes(record.read_bytes()[:40]),
    "another record": lambda library, record: record.write_text("[1]"),
    "no text": lambda library, record: record.write_bytes(b"\xff\xfe\x00"),
    "without digest": lambda library, record: record.write_text("{}"),
    "empty library": lambda library, record: library.write_bytes(b""),
    "cut library": lambda library, record: library.write_bytes(library.read_bytes()[:3]),
    "changed library": lambda library, record: library.write_bytes(b"Library"),
    "no library": lambda library, record: library.unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_library_is_compiled_again(places, compiled, capsys, kind):
    """Loading one that was cut kills the process; and no later start may end with an error."""
    path = library.prepare_library()
    record = path.with_name(native.STAMP_NAME)
    before = path.read_bytes(), record.read_bytes()
    DAMAGE[kind](path, record)
    assert library.find_library() is None
    check = doctor.check_cache()
    assert check.status == "info" and f"{path.parent.name}: cut or changed" in check.detail
    capsys.readouterr()
    assert library.prepare_library() == library.find_library() == path and len(compiled) == 2
    assert "holds no whole library" in capsys.readouterr().err
    assert (path.read_bytes(), record.read_bytes()) == before
    assert {entry.name for entry in places[1].iterdir()} == {path.parent.name, "lock"}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_library_of_the_package_is_not_used(places, compiled, kind):
    path = put(places[0])
    DAMAGE[kind](path, path.with_name(native.STAMP_NAME))
    assert library.prepare_library().is_relative_to(places[1]) and len(compiled) == 1
    assert doctor.check_library(MPI).status == "ok"


def test_a_disk_that_is_full_while_compiling_leaves_nothing(places, compiled, monkeypatch):
    def fill(output_dir, build_dir):
        put(output_dir, **wanted())
        (output_dir / native.STAMP_NAME).write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device", str(output_dir))

    with monkeypatch.context() as patch:
        patch.setattr(native, "build", fill)
        with pytest.raises(ExchangeError, match="No space left on device.*Set XDG_CACHE_HOME"):
            library.prepare_library()
    assert [entry.name for entry in places[1].iterdir()] == ["lock"]
    assert library.prepare_library() == library.find_library()


def test_files_of_the_build_folder_that_were_cut_are_made_again(tmp_path, monkeypatch):
    """The answer of TensorFlow, and an object whose compiler was killed."""
    monkeypatch.setattr(native, "run_quietly", lambda *_: json.dumps(ANSWER))
    for content in (b"", b'{"key', b"[]", b"\xff"):
        (tmp_path / "tensorflow.json").write_bytes(content)
        assert native.find_tensorflow(tmp_path).version == "2"
    source = tmp_path / "a.cc"
    source.write_text("")

    def compile_it(command, what, text="whole"):
        made = Path(command[-1])
        made.write_text(text)
        made.with_suffix(".d").write_text(f"a.o: {source}")
        if text != "whole":
            raise native.BuildError("killed")

    target = native.compile_objects
    sources = [native.Source(source, [])]
    monkeypatch.setattr(native, "run_quietly", compile_it)
    (made,) = target(sources, tmp_path, "g++")
    assert made.read_text() == "whole"
    later = made.stat().st_mtime + 5
    os.utime(source, (later, later))
    monkeypatch.setattr(native, "run_quietly", functools.partial(compile_it, text="part"))
    with pytest.raises(native.BuildError):
        target(sources, tmp_path, "g++")
    os.utime(made, (later + 5, later + 5))
    monkeypatch.setattr(native, "run_quietly", compile_it)
    assert target(sources, tmp_path, "g++")[0].read_text() == "whole"


def test_without_locks_the_first_to_finish_wins(places, compiled, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    def build_twice(output_dir, build_dir):
        put(places[1] / library.key_of(wanted()), **wanted())  # another process was faster
        return put(output_dir)

    monkeypatch.setattr(library.fcntl, "lockf", refuse)
    monkeypatch.setattr(native, "build", build_twice)
    path = library.prepare_library()
    assert native.read_stamp(path.parent) == wanted()
    assert not list(places[1].glob("unfinished-*"))


def test_a_library_that_does_not_load_is_compiled_again(tmp_path, monkeypatch):
    packaged, genuine, asked = put(tmp_path), library.prepare_library(), []

    def prepare(kind, who, is_packaged=True):
        asked.append(is_packaged)
        return packaged if is_packaged else genuine

    monkeypatch.setattr(engine, "PACKAGED", tmp_path)
    monkeypatch.setattr(engine, "prepare_library", prepare)
    engine.load.__wrapped__()
    assert asked == [True, False]


def test_compiling_is_not_part_of_the_start_s_time_limit(monkeypatch):
    def compile_slowly():
        raise ExchangeError("compiled first")

    monkeypatch.setattr(start, "load", compile_slowly)
    monkeypatch.setattr(start, "deadline_of_start", lambda *_: pytest.fail("the limit runs"))
    with pytest.raises(ExchangeError, match="compiled first"):
        start.start("engine", Settings(), None)


@pytest.mark.parametrize(
    ("words", "backend", "is_needed"),
    [
        ("-np 2", "", True),
        ("-np 2 --env TFSCALE_BACKEND=engine", "horovod", True),
        ("-np 1", "", False),
        ("-np 2 --dry-run", "", False),
        ("-np 2 -H other:2", "", False),
        ("-np 2", "horovod", False),
    ],
)
def test_the_launcher_compiles_before_ranks_start(monkeypatch, capsys, words, backend, is_needed):
    calls = []

    def prepare(kind):
        calls.append(kind)
        raise ExchangeError("Compiling needs a compiler.")

    monkeypatch.setenv("TFSCALE_BACKEND", backend)
    monkeypatch.setattr(mpi_command, "find_mpi", lambda *_: MPI)
    monkeypatch.setattr(cli.library, "prepare_library", prepare)
    monkeypatch.setattr(cli.Job, "run", lambda self: 0)
    monkeypatch.setattr(cli, "check_hosts", lambda *_: None)
    assert cli.main(["run", *words.split(), "python"]) == int(is_needed)
    assert calls == ["mpich"] * is_needed
    assert is_needed == ("tfscale: Compiling needs a compiler.\n" in capsys.readouterr().err)


def test_build_in_a_package_that_is_not_writable(places, monkeypatch, capsys):
    def build(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "/package")

    monkeypatch.setattr(native, "build", build)
    assert library.main([]) == 1
    assert f"compiles the library into {places[1]} at its first start" in capsys.readouterr().err


def test_the_doctor_tells_the_library_and_the_cache(places, compiled):
    put(places[0], tensorflow="2.17.1")
    check, key = doctor.check_library(MPI), library.key_of(wanted())
    assert check.status == "ok" and f"in the cache, key {key}: {places[1] / key}" in check.detail
    assert f"not used: {places[0]}, of TensorFlow 2.17.1, MPICH 5.0.2" in check.detail
    put(places[1] / "0123", sources="", mpicxx="mpicxx", compiler="g++ 12")
    check = doctor.check_cache()
    assert check.status == "info" and check.detail.startswith(f"{places[1]}: 2 compiled")
    stale = [text for text in check.detail.splitlines() if text.endswith("is not on this host")]
    assert len(stale) == 1 and "0123" in stale[0]
    put(places[0])
    assert doctor.check_library(MPI).detail.startswith(f"in the package: {places[0]}")
    places[1].chmod(0o755)
    (places[0] / native.STAMP_NAME).unlink()
    check = doctor.check_library(MPI)
    assert check.status == "missing" and "mode 0700" in check.detail
