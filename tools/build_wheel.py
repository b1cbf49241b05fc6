"""Build one wheel with a library for each of several TensorFlow versions.

    python tools/build_wheel.py 2.18 2.21

Each library is compiled in an environment of its own that has that TensorFlow (build/wheel/2.18),
with the MPI of this Python. The package uses the one that fits the TensorFlow it is imported with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from build_native import ROOT, import_bare

FOLDER = ROOT / "build" / "wheel"
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")


def build_library(version: str, mpicxx: str, libraries: Path) -> Path:
    """Compile the library for a TensorFlow such as "2.18"; return its file."""
    python = FOLDER / version / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER / version)], check=True)
    print(f"TensorFlow {version}", flush=True)
    subprocess.run([python, *PIP, "install", f"tensorflow=={version}.*"], check=True)
    output, objects = libraries / f"tensorflow-{version}", FOLDER / f"objects-{version}"
    words = ["tools/build_native.py", "--mpicxx", mpicxx]
    words += ["--output", str(output), "--objects", str(objects)]
    subprocess.run([python, *words], cwd=ROOT, check=True)
    return output / "libtfscale.so"


def main(versions: Sequence[str]) -> int:
    """Build the libraries and the wheel, in dist/; return the exit code."""
    native = import_bare("tfscale.native.compiler")
    libraries = FOLDER / "libraries"
    shutil.rmtree(libraries, ignore_errors=True)
    mpicxx = native.find_toolchain().mpicxx
    for version in versions:
        build_library(version, mpicxx, libraries)
    words = ["wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    environ = {**os.environ, "TFSCALE_LIBRARIES": str(libraries)}
    return subprocess.run([sys.executable, *PIP, *words], cwd=ROOT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
