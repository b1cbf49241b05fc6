"""Build Horovod 0.28.1 for the TensorFlow and MPI of this environment, and install it.

    python tools/build_horovod.py [--wheel-dir DIR] [--jobs N]

Horovod's last release builds unmodified against TensorFlow 2.18 to 2.21 where three things are
there that TensorFlow no longer installs or has moved: the headers of highwayhash and farmhash (two
Debian packages; installed here by root, named otherwise), and an XLA header under its former name
(a forwarding header, in build/horovod). MPI and CMake come from this environment or PATH.

What is installed: Horovod's wheel, and a `horovodrun` that puts an `mpirun` ahead on PATH. That
one says "MPICH" when asked for its version, a word that Horovod looks for and MPICH 5 no longer
prints, and spells options as Open MPI 5 wants them. No part of Horovod that listens for strangers
is started: see docs/from-horovod.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.28.1"
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "horovod"
HEADER_PACKAGES = ("libhighwayhash-dev", "libfarmhash-dev")
HEADERS = ("highwayhash/sip_hash.h", "farmhash.h")
# Where TensorFlow had the header until 2.17, and where it is now.
MOVED_HEADER = ("tensorflow/compiler/xla/client/xla_builder.h", "xla/hlo/builder/xla_builder.h")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
OPTIONS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}
CHECK = """
import horovod.tensorflow.mpi_ops as ops
ops.init()
assert float(ops.MPI_LIB.horovod_allreduce(
    tensor=3.0, reduce_op=1, prescale_factor=1.0, postscale_factor=1.0)) == 3.0
print("Horovod", __import__("horovod").__version__, "over",
      " and ".join(n for n in ("mpi", "gloo", "nccl") if getattr(ops, n + "_built")()))
ops.shutdown()
"""
HOROVODRUN = """#!{python}
\"\"\"horovodrun, with an mpirun ahead on PATH that Horovod 0.28.1 recognises.\"\"\"
import os
import sys

if __name__ == "__main__":  # Horovod starts helpers that import this file.
    os.environ["PATH"] = {folder!r} + os.pathsep + os.environ.get("PATH", "")
    from horovod.runner.launch import run_commandline

    sys.exit(run_commandline())
"""
MPIRUN = r"""#!/bin/sh
# Horovod 0.28.1 finds out what MPI this is from `mpirun --version`: MPICH 5 prints no MPICH there.
# To Open MPI it gives long options with one dash, which version 5 no longer takes.
mpirun={mpirun}
version=$("$mpirun" --version 2>&1)
if [ "$1" = --version ]; then
  echo "$version"
  case $version in *HYDRA*) echo MPICH ;; esac
  exit 0
fi
case $version in *"Open MPI"*) ;; *) exec "$mpirun" "$@" ;; esac
left=$# values=0 is_option=1
while [ "$left" -gt 0 ]; do
  word=$1
  shift
  left=$((left - 1))
  if [ "$values" -gt 0 ]; then
    values=$((values - 1))
  elif [ "$is_option" = 1 ]; then
    case $word in
      -mca) word=--mca values=2 ;;
      -bind-to | -map-by | -rank-by) word=-$word values=1 ;;
      -np | -H | -x | --output-filename | --mca | --bind-to | --map-by) values=1 ;;
      -*) ;;
      *) is_option=0 ;;
    esac
    [ "$word" = --mca ] && values=2
  fi
  set -- "$@" "$word"
