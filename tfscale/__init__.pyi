"""The public names for type checkers and editors, which cannot follow `__getattr__`."""
# ruff: noqa: I001 (a list per module)

from tfscale import (
    callbacks as callbacks,
    checkpoints as checkpoints,
    data as data,
    keras as keras,
    layers as layers,
    missing,
    ray as ray,
    testing as testing,
)
from tfscale.callbacks.parameter_averaging import (
    DistanceWeights as DistanceWeights,
    Divergence as Divergence,
)
from tfscale.callbacks.synchronize import (
    broadcast_global_variables as broadcast_global_variables,
)
from tfscale.checkpoints import preemption as preemption
from tfscale.comm.collectives import (
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    barrier as barrier,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    reducescatter as reducescatter,
)
from tfscale.comm.compression import Compression as Compression
from tfscale.comm.eager import join as join
from tfscale.comm.objects import (
    allgather_object as allgather_object,
    broadcast_ as broadcast_,
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
    is_homogeneous as is_homogeneous,
)
from tfscale.comm.runtime import (
    Average as Average,
    Max as Max,
    Min as Min,
    ProcessSet as ProcessSet,
    Product as Product,
    Sum as Sum,
    add_process_set as add_process_set,
    cross_rank as cross_rank,
    cross_size as cross_size,
    global_process_set as global_process_set,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_rank_op as local_rank_op,
    local_size as local_size,
    local_size_op as local_size_op,
    process_set_included_op as process_set_included_op,
    rank as rank,
    rank_op as rank_op,
    remove_process_set as remove_process_set,
    size as size,
    size_op as size_op,
)
from tfscale.comm.software import (
    ccl_built as ccl_built,
    cuda_built as cuda_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rocm_built as rocm_built,
)
from tfscale.start import init as init, shutdown as shutdown
from tfscale.trace.timeline import (
    start_timeline as start_timeline,
    stop_timeline as stop_timeline,
)
from tfscale.config import (
    ConfigError as ConfigError,
    ExchangeError as ExchangeError,
    PlanError as PlanError,
    RankError as RankError,
    exit_codes as exit_codes,
)
from tfscale.exchange.allreduce import Allreduce as Allreduce
from tfscale.exchange.auto import Auto as Auto
from tfscale.exchange.chunked import Chunked as Chunked
from tfscale.exchange.sharded import Sharded as Sharded
from tfscale.exchange.sync_batch_norm import SyncBatchNormalization as SyncBatchNormalization
from tfscale.fit.preparation import prepare as prepare
from tfscale.launcher.from_python import run as run
from tfscale.local_sgd.intervals import (
    AdaptiveInterval as AdaptiveInterval,
    DistanceGuard as DistanceGuard,
    GrowingInterval as GrowingInterval,
    QuadraticInterval as QuadraticInterval,
)
from tfscale.local_sgd.strategy import LocalSGD as LocalSGD
from tfscale.measure.auto import after_step as after_step
from tfscale.optimizer.distributed import (
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
)
from tfscale.optimizer.lars import LARS as LARS
from tfscale.optimizer.saving import load_model as load_model
from tfscale.optimizer.scalable_schedule import ScalableSchedule as ScalableSchedule
from tfscale.optimizer.tape import (
    DistributedGradientTape as DistributedGradientTape,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from tfscale.transparent.distribute import distribute as distribute

__version__: str
elastic: missing.Missing

def __dir__() -> list[str]: ...
