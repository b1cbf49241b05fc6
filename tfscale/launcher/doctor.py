"""The checks of `tfscale doctor`: everything that several ranks need, with remedies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfscale.comm.process import SLURM_VARIABLES
from tfscale.config import ExchangeError
from tfscale.launcher import mpi_command
from tfscale.native import cache as library
from tfscale.native import compiler, mpi_files, mpi_library
from tfscale.native.cores import count_cores, find_quota

# The ranks test this package, not one in the folder where they start.
_SELF_TEST = f"""
import sys
sys.path[0] = {str(compiler.PACKAGE.parent)!r}
import numpy as np, tfscale
tfscale.init()
total = np.asarray(tfscale.allreduce(np.ones(1000, np.float32), op=tfscale.Sum))
assert tfscale.size() == 2 and (total == 2).all(), (tfscale.size(), total)
tfscale.shutdown()
"""
_NO_HOROVOD = "not installed: needed for backend='horovod' (Gloo, NCCL) and horovodrun only"
_GPU_TEST = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


@dataclass(frozen=True)
class Check:
    """One line of the output of `tfscale doctor`.

    `status` is "ok", "info" (nothing is needed), "warning" (works, but badly) or "missing".
    """

    name: str
    status: str
    detail: str
    remedy: str = ""


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_version(package: str, version: str | None) -> Check:
    """Compare the version of TensorFlow or Keras with those that were tested."""
    remedy = f"pip install '{compiler.requirement(package)}'"
    if version is None:
        return Check(package, "missing", "not installed", remedy)
    if compiler.is_untested(package, version):
        detail = f"{version}, newer than those that were tested ({compiler.tested(package)})"
        remedy = f"if something fails: pip install '{package}{compiler.ceiling(package)}'"
        return Check(package, "warning", detail, remedy)
    if compiler.minor(version) < compiler.minor(compiler.TESTED[package][0]):
        return Check(package, "missing", f"{version}, not {compiler.tested(package)}", remedy)
    return Check(package, "ok", version)


def check_keras(environ: Mapping[str, str]) -> Check:
    """Look for Keras 3 with the TensorFlow backend."""
    version = _installed("keras") or _installed("keras-nightly")
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if version is not None and backend != "tensorflow":
        detail = f"{version} with KERAS_BACKEND={backend}"
        return Check("keras", "missing", detail, "export KERAS_BACKEND=tensorflow")
    return check_version("keras", version)


def check_mpi(mpi: mpi_command.Mpi | None) -> Check:
    """Report the MPI that would start the ranks."""
    if mpi is None:
        path = compiler.find_tool("mpiexec")
        detail = f"{path} is of an unknown kind" if path else "no mpiexec here or on PATH"
        return Check("mpi", "missing", detail, "pip install mpich")
    return Check("mpi", "ok", f"{mpi.kind} {mpi.version}, {mpi.mpiexec}")


def check_slurm(mpi: mpi_command.Mpi | None) -> Check | None:
    """Look for what Slurm's srun needs to start ranks; None where there is no srun."""
    if shutil.which("srun") is None:
        return None
    name = "pmix" if mpi is not None and mpi.kind == "openmpi" else "pmi2"
    listed = _output_of("srun", "--mpi=list")
    if listed and name not in listed.split():
        detail = f"srun, without --mpi={name}, which {mpi.kind if mpi else 'MPI'} needs"
        return Check("slurm", "warning", detail, f"install Slurm's plugin mpi/{name}")
    detail = f"srun --mpi={name}"
    if mpi is None or mpi.kind != "mpich":
        return Check("slurm", "info", detail)
    device = re.search(
        r"MPICH Device:\s*(.*)", _output_of(str(Path(mpi.mpiexec).parent / "mpichversion"))
    )
    if device is not None and "ucx" in device[1] and "ofi" not in device[1]:
        detail += f" with MPICH's device {device[1]}: ranks on several nodes may hang in init"
        remedy = "pip install mpich, or start with tfscale run -H instead of --slurm"
        return Check("slurm", "warning", detail, remedy)
    ((variable, value),) = SLURM_VARIABLES.items()
    return Check("slurm", "info", f"{detail}; on several nodes tfscale sets {variable}={value}")


def _output_of(*command: str) -> str:
    """Return the output of a command, or "" if it cannot be run."""
    done = mpi_command.run_within(10.0, command)
    return done.stdout + done.stderr if done else ""


def check_library(mpi: mpi_command.Mpi | None) -> Check:
    """Look for libraries that fit TensorFlow and MPI; compile what is missing."""
    try:
        chosen = mpi_library.find(mpi.kind if mpi else "", library.built_for())
        libraries = library.prepare_libraries(chosen)
    except ExchangeError as error:
        return Check("library", "missing", str(error))
    detail = f"{libraries.places()}: {chosen.version}"
    used = (libraries.engine.parent, libraries.ops.parent)
    for folder in library.packaged_folders():
        if folder not in used:
            stamp = compiler.read_stamp(folder) or {}
            detail += f"\n{'':21}not used: {folder}, {stamp['part']} for {stamp['target']}"
    return Check("library", "ok", detail)


