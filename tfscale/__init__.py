"""tfscale: train one Keras model on many processes, overlapping communication with computation.

Names are imported when they are first used, so that `tfscale run` and `tfscale doctor` start
without TensorFlow. A module of the package must not have the name of one of these functions:
importing the module would replace the function.
"""

from __future__ import annotations

import importlib
from typing import Any

from tfscale import missing
from tfscale.comm.process import watch_from_import

__version__ = "0.1.0"

_SUBMODULES = {
    "callbacks": "callbacks",
    "checkpoints": "checkpoints",
    "data": "data",
    "keras": "keras",
    "layers": "layers",
    "preemption": "checkpoints.preemption",
    "testing": "testing",
}
# Not among `__all__`: it needs Ray, which may be missing.
_OPTIONAL = ("ray",)
_NAMES_BY_MODULE = {
    "callbacks.parameter_averaging": ("DistanceWeights", "Divergence"),
    "callbacks.synchronize": ("broadcast_global_variables",),
    "comm.software": (
        *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built"),
        *("mpi_enabled", "mpi_threads_supported", "nccl_built", "rocm_built"),
    ),
    "comm.collectives": (
        *("allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allgather"),
        *("grouped_allreduce", "grouped_reducescatter", "reducescatter"),
    ),
    "comm.compression": ("Compression",),
    "comm.eager": ("join",),
    "comm.objects": (
        *("allgather_object", "broadcast_", "broadcast_object", "broadcast_variables"),
        "is_homogeneous",
    ),
    "comm.runtime": (
        *("Average", "Max", "Min", "ProcessSet", "Product", "Sum", "add_process_set", "cross_rank"),
        *("cross_size", "global_process_set", "is_initialized", "local_rank", "local_rank_op"),
        *("local_size", "local_size_op", "process_set_included_op", "rank", "rank_op"),
        *("remove_process_set", "size", "size_op"),
    ),
    "start": ("init", "shutdown"),
    "trace.timeline": ("start_timeline", "stop_timeline"),
    "config": ("ConfigError", "ExchangeError", "PlanError", "RankError", "exit_codes"),
    "exchange.allreduce": ("Allreduce",),
    "exchange.auto": ("Auto",),
    "exchange.chunked": ("Chunked",),
    "launcher.from_python": ("run",),
    "local_sgd.intervals": (
        "AdaptiveInterval",
        "DistanceGuard",
        "GrowingInterval",
        "QuadraticInterval",
    ),
    "local_sgd.strategy": ("LocalSGD",),
    "exchange.sharded": ("Sharded",),
    "exchange.sync_batch_norm": ("SyncBatchNormalization",),
    "fit.preparation": ("prepare",),
    "measure.auto": ("after_step",),
    "transparent.distribute": ("distribute",),
    "optimizer.distributed": ("DistributedOptimizer", "PartialDistributedOptimizer"),
    "optimizer.lars": ("LARS",),
    "optimizer.saving": ("load_model",),
    "optimizer.scalable_schedule": ("ScalableSchedule",),
    "optimizer.tape": ("DistributedGradientTape", "PartialDistributedGradientTape"),
}
_MODULE_OF = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [*_MODULE_OF, *_SUBMODULES, "elastic"]  # noqa: PLE0604

missing.explain_imports()
watch_from_import()


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"tfscale.{_SUBMODULES[name]}")
    if name in _OPTIONAL:
        return importlib.import_module(f"tfscale.{name}")
    if name not in _MODULE_OF:
        return missing.lookup(name)
    value = getattr(importlib.import_module(f"tfscale.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
