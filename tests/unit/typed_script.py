"""A user's script with types: mypy --strict must pass it, and find the mistakes marked in it.

Uses every name of docs/names.md. Nothing runs it: see test_packaging.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from typing_extensions import assert_type

import tfscale
import tfscale.keras as hvd
from tfscale import DistributedOptimizer
from tfscale.callbacks import RankZero
from tfscale.checkpoints import Found, list_checkpoints
from tfscale.data import GlobalBatches
from tfscale.testing import inspect, require_ok, spawn

Array = npt.NDArray[np.float32]


class BestLoss(tfscale.callbacks.Callback):
    """A callback of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("inf")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.best = min(self.best, float((logs or {}).get("loss", self.best)))


def load(n: int) -> tuple[Array, Array]:
    x = np.random.default_rng(0).normal(size=(n, 20)).astype(np.float32)
    return x, x.sum(axis=1)


def join_the_job() -> bool:
    tfscale.init(process_sets=[[0], [1]], backend="auto")
    tfscale.init(None, "dynamic", independent=True)
    assert_type(tfscale.rank(), int)
    assert_type(tfscale.size(), int)
    assert_type(tfscale.is_homogeneous(), bool)
    numbers = [tfscale.local_rank(), tfscale.local_size(), tfscale.cross_rank()]
    numbers += [tfscale.cross_size(), tfscale.exit_codes.PREEMPTED]
    tfscale.rank_op(name="rank"), tfscale.size_op(0), tfscale.local_rank_op()
    tfscale.local_size_op(), tfscale.process_set_included_op(0)
    return tfscale.is_initialized() and min(numbers) >= 0


def describe_the_build() -> dict[str, bool | int]:
    assert_type(tfscale.nccl_built(), int)
    return {
        "mpi": tfscale.mpi_built() and tfscale.mpi_enabled() and tfscale.mpi_threads_supported(),
        "gloo": tfscale.gloo_built() and tfscale.gloo_enabled(),
        "nccl": tfscale.nccl_built(),
        "gpus": tfscale.cuda_built() or tfscale.rocm_built(),
        "others": tfscale.ccl_built() or tfscale.ddl_built(),
    }


def reduce_and_gather(x: Array, variables: Sequence[Any]) -> list[Any]:
    evens = tfscale.add_process_set([0, 2])
    assert_type(evens, tfscale.ProcessSet)
    assert_type(evens.included(), bool)
    assert_type(tfscale.Average, str)
    found = [tfscale.allreduce(x, op=op) for op in (tfscale.Sum, tfscale.Min, tfscale.Max)]
    found.append(tfscale.allreduce(x, tfscale.Product, process_set=evens, name="product"))
    found += tfscale.grouped_allreduce([x, x], compression=tfscale.Compression.bf16)
    found.append(tfscale.allgather(x, process_set=tfscale.global_process_set))
    found += tfscale.grouped_allgather([x])
    found.append(tfscale.alltoall(x, splits=[1, 1]))
    found.append(tfscale.broadcast(x, root_rank=0))
    found.append(tfscale.reducescatter(x, op=tfscale.Sum))
    found += tfscale.grouped_reducescatter([x])
    found += tfscale.broadcast_(variables, 0)
    tfscale.broadcast_variables(variables, root_rank=0)
    assert_type(tfscale.allgather_object({"rank": tfscale.rank()}), list[Any])
    seed: int = tfscale.broadcast_object(1, root_rank=0, name="seed")
    assert_type(tfscale.join(), int)
    assert_type(tfscale.remove_process_set(evens), bool)
    tfscale.barrier()
    return [*found, seed]


def exchanges() -> list[Any]:
    intervals = (
        tfscale.AdaptiveInterval(initial=64),
        tfscale.DistanceGuard(limit=0.1),
        tfscale.GrowingInterval(initial=8, maximum=32),
        tfscale.QuadraticInterval(alpha=0.2, minimum=4),
    )
    local = [tfscale.LocalSGD(groups=2, interval=rule) for rule in (8, *intervals)]
    within = tfscale.LocalSGD("host", within=tfscale.Allreduce(), overlap="auto", fragments=2)
    chunked = tfscale.Chunked(first_chunk_layers="auto", replicated_dense=2)
    plain = tfscale.Allreduce(bucket_mb=4.0)
    return [*local, within, chunked, plain, tfscale.Sharded(dense="auto"), tfscale.Auto(), "auto"]


def build(exchange: Any = "allreduce") -> keras.Model:
    table = tfscale.layers.ShardedEmbedding(8, 4)
    table.set_rows(table.get_rows())
    layers = [keras.Input((20,)), keras.layers.Dense(8), tfscale.SyncBatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    compression = tfscale.Compression.int8(start_step=100)
    inner = keras.optimizers.SGD(tfscale.ScalableSchedule(rate))
    optimizer = DistributedOptimizer(inner, exchange=exchange, compression=compression)
    assert_type(optimizer, tfscale.DistributedOptimizer)
    assert_type(optimizer.memory_report(), dict[str, int])
    optimizer.learning_rate = 0.1  # one of the wrapped optimizer's attributes
    model.compile(optimizer, loss="mse")
    return tfscale.prepare(model)


def callbacks_of(data: GlobalBatches, folder: Path) -> list[keras.callbacks.Callback]:
    room = tfscale.callbacks
    assert_type(BestLoss().is_void, bool)
    return [
        BestLoss(),
        room.AdaptiveBatchSize(data, 1024, interval=(2, 4), active_ranks="grow", log_path=None),
        room.BackupAndRestore(folder / "backup"),
        room.BatchSizeSchedule({0: 64, 30: 512}),
        room.BatchSizeSchedule(tf.data.Dataset.range(8).batch(2), {1: 4}, sharded=True),
        room.BestModelCheckpoint(monitor="loss", filepath="best.keras"),
        room.BroadcastGlobalVariablesCallback(0),
        room.Checkpoint(folder, every_n_steps=100, keep=2),
        room.CommunicationReport(folder),
        room.LearningRateScaling(0.1, 128, data.batch_size, decay_epochs=(30, 60)),
        room.LearningRateScheduleCallback(0.1, lambda epoch: 0.1**epoch),
        room.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=5),
        room.MetricAverageCallback(),
        room.ModelCheckpoint("model.keras"),
        room.ModelDistance(folder),
        room.ParameterAveraging(weights=tfscale.DistanceWeights(lam=0.5)),
        room.ParameterAveraging("end", when=tfscale.Divergence(threshold=0.1)),
        room.RankZero(keras.callbacks.TensorBoard(str(folder))),
        room.Synchronize(),
        room.ThetaMonitor(folder),
    ]


