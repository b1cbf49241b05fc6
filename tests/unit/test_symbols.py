"""The built libraries load on older systems: what they need of glibc and the C++ library."""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfscale.native import cache, compiler, elf
from tfscale.native.elf import read_dynamic

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import build_wheel

# These tests read symbols by objdump, and know the instructions of x86-64 only.
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("objdump"), reason="needs x86_64, objdump"
)
NEW = """
#include <chrono>
#include <condition_variable>
void wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock) {
  changed.wait_for(lock, std::chrono::seconds(1));
}
"""


def libraries():
    folders = cache.packaged_folders()
    parts = [(folder, (compiler.read_stamp(folder) or {})["part"]) for folder in folders]
    return [compiler.shared_object(folder, part) for folder, part in parts]


# `make test` and `make test-all` build the libraries first; a checkout alone has none.
NEEDS_BUILT = pytest.mark.skipif(not libraries(), reason="nothing is built: run `make build`")


@NEEDS_BUILT
def test_the_libraries_of_the_package_load_on_manylinux_2_28():
    for path in libraries():
        build_wheel.check_library(path)
        names = read_dynamic(path)
        assert names["SONAME"] == [path.name] and names["RUNPATH"] == []
        of_mpi = [name for name in names["NEEDED"] if compiler.MPI_NAME.fullmatch(name)]
        is_engine = path.name == "libtfscale_engine.so"
        assert len(of_mpi) == is_engine
        assert ("libtensorflow_framework.so.2" in names["NEEDED"]) != is_engine
        assert ("libtfscale_engine.so" in names["NEEDED"]) != is_engine


def test_a_library_with_a_newer_symbol_or_a_path_is_refused(tmp_path):
    """GCC from 10 on waits by a function of glibc 2.30."""
    (tmp_path / "new.cc").write_text(NEW)
    library = tmp_path / "libtfscale_ops.so"
    words = ["g++", "-shared", "-fPIC", str(tmp_path / "new.cc"), "-o", str(library)]
    subprocess.run([*words, "-Wl,-rpath,/opt/mpi/lib"], check=True)
    with pytest.raises(compiler.BuildError.__mro__[1], match="has the path /opt/mpi/lib") as error:
        build_wheel.check_library(library)
    assert "pthread_cond_clockwait of GLIBC_2.3" in str(error.value)


# A function of a disassembly, and an instruction of AVX or later.
FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
VECTOR = re.compile(r"^ *[0-9a-f]+:\s+v[a-z]+[0-9a-z]*\s|%[yz]mm")
DISPATCHED = re.compile(r"(Encode|Sum)Avx2<|(HalfToFloat|FloatToHalf)F16c\(")


def vector_functions(library):
    """Names of a library's functions that have an instruction of AVX or later."""
    words = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    names, name = set(), ""
    for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines():
        if found := FUNCTION.match(line):
            name = found[1]
        elif VECTOR.search(line):
            names.add(name)
    return names


@NEEDS_BUILT
def test_a_cpu_without_avx_runs_only_what_it_has():
    """Functions with newer instructions are called after a look at the CPU."""
    names = set().union(*map(vector_functions, libraries()))
    assert len({name.partition("<")[0] for name in names}) >= 4
    assert [name for name in names if not DISPATCHED.search(name)] == []


@pytest.mark.parametrize("content", [b"", b"INPUT(libmpi.so.12)", b"\x7fELF\x02\x01" + b"\0" * 90])
def test_a_file_that_is_no_library_has_no_names(tmp_path, content):
    (tmp_path / "libmpi.so").write_bytes(content)
    with pytest.raises(OSError, match=r"libmpi\.so"):
        elf.read_dynamic(tmp_path / "libmpi.so")
