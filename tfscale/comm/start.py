"""Starting a backend, and sharing the cores and GPUs of a host among its ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale import config
from tfscale.comm.backends.base import Backend
from tfscale.comm.process import Machine, deadline_of_start, discover, own_gpu
from tfscale.config import ConfigError, ExchangeError

logger = logging.getLogger("tfscale")


def look_around() -> Machine:
    """Return what the choice of a backend depends on."""
    from tfscale.comm.backends.horovod import is_installed, load_horovod

    n_gpus = len(tf.config.list_physical_devices("GPU"))
    has_horovod = is_installed()
    has_nccl = False
    if n_gpus > 1 and has_horovod:  # loading Horovod takes time, and matters on GPUs only
        try:
            has_nccl = bool(load_horovod().nccl_built())
        except ExchangeError as error:
            logger.warning("Horovod is left out. %s", error)
    return Machine(n_gpus, has_horovod, has_nccl)


def start(name: str, settings: config.Settings, comm: Any) -> Backend:
    """Start a backend. Collective: every rank of `comm`, on the main thread.

    Args:
        name: "engine" or "horovod".
        settings: Options.
        comm: None for all processes, an mpi4py communicator, or a list of the world's ranks.

    Returns:
        The backend.

    Raises:
        ConfigError: `comm` does not fit.
        ExchangeError: MPI, Horovod or the native library cannot be used.
    """
    # Imported here: a single process must not need the native libraries.
    backend: Backend
    with deadline_of_start(settings.stall_warning_s, settings.stall_shutdown_s):
        if name == "horovod":
            from tfscale.comm.backends.horovod import HorovodBackend

            backend = HorovodBackend(settings, _checked(comm))
            n_cores = len(os.sched_getaffinity(0)) // backend.local_size  # taken to be unbound
        else:
            from tfscale.comm.backends.engine import EngineBackend

            backend = EngineBackend(settings, _fortran_handle(_checked(comm)))
            n_cores = backend.n_cores
    if settings.set_threads and backend.local_size > 1:
        _limit_threads(n_cores)
    _take_own_gpu(backend)
    if tf.config.threading.get_inter_op_parallelism_threads() == 1:
        logger.warning(
            "One inter-op thread keeps communication from overlapping with computation. "
            "Set TF_NUM_INTEROP_THREADS to 2 or more."
        )
    return backend


def _take_own_gpu(backend: Backend) -> None:
    """Show this rank one GPU of its host, unless the user chose. Not tested on GPUs."""
    gpus = tf.config.list_physical_devices("GPU")
    chosen = own_gpu(backend.local_rank, backend.local_size, len(gpus))
    if chosen is None or tf.config.get_visible_devices("GPU") != gpus:
        return
    try:
        tf.config.set_visible_devices(gpus[chosen], "GPU")
    except RuntimeError:
        logger.info("TensorFlow runs already: its GPUs stay. Call tfscale.init() first.")


def _checked(comm: Any) -> Any:
    """Return None, a communicator, or ascending ranks of which this is one."""
    if comm is None or hasattr(comm, "py2f"):
        return comm
    if not isinstance(comm, Sequence) or isinstance(comm, str):
        raise ConfigError(
            "comm must be None, an mpi4py communicator or a list of ranks. "
            f"Received: {type(comm).__name__}."
        )
    ranks = sorted(int(r) for r in comm)
    launch = discover(config.environment())
    if launch is not None and launch.rank not in ranks:
        raise ConfigError(
            "Only the ranks named in comm may call init. Received: "
            f"comm={ranks} on rank {launch.rank}."
        )
    return ranks


def _fortran_handle(comm: Any) -> int:
    if comm is None:
        return -1
    if isinstance(comm, list):
        # The library brings the MPI that it is linked with: mpi4py takes what is loaded, and finds
        # none by itself in an environment that has MPI's libraries elsewhere.
        from tfscale.comm.backends.library import load

        load()
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(comm))
    return comm.py2f()


def _limit_threads(n_cores: int) -> None:
    """Have TensorFlow use this rank's share of the cores, unless the user chose."""
    threading = tf.config.threading
    environ = config.environment()
    try:
        if not threading.get_intra_op_parallelism_threads() and (
            "TF_NUM_INTRAOP_THREADS" not in environ
        ):
            threading.set_intra_op_parallelism_threads(max(1, n_cores))
        if not threading.get_inter_op_parallelism_threads() and (
            "TF_NUM_INTEROP_THREADS" not in environ
        ):
            threading.set_inter_op_parallelism_threads(max(2, n_cores))
    except RuntimeError:
        logger.info("TensorFlow runs already: its thread numbers stay. Call tfscale.init() first.")
