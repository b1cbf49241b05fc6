"""Join and leave the job: start a backend, share a host's cores and GPUs among its ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfscale import config
from tfscale.comm import objects, process, runtime
from tfscale.comm.backends.base import Backend, SingleBackend
from tfscale.comm.backends.engine import EngineBackend, load
from tfscale.comm.backends.horovod import HorovodBackend, is_installed, load_horovod
from tfscale.comm.process import Launch, deadline_of_start, discover, end_job_on_error
from tfscale.comm.software import versions, warn_of_untested
from tfscale.comm.warnings import watch_first_fit
from tfscale.config import ConfigError, ExchangeError
from tfscale.native import mpi_files
from tfscale.native.cores import count_cores, share_of_cores
from tfscale.trace import timeline

logger = logging.getLogger("tfscale")


def init(
    comm: Any = None,
    process_sets: Sequence[Any] | str | None = None,
    backend: str = "auto",
    *,
    independent: bool = False,
) -> None:
    """Join the job. Collective: all ranks must call this, before any other call.

    A process that no launcher started is a job of its own: no MPI, no thread. Calling init
    again does nothing.

    Args:
        comm: The ranks of the job: None for all processes, an mpi4py communicator, or a list of
            ranks of MPI's world. Only these ranks may call `init`; the others must start MPI too,
            for example by importing mpi4py's MPI, as it starts on all processes together.
        process_sets: `ProcessSet` objects or lists of ranks to add. Sets may always be added
            later, too: Horovod's "dynamic" is accepted.
        backend: "auto", "engine" (MPI), "horovod" (Gloo, NCCL or MPI) or "single"; "auto" reads
            TFSCALE_BACKEND, then chooses: see `tfscale.start.choose_backend`.
        independent: Whether ranks train models of their own, such as one trial each, with plain
            Keras optimizers: no warning then.

    Raises:
        ConfigError: An argument or environment variable does not fit.
        ExchangeError: MPI or the native library cannot be used.

    Examples:
        >>> tfscale.init()
        >>> print(f"rank {tfscale.rank()} of {tfscale.size()}")  # started without `tfscale run`
        rank 0 of 1
    """
    if runtime.is_initialized():
        return
    settings, added = config.settings(), _check_process_sets(process_sets)
    name = settings.backend if backend == "auto" else backend
    launch = discover(config.environment())
    if name not in config.BACKENDS:
        raise ConfigError(
            f"backend must be one of {', '.join(config.BACKENDS)}. Received: {backend!r}."
        )
    is_parallel = comm is not None or (launch is not None and launch.size > 1)
    machine = look_around() if name == "auto" and is_parallel else Machine()
    chosen = choose_backend(name, launch, is_parallel, machine)
    if chosen == "single":
        runtime.enter(SingleBackend())
        end_job_on_error(None)
    else:
        runtime.enter(start(chosen, settings, comm))
        watch_first_fit(independent)
        end_job_on_error(_abort, runtime.backend().fail)
        if comm is None:
            require_size(launch, runtime.size())
    if chosen == "horovod":  # the engine has compared them
        objects.require_equal(versions(), "Versions", "Install the same packages on every host.")
    is_alone = chosen == "single" and launch is not None and launch.size > 1
    process.write_state(process.ALONE if is_alone else process.JOINED)
    atexit.register(_leave_at_exit)
    if runtime.rank() == 0:
        show_log(settings.log_level)
        warn_of_untested(tf.__version__, keras.__version__)
    if settings.timeline and not runtime.is_single():
        timeline.start_automatic(settings.timeline)
    for process_set in added or ():
        _add(process_set, comm)


def show_log(level: str) -> None:
    """Show tfscale's log from a level on, on standard error; "" changes nothing.

    Where a program has configured Python's root logger, that one shows the lines.
    """
    if not level:
        return
    if logger.name not in {handler.name for handler in logger.handlers}:
        handler = logging.StreamHandler()
        handler.set_name(logger.name)
        handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        handler.addFilter(lambda record: not logging.getLogger().handlers)
        logger.addHandler(handler)
    logger.setLevel(level.upper())


def require_size(launch: Launch | None, size: int) -> None:
    """Raise ExchangeError unless the job has as many ranks as its launcher started processes."""
    if launch is not None and launch.size != size:
        raise ExchangeError(
            f"Could not join all processes of the launcher. Received: {launch.size} of them, and "
            f"a job of {size}: the launcher and the MPI library do not fit together. Start with "
            "`tfscale run` (under Slurm `tfscale run --slurm`, or srun --mpi=pmi2)."
        )


def _abort(code: int) -> None:
    if runtime.is_initialized():
        runtime.backend().abort(code)


def _check_process_sets(process_sets: Any) -> Sequence[Any] | None:
    """Return the sets to add. Horovod's "dynamic" means that sets are added later."""
    if not isinstance(process_sets, str):
        return process_sets
    if process_sets.lower() == "dynamic":
        return None
    raise ConfigError(
        "process_sets must be a list of ProcessSet objects or of lists of ranks, or 'dynamic' for "
        f"sets that come later. Received: {process_sets!r}."
    )


