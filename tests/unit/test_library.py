"""The libraries that fit: in the package, in the user's cache, or compiled at their first use."""

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
from tfscale.native.compiler import ENGINE, OPS
from tfscale.native.mpi_library import MpiLibrary

ANSWER = {"version": "2", "compile": [], "link": []}
MPI = mpi_command.Mpi("mpich", "5.0.2", "/bin/mpiexec")
MPICH = MpiLibrary("/lib/libmpi.so.12", "libmpi.so.12", "mpi4py loads it", "MPICH 5")
OPENMPI = MpiLibrary("/lib/libmpi.so.40", "libmpi.so.40", "mpi4py loads it", "Open MPI 5")
VERSION = native.present_tensorflow()
TARGETS = {ENGINE: MPICH.soname, OPS: native.target_of(VERSION)}
# A process that compiles by writing a file, once the other one waits, and notes that it did.
COMPILER = """
import sys, time
from pathlib import Path
from tfscale.native import cache as library, compiler as native
from tfscale.native.mpi_library import MpiLibrary

def build(part, output_dir):
    with open(sys.argv[1], "a") as notes:
        notes.write(f"compiled {part}\\n")
    deadline = time.monotonic() + 50
    while not waits.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    path = native.shared_object(output_dir, part)
    path.write_bytes(b"made")
    native.write_stamp(path, native.identity(part, targets[part]))
    return path

def say(who, text, usual=library._say):
    usual(who, text)
    if text.startswith("waiting"):
        waits.touch()

waits = Path(sys.argv[1] + "-waits")
targets = {"engine": "libmpi.so.12", "ops": native.target_of(native.present_tensorflow())}
library._engine_of = lambda mpi: lambda output, objects: build("engine", output)
library._ops_with = lambda *_: lambda output, objects: build("ops", output)
library.PACKAGED, library._say = Path("/none"), say
made = library.prepare_libraries(MpiLibrary("", "libmpi.so.12", ""), sys.argv[2])
print(made.engine, made.ops)
"""


