"""tfscale: train one Keras model on many processes, communicating little and hiding the rest.

Names are imported when they are first used, so that `tfscale run` and `tfscale doctor` start
without TensorFlow. No module may have the name of a function here.
"""

from __future__ import annotations

import importlib
from typing import Any

from tfscale.end_of_job import watch_from_import

__version__ = "0.1.0"

_SUBMODULES = (
    "callbacks",
    "checkpoints",
    "data",
    "elastic",
    "exit_codes",
    "keras",
    "optimizers",
    "preemption",
)
_NAMES_BY_MODULE = {
    "build_info": (
        "cuda_built",
        "gloo_built",
        "gloo_enabled",
        "mpi_built",
        "mpi_enabled",
        "mpi_threads_supported",
        "nccl_built",
        "rocm_built",
    ),
    "callbacks.broadcast": ("broadcast_global_variables",),
    "callbacks.parameter_averaging": ("DistanceWeights", "Divergence"),
    "collectives": ("allreduce", "barrier", "broadcast", "grouped_allreduce"),
    "eager": ("join",),
    "errors": ("ConfigError", "ExchangeError", "PlanError"),
    "exchange.allreduce": ("Allreduce",),
    "exchange.auto": ("Auto",),
    "exchange.chunked": ("Chunked",),
    "exchange.compression": ("Compression",),
    "exchange.local_sgd": ("AdaptiveInterval", "LocalSGD"),
    "exchange.sharded": ("Sharded",),
    "fit.preparation": ("prepare",),
    "gathers": (
        "allgather",
        "alltoall",
        "grouped_allgather",
    ),
    "objects": ("allgather_object", "broadcast_object", "broadcast_variables"),
    "optimizer": ("DistributedOptimizer",),
    "partial": ("PartialDistributedGradientTape", "PartialDistributedOptimizer"),
    "process_sets": ("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"),
    "reduce_ops": ("Average", "Max", "Min", "Product", "Sum"),
    "runtime": (
        "cross_rank",
        "cross_size",
        "init",
        "is_initialized",
        "local_rank",
        "local_size",
        "rank",
        "shutdown",
        "size",
    ),
    "saving": ("load_model",),
    "scalable_schedule": ("ScalableSchedule",),
    "scatters": ("grouped_reducescatter", "reducescatter"),
    "sync_batch_norm": ("SyncBatchNormalization",),
    "tape": ("DistributedGradientTape",),
    "trace.timeline": ("start_timeline", "stop_timeline"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [*_MODULE_OF, *_SUBMODULES]  # noqa: PLE0604

watch_from_import()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tfscale.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tfscale' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tfscale.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