def _add(process_set: Any, comm: Any) -> None:
    """Add a set; for one of a communicator, the sets of all ranks' communicators."""
    if getattr(process_set, "mpi_comm", None) is None:
        runtime.add_process_set(process_set)
        return
    from mpi4py import MPI

    group = (comm if hasattr(comm, "py2f") else MPI.COMM_WORLD).Get_group()
    group = group.Incl(sorted(comm)) if isinstance(comm, list) else group
    members = process_set.mpi_comm.Get_group()
    process_set.register(sorted(members.Translate_ranks(range(members.size), group)), None)
    for ranks in dict.fromkeys(map(tuple, objects.allgather_object(process_set.ranks))):
        is_own = list(ranks) == process_set.ranks
        runtime.add_process_set(process_set if is_own else runtime.ProcessSet(ranks))


def _leave_at_exit() -> None:
    """Leave the job when the program ends; if that fails, end it as an uncaught error does."""
    backend = runtime.backend() if runtime.is_initialized() else None
    try:
        shutdown()
    except ExchangeError as error:
        if backend is not None:
            runtime.enter(backend)  # the hook ends the job through it
        sys.excepthook(type(error), error, error.__traceback__)


def shutdown() -> None:
    """Leave the job; waits until all ranks do (engine). A second call does nothing.

    Horovod does not wait: later collectives of other ranks fail.

    Raises:
        ExchangeError: A rank does not leave, and shows no activity for TFSCALE_STALL_SHUTDOWN_S
            seconds.

    Examples:
        >>> tfscale.init()
        >>> tfscale.shutdown()
        >>> tfscale.is_initialized()
        False
    """
    if not runtime.is_initialized() or runtime.is_forked():
        return
    folder = timeline.write_part()
    backend = runtime.backend()
    runtime.leave()
    process.write_state(process.LEAVING)
    if backend.close():
        error = sys.exc_info()[1]  # `finally: tfscale.shutdown()`
        is_raising = error is not None and not isinstance(error, SystemExit)
        process.write_state(process.RAISED if is_raising else process.FINISHED)
    else:
        process.write_state(process.LEFT)
    if folder is not None and backend.rank == 0:
        timeline.merge_at_end(folder, backend.size)  # Closing waited for all ranks.


@dataclass(frozen=True)
class Machine:
    """GPUs and libraries, on which the choice of a backend depends."""

    n_gpus: int = 0  # that TensorFlow sees
    has_horovod: bool = False
    has_nccl: bool = False  # of that Horovod; asked only where there are GPUs


def choose_backend(name: str, launch: Launch | None, is_parallel: bool, machine: Machine) -> str:
    """Return the backend of this process: `name` unless it is "auto".

    "auto" chooses "single" without other processes (`is_parallel` is False), "horovod" under
    `horovodrun --gloo`, which has no MPI, or where the ranks of a host have GPUs of their own that
    NCCL can connect, and "engine" otherwise.
    """
    if name != "auto":
        return name
    if not is_parallel:
        return "single"
    if launch is not None and launch.launcher == "gloo":
        if not machine.has_horovod:
            raise ConfigError(
                "`horovodrun --gloo` needs Horovod. Received: a Python without it. Run `python "
                "tools/build_horovod.py` in tfscale's sources, or start with `tfscale run`."
            )
        return "horovod"
    n_local = launch.local_size if launch is not None else None
    # NCCL refuses ranks that share a GPU.
    has_gpu_each = n_local is not None and machine.n_gpus >= max(2, n_local)
    return "horovod" if has_gpu_each and machine.has_nccl else "engine"