def put(folder, part=ENGINE, content=b"library", **stamp):
    """Write a library that cannot be loaded, with a build record."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = native.shared_object(folder, part)
    path.write_bytes(content)
    stamp = {**native.identity(part, TARGETS[part]), **stamp}
    native.write_stamp(path, {name: value for name, value in stamp.items() if value is not None})
    return path


@pytest.fixture
def places(tmp_path, monkeypatch):
    package, cache = tmp_path / "package", tmp_path / "home" / "tfscale"
    package.mkdir()
    monkeypatch.setattr(library, "PACKAGED", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    return package, cache


@pytest.fixture
def compiled(monkeypatch):
    """Builds that are done without a compiler: pairs (part, folder)."""
    calls = []

    def build(part, output_dir, objects):
        calls.append((part, output_dir))
        return put(output_dir, part, b"made %d" % len(calls))

    for name, part in (("_engine_of", ENGINE), ("_ops_with", OPS)):
        how = functools.partial(build, part)
        monkeypatch.setattr(library, name, lambda *_, how=how: how)
    return calls


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    monkeypatch.setattr(native.shutil, "which", lambda *_, **__: None)


def find(part=ENGINE):
    return library.find_library(part, TARGETS[part])


def test_the_cache_folder(monkeypatch):
    for value, expected in (
        ("/a", "/a/tfscale"),
        ("a", "~/.cache/tfscale"),
        ("", "~/.cache/tfscale"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert library.cache_folder() == Path(expected).expanduser()


def test_the_key_names_everything_that_a_library_depends_on():
    stamp = native.identity(ENGINE, "libmpi.so.12")
    assert set(stamp) == {"part", "target", "sources", "machine"}
    keys = {library.key_of({**stamp, name: "another"}) for name in stamp} | {library.key_of(stamp)}
    assert len(keys) == 1 + len(stamp)
    assert library.key_of(dict(reversed(stamp.items()))) == library.key_of(stamp)


@pytest.mark.parametrize(
    ("stamp", "is_used"),
    [
        ({}, True),
        ({"target": "libmpi.so.40"}, False),
        ({"target": None}, False),
        ({"part": OPS}, False),
        ({"sources": "of another version"}, False),
        ({"machine": "another, glibc 2.36"}, False),
        ({"machine": f"{os.uname().machine}, glibc 2.28"}, True),
    ],
)
def test_a_library_of_the_package_is_used_if_it_fits(places, stamp, is_used):
    path = put(places[0] / "engine", **stamp)
    assert find() == (path if is_used else None)


@pytest.mark.parametrize("made", ["2.17", "2.20.0", "2.22.0rc0", "2.22.0rc1", "2.22", "2.23", None])
def test_ops_of_another_tensorflow_are_never_used(places, made):
    wanted = native.identity(OPS, "2.22.0rc2")
    put(places[0] / "ops", OPS, target=made)
    put(places[1] / library.key_of(wanted), OPS, target=made)
    places[1].chmod(0o700)
    assert library.find_library(OPS, wanted["target"]) is None
    path = put(places[1] / library.key_of(wanted), OPS, target=wanted["target"])
    assert library.find_library(OPS, wanted["target"]) == path


def test_ops_serve_all_patches_of_a_minor_version_and_no_other_release_candidate():
    for version in ("2.21.0", "2.21.9"):
        assert native.target_of(version) == "2.21"
    # The launcher asks pip, and ranks TensorFlow: they must look for the same library.
    for imported, installed in (
        ("2.22.0-rc1", "2.22.0rc1"),
        ("2.23.0-dev20261101", "2.23.0.dev20261101"),
    ):
        assert native.target_of(imported) == native.target_of(installed) == installed


def test_a_wheel_for_several_mpis_and_tensorflow_versions_picks_two(places, no_compiler):
    paths = {}
    for part, targets in ((ENGINE, ("libmpi.so.12", "libmpi.so.40")), (OPS, ("2.17", "2.18"))):
        for target in (*targets, TARGETS[OPS]) if part == OPS else targets:
            paths[target] = put(places[0] / f"{part}-{target}", part, target=target)
    for mpi in (MPICH, OPENMPI):
        made = library.prepare_libraries(mpi)
        assert (made.engine, made.ops) == (paths[mpi.soname], paths[TARGETS[OPS]])


def test_what_does_not_fit_is_compiled_into_the_cache_once(places, compiled, capsys):
    put(places[0] / "ops", OPS, target="2.17")
    made = library.prepare_libraries(MPICH)
    for part, path in ((ENGINE, made.engine), (OPS, made.ops)):
        key = library.key_of(native.identity(part, TARGETS[part]))
        assert path == native.shared_object(places[1] / key, part)
        assert places[1].stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
    assert [(part, path.parent.parent) for part, path in compiled] == [
        (ENGINE, places[1]),
        (OPS, places[1]),
    ]
    told = capsys.readouterr().err
    assert "compiling the engine for libmpi.so.12" in told and f"in {made.ops.parent}" in told
    assert f"compiling the ops for TensorFlow {TARGETS[OPS]}, once" in told
    assert library.prepare_libraries(MPICH) == made and find(OPS) == made.ops
    assert len(compiled) == 2 and capsys.readouterr().err == ""


def test_only_what_is_missing_is_compiled(places, compiled):
    path = put(places[0] / "engine")
    made = library.prepare_libraries(MPICH)
    assert made.engine == path and [part for part, _ in compiled] == [OPS]
    assert library.prepare_libraries(OPENMPI).ops == made.ops
    assert [part for part, _ in compiled] == [OPS, ENGINE]


def test_changed_sources_are_preferred_to_the_library_of_the_package(
    places, compiled, monkeypatch, tmp_path
):
    """In an editable install whose library was built before."""
    put(places[0] / "engine")
    for room in native.ROOMS.values():
        (tmp_path / "custom_ops" / room).mkdir(parents=True)
        (tmp_path / "custom_ops" / room / "changed.cc").write_text(room)
    monkeypatch.setattr(native, "find_sources", lambda: tmp_path / "custom_ops")
    assert library.prepare_libraries(MPICH).engine.is_relative_to(places[1])


def test_a_host_without_compiler_uses_what_another_one_compiled(
    places, compiled, monkeypatch, no_compiler
):
    made = library.prepare_libraries(MPICH)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(places[1].parent))
    monkeypatch.setattr(library, "PACKAGED", places[0])
    monkeypatch.setattr(native, "find_tool", lambda name: None)
    assert library.prepare_libraries(MPICH) == made
    with pytest.raises(native.BuildError, match="no mpicxx"):
        library.prepare_libraries(OPENMPI)


@pytest.mark.parametrize("found", ["2.19.0", "2.22.0"])
def test_a_tensorflow_without_library_and_compiler(places, monkeypatch, no_compiler, found):
    """The error says what to install; so does the doctor, before a run."""
    monkeypatch.setattr(native, "present_tensorflow", lambda: found)
    monkeypatch.setattr(doctor.mpi_library, "find", lambda *_: MPICH)
    put(places[0] / "engine")
    for version in ("2.20", "2.21"):
        put(places[0] / f"ops-{version}", OPS, target=version)
    with pytest.raises(native.BuildError, match=r"no g\+\+, no c\+\+.*apt-get") as error:
        library.prepare_libraries(MPICH)
    remedy = f"they are there, 2.20, 2.21 instead of {found}: pip install"
    bound = "<2.22" if found == "2.22.0" else "==2.21.*"
    assert f"{remedy} 'tensorflow{bound}'." in str(error.value)
    check = doctor.check_library(MPI)
    assert (check.status, check.detail) == ("missing", str(error.value))
    put(places[0] / "ops-own", OPS, target=native.target_of(found))
    assert doctor.check_library(MPI).status == "ok"


def test_an_engine_is_not_compiled_with_another_mpi(places, monkeypatch):
    monkeypatch.setattr(native.Toolchain, "find_soname", lambda self: "libmpi.so.40")
    with pytest.raises(native.BuildError, match=r"mpicxx of libmpi.so.40, and /lib/libmpi.so.12"):
        library.prepare_libraries(MPICH)


@pytest.mark.parametrize("which", ["cache", "library"])
def test_a_folder_that_others_may_write_to_is_refused(places, compiled, monkeypatch, which):
    folder = library.prepare_libraries(MPICH).engine.parent
    folder = folder if which == "library" else folder.parent
    with monkeypatch.context() as patch:
        patch.setattr(library.os, "geteuid", lambda: 12345)
        with pytest.raises(ExchangeError, match=f"{places[1]} must be .*Received: user id"):
            library.prepare_libraries(MPICH)
    folder.chmod(0o770)
    with pytest.raises(ExchangeError, match=f"{folder} must be .*Received: .*, mode 0770"):
        library.prepare_libraries(MPICH)


def test_a_cache_that_cannot_be_written_is_named(places, compiled, monkeypatch):
    (places[0] / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(places[0] / "file" / "below"))
    with pytest.raises(
        ExchangeError, match="Could not write the library.*file.*Set XDG_CACHE_HOME"
    ):
        library.prepare_libraries(MPICH)


def test_two_processes_compile_once(places, tmp_path):
    words = [sys.executable, "-c", COMPILER, str(tmp_path / "notes")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*words, f"rank {rank}"], **pipes) for rank in range(2)]
    outs, errors = zip(*(process.communicate(timeout=60) for process in started), strict=True)
    assert [process.returncode for process in started] == [0, 0], errors
    assert (tmp_path / "notes").read_text() == "compiled engine\ncompiled ops\n"
    assert outs[0] == outs[1] and Path(outs[0].split()[1]).read_bytes() == b"made"
    told = "".join(errors)
    assert told.count("compiling the ") == 2 and 1 <= told.count("waiting for ") <= 2, told


def test_what_a_killed_process_left_is_removed(places, compiled):
    left = places[1] / "unfinished-1"
    left.mkdir(parents=True)
    places[1].chmod(0o700)
    assert library.prepare_libraries(MPICH).engine.exists()
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
    made = library.prepare_libraries(MPICH)
    path, record = made.engine, made.engine.with_name(native.STAMP_NAME)
    DAMAGE[kind](path, record)
    assert find() is None
    check = doctor.check_cache()
    assert check.status == "info" and f"{path.parent.name}: cut or changed" in check.detail
    capsys.readouterr()
    assert library.prepare_libraries(MPICH) == made and find() == path and len(compiled) == 3
    assert "holds no whole library" in capsys.readouterr().err
    assert path.read_bytes() == b"made 3" and native.read_stamp(path.parent)["target"]
    names = {path.parent.name, made.ops.parent.name, "lock"}
    assert {entry.name for entry in places[1].iterdir()} == names


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_library_of_the_package_is_not_used(places, compiled, kind):
    path = put(places[0] / "engine")
    DAMAGE[kind](path, path.with_name(native.STAMP_NAME))
    assert library.prepare_libraries(MPICH).engine.is_relative_to(places[1])


def test_a_disk_that_is_full_while_compiling_leaves_nothing(places, compiled, monkeypatch):
    def fill(output_dir, objects):
        put(output_dir)
        (output_dir / native.STAMP_NAME).write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device", str(output_dir))

    with monkeypatch.context() as patch:
        patch.setattr(library, "_engine_of", lambda mpi: fill)
        with pytest.raises(ExchangeError, match="No space left on device.*Set XDG_CACHE_HOME"):
            library.prepare_libraries(MPICH)
    assert [entry.name for entry in places[1].iterdir()] == ["lock"]
    assert library.prepare_libraries(MPICH).engine == find()


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

    def build_twice(output_dir, objects):
        key = library.key_of(native.identity(ENGINE, MPICH.soname))
        put(places[1] / key, content=b"first")  # another process was faster
        return put(output_dir)

    monkeypatch.setattr(library.fcntl, "lockf", refuse)
    monkeypatch.setattr(library, "_engine_of", lambda mpi: build_twice)
    assert library.prepare_libraries(MPICH).engine.read_bytes() == b"first"
    assert not list(places[1].glob("unfinished-*"))


def test_libraries_that_do_not_load_are_compiled_again(places, compiled, monkeypatch):
    """Of the package and, as home folders are shared, of the cache."""
    put(places[0] / "engine")
    tried = []

    def load(libraries):
        tried.append(libraries)
        if len(tried) % 2:
            raise ExchangeError("The native library does not load.") from OSError("GLIBC_9")
        return "loaded"

    monkeypatch.setattr(engine, "Library", load)
    monkeypatch.setattr(engine.mpi_library, "locate", lambda *_: MPICH)
    assert engine.load.__wrapped__() == "loaded"
    assert tried[0].engine.parent.parent == places[0] and tried[1].engine.is_relative_to(places[1])
    assert [part for part, _ in compiled] == [OPS, ENGINE, OPS]
    (places[0] / "engine" / native.STAMP_NAME).unlink()
    assert engine.load.__wrapped__() == "loaded"
    assert tried[2] == tried[3] and len(compiled) == 5


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

    def prepare(kind, built_for):
        calls.append(kind)
        raise ExchangeError("Compiling needs a compiler.")

    monkeypatch.setenv("TFSCALE_BACKEND", backend)
    monkeypatch.setattr(mpi_command, "find_mpi", lambda *_: MPI)
    monkeypatch.setattr(cli.mpi_library, "find", prepare)
    monkeypatch.setattr(cli.Job, "run", lambda self: 0)
    monkeypatch.setattr(cli, "check_hosts", lambda *_: None)
    assert cli.main(["run", *words.split(), "python"]) == int(is_needed)
    assert calls == ["mpich"] * is_needed
    assert is_needed == ("tfscale: Compiling needs a compiler.\n" in capsys.readouterr().err)


def test_build_in_a_package_that_is_not_writable(places, monkeypatch, capsys):
    def build(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "/package")

    monkeypatch.setattr(library, "build", build)
    assert library.main([]) == 1
    assert f"compiles the library into {places[1]} at its first start" in capsys.readouterr().err


def test_the_doctor_tells_the_libraries_and_the_cache(places, compiled, monkeypatch):
    monkeypatch.setattr(doctor.mpi_library, "find", lambda *_: MPICH)
    put(places[0] / "ops", OPS, target="2.17")
    path = put(places[0] / "engine")
    check, key = doctor.check_library(MPI), library.key_of(native.identity(OPS, TARGETS[OPS]))
    assert check.status == "ok" and f"{path} for libmpi.so.12 (of the package)" in check.detail
    assert f"for TensorFlow {TARGETS[OPS]} (compiled here, key {key})" in check.detail
    assert "/lib/libmpi.so.12 (libmpi.so.12, mpi4py loads it): MPICH 5" in check.detail
    assert f"not used: {places[0] / 'ops'}, ops for 2.17" in check.detail
    put(places[1] / "0123", sources="")
    check = doctor.check_cache()
    assert check.status == "info" and check.detail.startswith(f"{places[1]}: 2 compiled")
    stale = [text for text in check.detail.splitlines() if text.endswith("not for this tfscale")]
    assert len(stale) == 1 and "0123" in stale[0]
    places[1].chmod(0o755)
    check = doctor.check_library(MPI)
    assert check.status == "missing" and "mode 0700" in check.detail
