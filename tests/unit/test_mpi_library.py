"""The MPI that ranks use: mpi4py's, else the launcher's; one in each process."""

import subprocess
import sys

import pytest

from tfscale.native import compiler, mpi_library
from tfscale.native.compiler import BuildError

# A library that only says whether it was initialised, and an extension that needs it.
MPI = """
int MPI_Initialized(int* flag) { *flag = %d; return 0; }
int MPI_Get_library_version(char* text, int* n) {
  const char* own = "Test MPI v%d, package: test\\nmore";
  for (*n = 0; own[*n]; ++*n) text[*n] = own[*n];
  text[*n] = 0;
  return 0;
}
"""
LOCATE = """
import ctypes, sys
from tfscale.config import ConfigError
from tfscale.native import mpi_library
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])
own, kind = sys.argv[2:4]
mpi_library._of_mpi4py = lambda: own and mpi_library._file_of(ctypes.CDLL(own))
mpi_library._candidates = lambda built_for: [(path, "built for it") for path in built_for]
try:
    print(mpi_library.locate(kind, sys.argv[4:]))
except (ConfigError, mpi_library.BuildError) as error:
    print(type(error).__name__, error)
"""


def make(folder, soname, is_initialized=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mpi.c").write_text(MPI % (is_initialized, is_initialized))
    words = ["gcc", "-shared", "-fPIC", str(folder / "mpi.c"), f"-Wl,-soname,{soname}"]
    subprocess.run([*words, "-o", str(folder / soname)], check=True)
    return str(folder / soname)


def locate(loaded="", own="", kind="", built_for=()):
    words = [sys.executable, "-c", LOCATE, loaded, own, kind, *built_for]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def mpis(tmp_path):
    used = make(tmp_path / "used", "libmpi.so.40", is_initialized=1)
    return make(tmp_path / "a", "libmpi.so.12"), make(tmp_path / "b", "libmpi.so.40"), used


def test_the_mpi_of_mpi4py_comes_before_all_others(mpis):
    mpich, openmpi, used = mpis
    assert locate(own=mpich) == f"{mpich} (libmpi.so.12, mpi4py loads it)"
    assert locate(own=mpich, built_for=[openmpi]) == locate(own=mpich)
    assert locate(loaded=openmpi, own=mpich) == locate(own=mpich)
    assert locate(loaded=used, own=used) == f"{used} (libmpi.so.40, mpi4py loads it)"


def test_another_mpi_that_is_in_use_is_an_error_that_names_both(mpis):
    mpich, _, used = mpis
    told = locate(loaded=used, own=mpich)
    assert told.startswith("ConfigError Two MPIs cannot be used in one process. Received: ")
    assert f"{used}, which has been initialised, and {mpich} (libmpi.so.12" in told


def test_without_mpi4py_the_mpi_in_use_comes_first_then_that_of_the_launcher(mpis, tmp_path):
    mpich, openmpi, used = mpis
    assert locate(loaded=used) == f"{used} (libmpi.so.40, this process has initialised it)"
    assert locate(built_for=[str(tmp_path / "no" / "libmpi.so.12"), openmpi, mpich]).startswith(
        f"{openmpi} (libmpi.so.40, built for it"
    )
    assert locate(kind="mpich", built_for=[openmpi, mpich]).startswith(mpich)
    told = locate(kind="openmpi", built_for=[mpich])
    assert "none of mpi4py" in told and "fits a launcher of openmpi. Install one" in told


def test_an_mpi_that_does_not_start_the_ranks_is_refused(mpis):
    mpich, openmpi, _ = mpis
    for own, kind in ((mpich, "openmpi"), (openmpi, "mpich"), (openmpi, "intel")):
        told = locate(own=own, kind=kind)
        assert f"Received: a launcher of {kind}, and {own} (" in told, told
    for own, kind in ((mpich, "intel"), (mpich, "srun"), (openmpi, "srun"), (openmpi, "")):
        assert locate(own=own, kind=kind).startswith(own)


def test_the_launcher_asks_another_process_and_loads_no_mpi():
    before = mpi_library._mapped()
    chosen = mpi_library.find()
    assert chosen.soname in mpi_library.SONAMES and chosen.version.startswith(("MPICH", "Open MPI"))
    assert mpi_library._mapped() == before
    other = "openmpi" if mpi_library.is_of("mpich", chosen.soname) else "mpich"
    with pytest.raises(BuildError, match=f"a launcher of {other}, and {chosen.path}"):
        mpi_library.find(other)


@pytest.mark.parametrize(
    ("name", "is_mpi"),
    [
        ("libmpi.so.12", True),
        ("libmpi.so.40.30.5", True),
        ("libmpich.so.12.2.2", True),
        ("libmpi_abi.so.1", True),
        ("libmpi_gnu_123.so.12", True),
        ("libmpi_mpifh.so.40", False),
        ("libmpi_cxx.so.40", False),
        ("libmpifort.so.12", False),
    ],
)
def test_names_of_mpi_libraries(name, is_mpi):
    assert bool(compiler.MPI_NAME.fullmatch(name)) is is_mpi
