"""Every name that a user of Horovod's Keras interface expects is there."""

from __future__ import annotations

import inspect

import keras
import pytest

import tfscale
import tfscale.keras as hvd
from tfscale.config import ConfigError

KERAS_NAMES = [
    "init",
    "shutdown",
    "is_initialized",
    "size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "mpi_enabled",
    "mpi_built",
    "mpi_threads_supported",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "cuda_built",
    "rocm_built",
    "ProcessSet",
    "global_process_set",
    "add_process_set",
    "remove_process_set",
    "Average",
    "Sum",
    "Compression",
    "callbacks",
    "elastic",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "broadcast_global_variables",
    "allreduce",
    "allgather",
    "broadcast",
    "reducescatter",
    "load_model",
    "start_timeline",
    "stop_timeline",
]
MORE_NAMES = [
    "alltoall",
    "grouped_allreduce",
    "grouped_allgather",
    "grouped_reducescatter",
    "broadcast_variables",
    "broadcast_object",
    "allgather_object",
    "join",
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "Min",
    "Max",
    "Product",
    "barrier",
    "prepare",
    "callbacks",
    "data",
    "Allreduce",
    "exit_codes",
    "start_timeline",
    "stop_timeline",
    "mpi_built",
    "gloo_built",
    "nccl_built",
    "ConfigError",
    "PlanError",
    "ExchangeError",
]
CALLBACKS = [
    "AdaptiveBatchSize",
    "BatchSizeSchedule",
    "LearningRateScaling",
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "BestModelCheckpoint",
    "CommunicationReport",
    "ConsistencyCheck",
    "RankZero",
    "ModelCheckpoint",
]


@pytest.mark.parametrize("name", KERAS_NAMES)
def test_names_for_keras(name):
    assert hasattr(hvd, name) and name in hvd.__all__


@pytest.mark.parametrize("name", MORE_NAMES)
def test_names_of_the_package(name):
    assert hasattr(tfscale, name) and name in tfscale.__all__


def test_no_other_names_and_no_dead_ones():
    assert sorted(hvd.__all__) == sorted(set(KERAS_NAMES))
    for module in (tfscale, hvd, tfscale.callbacks, tfscale.data):
        assert all(hasattr(module, name) for name in module.__all__)
        assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name):
    found = getattr(hvd.callbacks, name)
    assert found is getattr(tfscale.callbacks, name)
    assert issubclass(found, keras.callbacks.Callback)


def test_shared_names_are_the_same_objects():
    for name in set(KERAS_NAMES) & set(tfscale.__all__):
        assert getattr(hvd, name) is getattr(tfscale, name), name


def parameters(function):
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
    }


def test_arguments_of_the_optimizer():
    given = parameters(hvd.DistributedOptimizer.__init__)
    given.pop("self")
    assert list(given)[:14] == [
        "optimizer",
        "name",
        "device_dense",
        "device_sparse",
        "compression",
        "sparse_as_dense",
        "gradient_predivide_factor",
        "op",
        "backward_passes_per_step",
        "average_aggregated_gradients",
        "num_groups",
        "groups",
        "process_set",
        "scale_local_gradients",
    ]
    assert given["op"] == hvd.Average and given["process_set"] is hvd.global_process_set
    assert given["backward_passes_per_step"] == 1 and given["num_groups"] == 0
    assert given["gradient_predivide_factor"] == 1.0 and given["scale_local_gradients"] is True
    assert given["compression"] is hvd.Compression.none


def test_arguments_of_other_calls():
    assert list(parameters(hvd.init))[:2] == ["comm", "process_sets"]
    assert list(parameters(hvd.broadcast))[:2] == ["tensor", "root_rank"]
    assert list(parameters(tfscale.alltoall))[:2] == ["tensor", "splits"]
    assert list(parameters(hvd.load_model))[:5] == [
        "filepath",
        "custom_optimizers",
        "custom_objects",
        "compression",
        "legacy_opts",
    ]
    broadcast = parameters(hvd.callbacks.BroadcastGlobalVariablesCallback.__init__)
    assert list(broadcast)[1:4] == ["root_rank", "device", "local_variables"]
    schedule = parameters(hvd.callbacks.LearningRateScheduleCallback.__init__)
    assert list(schedule)[1:8] == [
        "initial_lr",
        "multiplier",
        "start_epoch",
        "end_epoch",
        "staircase",
        "momentum_correction",
        "steps_per_epoch",
    ]
    warmup = parameters(hvd.callbacks.LearningRateWarmupCallback.__init__)
    assert list(warmup)[1:6] == [
        "initial_lr",
        "warmup_epochs",
        "momentum_correction",
        "steps_per_epoch",
        "verbose",
    ]
    assert warmup["warmup_epochs"] == 5 and warmup["verbose"] == 0


def test_arguments_of_the_tape_and_others():
    assert list(parameters(tfscale.broadcast_variables)) == [
        "variables",
        "root_rank",
        "process_set",
        "inplace",
    ]
    assert parameters(tfscale.SyncBatchNormalization.__init__)["fused"] is False
    tape = tfscale.DistributedGradientTape
    assert list(parameters(tape.register_local_source)) == ["self", "source"]
    assert list(parameters(tape.get_local_and_global_gradients)) == [
        "self",
        "target",
        "sources",
        "output_gradients",
        "use_generic_names",
    ]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback
    assert list(parameters(callback.register_local_var)) == ["self", "var"]


def test_softwarermation(monkeypatch):
    from tfscale.comm import software

    assert isinstance(hvd.gloo_built(), bool)  # Horovod's, where that is installed
    monkeypatch.setattr(software, "is_installed", lambda: False)
    for name in ("gloo_enabled", "gloo_built", "cuda_built", "rocm_built"):
        assert getattr(hvd, name)() is False
    assert hvd.nccl_built() == 0
    assert isinstance(hvd.mpi_built(), bool) and isinstance(hvd.mpi_enabled(), bool)


@pytest.mark.parametrize("name", ["run", "KerasState", "CommitStateCallback"])
def test_elastic_names_our_restart(name):
    with pytest.raises(ConfigError) as error:
        getattr(hvd.elastic, name)
    assert f"Received: elastic.{name}." in str(error.value)
    assert "callbacks.Checkpoint" in str(error.value) and "--restarts" in str(error.value)
