"""Horovod's names for Keras: `import tfscale.keras as hvd`.

Examples:
    >>> import tfscale.keras as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    >>> round(float(optimizer.learning_rate), 3)
    0.01
"""
# ruff: noqa: F401 (all names are exported)

from tfscale import callbacks
from tfscale.callbacks.synchronize import broadcast_global_variables
from tfscale.comm.collectives import allgather, allreduce, broadcast, reducescatter
from tfscale.comm.compression import Compression
from tfscale.comm.runtime import (
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
)
from tfscale.comm.software import (
    cuda_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from tfscale.missing import lookup
from tfscale.optimizer.distributed import DistributedOptimizer, PartialDistributedOptimizer
from tfscale.optimizer.saving import load_model
from tfscale.start import init, shutdown
from tfscale.trace.timeline import start_timeline, stop_timeline

elastic = lookup("elastic")

__all__ = [  # noqa: PLE0604
    *("init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "elastic"),
    *("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    *("ProcessSet", "global_process_set", "add_process_set", "remove_process_set"),
    *("allgather", "allreduce", "broadcast", "reducescatter", "broadcast_global_variables"),
    *("Average", "Sum", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer"),
    *("mpi_built", "mpi_enabled", "mpi_threads_supported", "gloo_built", "gloo_enabled"),
    *("cuda_built", "nccl_built", "rocm_built", "callbacks", "load_model"),
]
