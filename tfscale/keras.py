"""Horovod's names for Keras: `import tfscale.keras as hvd`."""

from tfscale import callbacks, elastic
from tfscale.build_info import (
    cuda_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from tfscale.callbacks.broadcast import broadcast_global_variables
from tfscale.collectives import allreduce, broadcast
from tfscale.exchange.compression import Compression
from tfscale.gathers import allgather
from tfscale.optimizer import DistributedOptimizer
from tfscale.partial import PartialDistributedOptimizer
from tfscale.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from tfscale.reduce_ops import Average, Sum
from tfscale.runtime import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from tfscale.saving import load_model
from tfscale.scatters import reducescatter
from tfscale.trace.timeline import start_timeline, stop_timeline

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
