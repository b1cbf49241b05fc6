"""Horovod's names for Keras: `import tfscale.keras as hvd`.

Examples:
    >>> import tfscale.keras as hvd
    >>> hvd.init()
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    >>> round(float(optimizer.learning_rate), 3)
    0.01
"""

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

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