def train(folder: Path) -> float:
    x, y = load(256)
    data = tfscale.data.GlobalBatches(x, y, batch_size=64, seed=1)
    assert_type(data, GlobalBatches)
    assert_type(data.batch_size, int)
    records = tf.data.Dataset.from_tensor_slices((x, y))

    def decode(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x * 2.0, y

    valid = GlobalBatches.from_dataset(records, batch_size=64, shuffle_buffer=0, decode=decode)
    assert_type(valid, GlobalBatches)
    model = build(tfscale.Sharded())
    model.fit(data, validation_data=valid, callbacks=callbacks_of(data, folder))
    tfscale.broadcast_global_variables(0, model)
    again = tfscale.load_model("model.keras", compression=tfscale.Compression.fp16)
    checkpoints = tfscale.checkpoints.list_checkpoints(folder)
    assert_type(checkpoints, list[Found])
    if not checkpoints and not list_checkpoints(str(folder)):
        tfscale.preemption.request_save_and_stop()
    return float(again.evaluate(valid))


def train_by_hand(model: keras.Model, x: Array, y: Array) -> None:
    optimizer = tfscale.PartialDistributedOptimizer(
        tfscale.LARS(0.1), local_layers=model.layers[-1]
    )
    assert_type(optimizer, DistributedOptimizer)
    with tf.GradientTape() as plain:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    tape = tfscale.DistributedGradientTape(plain, op=tfscale.Average)
    partial = tfscale.PartialDistributedGradientTape(plain, local_layers=[model.layers[-1]])
    assert_type(partial, tfscale.DistributedGradientTape)
    for each in (tape, partial):
        gradients = each.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    has_cut: bool = tfscale.after_step(optimizer, x)
    tfscale.LARS(learning_rate=0.1 if has_cut else 0.2)


def record(body: Callable[[], None]) -> None:
    tfscale.start_timeline("timeline.json", mark_cycles=True)
    try:
        body()
    except (tfscale.ConfigError, tfscale.PlanError, tfscale.RankError):
        raise
    except tfscale.ExchangeError as error:
        sys.exit(str(error))
    finally:
        tfscale.stop_timeline()
        tfscale.shutdown()


def distribute() -> None:
    running = tfscale.distribute(exchange="auto", batch_norm="local", seed=1, verify="first")
    running.undo()


def as_horovod() -> DistributedOptimizer:
    hvd.init()
    assert_type(tfscale.keras.rank(), int)
    hvd.callbacks.MetricAverageCallback(device="")
    return hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()), op=hvd.Sum)


def case_sum() -> float:
    return float(tfscale.allreduce(1.0, op=tfscale.Sum))


def test_on_ranks(folder: Path) -> None:
    assert_type(tfscale.run(case_sum, np=2), list[Any])
    results = tfscale.testing.spawn(2, [case_sum], timeout_s=60.0)
    assert_type(results, list[tfscale.testing.RankResult])
    tfscale.testing.require_ok(results)
    require_ok(spawn(2, ["cases:case_sum"]))
    done = tfscale.testing.run_command([sys.executable, "train.py"], 60.0, size=2, folder=folder)
    assert_type(done, tfscale.testing.Finished)
    fakes = tfscale.testing.FakeRanks(2).run(lambda rank: tfscale.rank() == rank)
    with tfscale.testing.pretend_rank(1, 4):
        assert_type(tfscale.testing.inspect.take_collectives(), list[inspect.Collective])
    tfscale.testing.require_identical(fakes, [True, True], "fakes")
    tfscale.testing.require_close([1.0], [1.0], atol=0.1)
    tfscale.testing.require_equal_ranks([tf.Variable(0.0)])


def find_mistakes(x: Array) -> None:
    """Each line has one that a checker must find: an ignored error that does not occur is one."""
    tfscale.rnak()  # type: ignore[attr-defined]
    tfscale.allreduce(x, tfscale.Adasum)  # type: ignore[attr-defined]
    tfscale.data.Batches(x)  # type: ignore[attr-defined]
    hvd.Adasum(x)  # type: ignore[attr-defined]
    tfscale.broadcast(x)  # type: ignore[call-arg]
    tfscale.allreduce(x, op=0)  # type: ignore[arg-type]
    tfscale.allgather(x, axis=1)  # type: ignore[call-arg]
    tfscale.LocalSGD(groups="rack")  # type: ignore[arg-type]
    tfscale.callbacks.Syncronize()  # type: ignore[attr-defined]
    tfscale.data.GlobalBatches(x)  # type: ignore[call-arg]
    RankZero()  # type: ignore[call-arg]


def name_what_horovod_has() -> None:
    tfscale.elastic.run(case_sum)