def check_cache() -> Check:
    """List the compiled libraries in the user's cache."""
    folder, lines = library.cache_folder(), []
    try:
        cached, sources = library.cached_libraries(), compiler.identity("", "")["sources"]
    except ExchangeError as error:
        return Check("cache", "missing", str(error))
    for one in cached:
        lines.append(
            f"\n{'':21}{one.key}, {one.n_bytes / 2**20:.1f} MB, {one.stamp['part']} for "
            f"{one.stamp['target']}"
            f"{': not for this tfscale' if one.stamp['sources'] != sources else ''}"
        )
    for path in library.damaged_folders():
        lines.append(f"\n{'':21}{path.name}: cut or changed, compiled again when needed; rm -r it")
    n_bytes = sum(one.n_bytes for one in cached)
    detail = f"{folder}: {len(cached)} compiled, {n_bytes / 2**20:.1f} MB"
    return Check("cache", "info", detail + "".join(lines))


def check_threads(environ: Mapping[str, str]) -> Check:
    """Report the cores, and the threads that ranks would use."""
    cores = count_cores()
    inter_op = environ.get("TF_NUM_INTEROP_THREADS", "")
    if inter_op == "1":
        remedy = "unset TF_NUM_INTEROP_THREADS, or set it to 2 or more"
        detail = "TF_NUM_INTEROP_THREADS=1: communication cannot overlap with computing"
        return Check("threads", "warning", detail, remedy)
    spec = mpi_command.LaunchSpec(("python",), 2, n_cores=cores)
    variables = mpi_command.thread_variables(spec, environ)
    text = " ".join(f"{name}={value}" for name, value in variables.items()) or "as set by you"
    limit = f", by a CPU quota of {find_quota():g}" if cores < len(os.sched_getaffinity(0)) else ""
    return Check("threads", "info", f"{cores} cores{limit}; each of 2 ranks: {text}")


def check_shared_memory() -> Check:
    """Look for space in /dev/shm, and for files of MPI that no process uses any more."""
    left = mpi_files.find_left()
    names = "".join(f"\n{'':21}{path}, {n_bytes / 2**20:.1f} MB" for path, n_bytes in left)
    free = mpi_files.free_bytes()
    detail = f"{free / 2**20:.0f} MB free in {mpi_files.SHARED_MEMORY}"
    remedy = f"rm {' '.join(path for path, _ in left)}" if left else ""
    if left:
        detail += f"; left by ended jobs of yours:{names}"
    if free < 2 * mpi_files.BYTES_PER_RANK:
        more = "give the container more (docker run --shm-size=1g)"
        remedy = f"{remedy}, or {more}" if left else f"end jobs that use it, or {more}"
        return Check("memory", "warning", f"too little for 2 ranks: {detail}", remedy)
    if left:
        return Check("memory", "warning", detail, remedy)
    return Check("memory", "ok", detail)


def check_gpus(timeout_s: float = 120.0) -> Check:
    """Count the GPUs that TensorFlow sees, in a separate process."""
    done = mpi_command.run_within(timeout_s, [sys.executable, "-c", _GPU_TEST])
    if done is None:
        return Check("gpus", "warning", f"TensorFlow did not answer in {timeout_s:.0f} s")
    if done.returncode != 0:
        text = done.stderr.strip().splitlines()[-1:]
        return Check("gpus", "missing", " ".join(["TensorFlow fails:", *text]), "reinstall it")
    return Check("gpus", "info", done.stdout.split()[-1])


def self_test(mpi: mpi_command.Mpi, environ: Mapping[str, str], timeout_s: float) -> Check:
    """Let two ranks add numbers; they are killed after `timeout_s`."""
    remedy = "see the message; tfscale run --dry-run shows the command that starts ranks"
    command, is_root = (sys.executable, "-c", _SELF_TEST), os.geteuid() == 0
    spec = mpi_command.LaunchSpec(command, 2, is_root=is_root, n_cores=count_cores())
    allocation = mpi_command.allocation_variables(spec, mpi, environ)
    job, marked = mpi_command.new_job({"TF_CPP_MIN_LOG_LEVEL": "3", **allocation, **environ})
    marked |= {"CUDA_VISIBLE_DEVICES": "-1", **mpi_command.thread_variables(spec, environ)}
    try:
        done = mpi_command.run_within(timeout_s, mpi_command.build_command(spec, mpi), marked)
    finally:
        mpi_command.end_processes(job)
    if done is None:
        return Check("self test", "missing", f"2 ranks: no end in {timeout_s:.0f} s", remedy)
    if done.returncode != 0:
        text = f"exit code {done.returncode}\n{(done.stderr + done.stdout)[-2000:].strip()}"
        return Check("self test", "missing", f"2 ranks: {text}", remedy)
    return Check("self test", "ok", "2 ranks: allreduce is right")


def examine(environ: Mapping[str, str], timeout_s: float = 120.0) -> list[Check]:
    """Check everything that several ranks need; the machine is ready if no check is "missing".

    The self test is skipped if another check is "missing". Checks that start processes take
    `timeout_s` each at most.
    """
    mpi = mpi_command.find_mpi()
    checks = [
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}"),
        check_version("tensorflow", compiler.installed_tensorflow()),
        check_keras(environ),
        check_mpi(mpi),
        check_library(mpi),
        check_cache(),
        Check("horovod", "info", _installed("horovod") or _NO_HOROVOD),
        check_threads(environ),
        check_shared_memory(),
    ]
    if (slurm := check_slurm(mpi)) is not None:
        checks.append(slurm)
    if checks[1].status != "missing":
        checks.append(check_gpus(timeout_s))
    if mpi is not None and all(check.status != "missing" for check in checks):
        checks.append(self_test(mpi, environ, timeout_s))
    return checks