def own_gpu(local_rank: int, local_size: int, n_gpus: int) -> int | None:
    """Return the number of a rank's GPU among those that its process sees.

    None without a choice: a rank alone on its host keeps all GPUs, and a process may see one GPU
    (some launchers show each rank only its own) or none.
    """
    return local_rank % n_gpus if local_size > 1 and n_gpus > 1 else None


def look_around() -> Machine:
    """Return the GPUs and libraries of this machine."""
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
    """Start the "engine" or "horovod". Collective: every rank of `comm`, on the main thread."""
    comm = _checked(comm)
    backend: Backend
    if name == "engine":
        load()  # may take minutes at the first use: compiling is no wait for other ranks
    if comm is None:  # all ranks of the launcher must come here
        process.write_state(process.STARTING)
    with deadline_of_start(settings, "tfscale.init()"):
        if name == "horovod":
            backend = HorovodBackend(settings, comm)
            unbound = len(os.sched_getaffinity(0)) // backend.local_size
            n_cores = share_of_cores(unbound, backend.local_size)
        else:
            _require_shared_memory(discover(config.environment()))
            backend = EngineBackend(settings, _fortran_handle(comm))
            n_cores = backend.n_cores
            # All ranks have opened the files: removed now, none is left if the job is killed.
            mpi_files.remove(mpi_files.used_by([os.getpid()]))
    # TensorFlow's own numbers are those of the affinity, without regard to a quota.
    if settings.set_threads and (
        backend.local_size > 1 or count_cores() < len(os.sched_getaffinity(0))
    ):
        _limit_threads(n_cores)
    _take_own_gpu(backend)
    if tf.config.threading.get_inter_op_parallelism_threads() == 1:
        logger.warning(
            "One inter-op thread keeps communication from overlapping with computation. "
            "Set TF_NUM_INTEROP_THREADS to 2 or more."
        )
    return backend


def _require_shared_memory(launch: Launch | None) -> None:
    """Refuse to start MPICH where the ranks of a host would die of SIGBUS in /dev/shm."""
    if launch is None or launch.launcher != "mpich" or (launch.local_size or 1) < 2:
        return
    # The first rank checks the space for all; the others only their own, as part of it is taken.
    n_ranks = launch.local_size if launch.local_rank == 0 else 1
    needed, free = (n_ranks or 1) * mpi_files.BYTES_PER_RANK, mpi_files.free_bytes()
    if free < needed:
        raise ConfigError(
            f"{launch.local_size} ranks on a host need {launch.local_size} times "
            f"{mpi_files.BYTES_PER_RANK / 1e6:.1f} MB in {mpi_files.SHARED_MEMORY}. Received: "
            f"{free / 1e6:.1f} MB free. `tfscale doctor` lists what jobs that were killed have "
            "left there; give a container more (docker run --shm-size=1g, in Kubernetes an "
            "emptyDir of medium Memory at /dev/shm)."
        )
    # UCX can use System V's memory instead, which is no file. In /dev/shm it takes four times as
    # much as MPICH itself, and where 16 MB are free its ranks die of SIGSEGV.
    config.set_default_environment(UCX_TLS="^posix")


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
            f"comm must hold the rank that calls init. Received: comm={ranks} on rank "
            f"{launch.rank}."
        )
    return ranks


def _fortran_handle(comm: Any) -> int:
    if comm is None:
        return -1
    if isinstance(comm, list):
        # Load the library's MPI first: mpi4py uses an MPI that is loaded, and finds none by itself
        # in an environment that has MPI's libraries elsewhere.
        load()
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(comm))
    return comm.py2f()


def _limit_threads(n_cores: int) -> None:
    """Have TensorFlow use this rank's share of the cores, unless the user chose."""
    threads, environment = tf.config.threading, config.environment()
    try:
        if not (
            threads.get_intra_op_parallelism_threads() or "TF_NUM_INTRAOP_THREADS" in environment
        ):
            threads.set_intra_op_parallelism_threads(max(1, n_cores))
        if not (
            threads.get_inter_op_parallelism_threads() or "TF_NUM_INTEROP_THREADS" in environment
        ):
            threads.set_inter_op_parallelism_threads(max(2, n_cores))
    except RuntimeError:
        logger.info("TensorFlow runs already: its thread numbers stay. Call tfscale.init() first.")
