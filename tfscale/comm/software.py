"""The software of a rank: versions, which must be equal, and libraries that carry messages."""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras
import tensorflow as tf

import tfscale
from tfscale.comm import runtime
from tfscale.comm.backends.horovod import is_installed, load_horovod
from tfscale.config import ExchangeError
from tfscale.native import mpi_library
from tfscale.native.cache import built_for, find_library
from tfscale.native.compiler import ENGINE, ceiling, find_toolchain, is_untested, tested

logger = logging.getLogger("tfscale")


def versions() -> str:
    """Return the versions that must be equal on all ranks, as one line."""
    return f"tfscale {tfscale.__version__}, tensorflow {tf.__version__}, keras {keras.__version__}"


@functools.cache  # once for each pair
def warn_of_untested(tensorflow: str, of_keras: str) -> None:
    """Warn if the versions of TensorFlow or Keras are newer than those that were tested."""
    if not (is_untested("tensorflow", tensorflow) or is_untested("keras", of_keras)):
        return
    logger.warning(
        "tfscale was tested with TensorFlow %s and Keras %s. Received: TensorFlow %s and Keras %s. "
        "If something fails: pip install 'tensorflow%s' 'keras%s'.",
        *(tested("tensorflow"), tested("keras"), tensorflow, of_keras),
        *(ceiling("tensorflow"), ceiling("keras")),
    )


_MPI_THREAD_MULTIPLE = 3  # MPICH and Open MPI agree on this number


def _ask_horovod(question: str) -> Any:
    """Return Horovod's own answer; False where it is not installed or does not load."""
    if not is_installed():
        return False
    try:
        return getattr(load_horovod(), question)()
    except ExchangeError:
        return False


def _is_carried_by(library: str) -> bool:
    return runtime.is_initialized() and library in runtime.backend().libraries


def mpi_built() -> bool:
    """Return whether the native library, which needs MPI, is built or can be, at its first use.

    Examples:
        >>> tfscale.mpi_built()
        True
    """
    try:
        soname = mpi_library.find(built_for=built_for()).soname
        return bool(find_library(ENGINE, soname) or find_toolchain())
    except (ExchangeError, OSError):
        return False


def mpi_enabled() -> bool:
    """Return whether this job communicates over MPI.

    Examples:
        >>> tfscale.init()  # started without `tfscale run`: one rank needs no MPI
        >>> tfscale.mpi_enabled()
        False
    """
    return _is_carried_by("mpi")


def mpi_threads_supported() -> bool:
    """Return whether Python may call MPI (mpi4py) while the communication thread does.

    Raises:
        ExchangeError: tfscale is not initialised.

    Examples:
        >>> tfscale.init()
        >>> tfscale.mpi_threads_supported()  # one rank has no communication thread
        False
    """
    return runtime.backend().thread_level >= _MPI_THREAD_MULTIPLE


def gloo_built() -> bool:
    """Return whether there is a Horovod with Gloo.

    Examples:
        >>> tfscale.gloo_built()  # Horovod is not installed
        False
    """
    return bool(_ask_horovod("gloo_built"))


def gloo_enabled() -> bool:
    """Return whether this job's ranks find each other over Gloo, through Horovod.

    Examples:
        >>> tfscale.init()
        >>> tfscale.gloo_enabled()  # one rank sends nothing
        False
    """
    return _is_carried_by("gloo")


def nccl_built() -> int:
    """Return the version of the NCCL that Horovod is built with; 0 without.

    Examples:
        >>> tfscale.nccl_built()  # Horovod is not installed
        0
    """
    return int(_ask_horovod("nccl_built"))


def cuda_built() -> bool:
    """True if Horovod is installed with CUDA. tfscale's engine stages GPU tensors on the host.

    Examples:
        >>> tfscale.cuda_built()  # Horovod is not installed
        False
    """
    return bool(_ask_horovod("cuda_built"))


def rocm_built() -> bool:
    """True if Horovod is installed with ROCm. tfscale's engine stages GPU tensors on the host.

    Examples:
        >>> tfscale.rocm_built()  # Horovod is not installed
        False
    """
    return bool(_ask_horovod("rocm_built"))


def ccl_built() -> bool:
    """Return False: oneCCL is not used.

    Examples:
        >>> tfscale.ccl_built()
        False
    """
    return False


def ddl_built() -> bool:
    """Return False: DDL is not used.

    Examples:
        >>> tfscale.ddl_built()
        False
    """
    return False