done
exec "$mpirun" "$@"
"""


def find_missing_headers() -> list[str]:
    """Return the headers that the compiler does not find."""
    compiler = shutil.which("c++") or "g++"
    missing = []
    for header in HEADERS:
        done = subprocess.run(
            [compiler, "-E", "-x", "c++", "-", "-o", os.devnull],
            input=f"#include <{header}>\n",
            text=True,
            capture_output=True,
        )
        if done.returncode != 0:
            missing.append(header)
    return missing


def provide_headers() -> None:
    """Install Debian's header packages where they are missing and this is root's process.

    Raises:
        SystemExit: They are missing and cannot be installed here.
    """
    missing = find_missing_headers()
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *HEADER_PACKAGES]
        subprocess.run(install, check=True, env=environment, stdout=subprocess.DEVNULL)
        missing = find_missing_headers()
    if missing:
        raise SystemExit(
            f"Horovod needs these headers to build. Received: no {' and no '.join(missing)}. "
            f"Install them (Debian: apt-get install {' '.join(HEADER_PACKAGES)})."
        )


def write_forwarding_header(include: Path) -> None:
    """Write the header that Horovod includes under its former name."""
    former, current = MOVED_HEADER
    path = include / former
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#pragma once\n#include "{current}"\n')


def build_environment(include: Path, jobs: int) -> dict[str, str]:
    """Return the environment of the build.

    Args:
        include: Folder of the forwarding header.
        jobs: Compilers at a time.
    """
    own = str(Path(sys.executable).parent)  # MPI's compiler wrapper and CMake, if installed there
    paths = [str(include), os.environ.get("CPLUS_INCLUDE_PATH", "")]
    return {
        **os.environ,
        **OPTIONS,
        "CPLUS_INCLUDE_PATH": os.pathsep.join(filter(None, paths)),
        "MAKEFLAGS": f"-j{jobs}",
        "PATH": os.pathsep.join([own, os.environ.get("PATH", "")]),
    }


def stamp() -> str:
    """Return what a built wheel depends on: it is built again where this has changed."""
    import tensorflow as tf

    from tfscale.native.compiler import find_toolchain

    mpi = find_toolchain().mpi
    chosen = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("HOROVOD_"))
    words = (VERSION, tf.__version__, sys.implementation.cache_tag, str(mpi), *chosen)
    return " ".join(words) + "\n"


def build_wheel(wheels: Path, jobs: int) -> Path:
    """Build the wheel unless there is one for this Python, TensorFlow, MPI and HOROVOD_* options.

    Args:
        wheels: Folder for it.
        jobs: Compilers at a time.

    Returns:
        The wheel's file.
    """
    wanted, mark = stamp(), wheels / "stamp.txt"
    found = sorted(wheels.glob(f"horovod-{VERSION}-*.whl"))
    if found and mark.exists() and mark.read_text() == wanted:
        return found[0]
    provide_headers()
    tools = ["setuptools", "wheel", "packaging", *([] if shutil.which("cmake") else ["cmake"])]
    subprocess.run([*PIP, "install", *tools], check=True)
    include = FOLDER / "include"
    write_forwarding_header(include)
    wheels.mkdir(parents=True, exist_ok=True)
    for former in found:  # of another Python perhaps, which would be installed instead
        former.unlink()
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    command += ["--no-binary", "horovod", "-w", str(wheels), f"horovod=={VERSION}"]
    subprocess.run(command, check=True, env=build_environment(include, jobs))
    mark.write_text(wanted)
    return sorted(wheels.glob(f"horovod-{VERSION}-*.whl"))[0]


def install_launcher() -> None:
    """Install horovodrun and the mpirun it finds first."""
    commands = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=os.pathsep.join([str(commands), os.environ["PATH"]]))
    folder = Path(sys.prefix) / "libexec" / "tfscale"
    write_program(
        commands / "horovodrun", HOROVODRUN.format(python=sys.executable, folder=str(folder))
    )
    if mpirun is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_program(folder / "mpirun", MPIRUN.format(mpirun=mpirun))


def write_program(path: Path, text: str) -> None:
    """Write a file that can be executed."""
    path.write_text(text)
    path.chmod(0o755)


def main() -> None:
    """Build, install, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel-dir", type=Path, default=FOLDER / "wheels")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    wheel = build_wheel(options.wheel_dir, options.jobs)
    subprocess.run([*PIP, "install", "--force-reinstall", "--no-deps", str(wheel)], check=True)
    subprocess.run([*PIP, "install", "cloudpickle", "psutil", "pyyaml", "packaging"], check=True)
    install_launcher()
    FOLDER.mkdir(parents=True, exist_ok=True)  # a wheel that was there needed none
    subprocess.run([sys.executable, "-c", CHECK], check=True, cwd=FOLDER)


if __name__ == "__main__":
    main()
