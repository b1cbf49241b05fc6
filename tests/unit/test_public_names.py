"""Every name that a user of Horovod's Keras interface expects is there."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import tfscale
import tfscale.keras as hvd
from tfscale.config import ConfigError

KERAS_NAMES = """
    init shutdown is_initialized size local_size cross_size rank local_rank cross_rank
    mpi_enabled mpi_built mpi_threads_supported gloo_enabled gloo_built nccl_built cuda_built
    rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum
    Compression callbacks elastic DistributedOptimizer PartialDistributedOptimizer
    broadcast_global_variables allreduce allgather broadcast reducescatter load_model
    start_timeline stop_timeline
    """
MORE_NAMES = """
    alltoall grouped_allreduce grouped_allgather grouped_reducescatter broadcast_variables
    broadcast_object allgather_object join DistributedGradientTape PartialDistributedGradientTape
    SyncBatchNormalization Min Max Product barrier prepare callbacks data Allreduce exit_codes
    start_timeline stop_timeline mpi_built gloo_built nccl_built ConfigError PlanError
    ExchangeError RankError run broadcast_ is_homogeneous elastic
    """
CALLBACKS = """
    AdaptiveBatchSize BatchSizeSchedule LearningRateScaling BroadcastGlobalVariablesCallback
    MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback
    BestModelCheckpoint CommunicationReport RankZero ModelCheckpoint
    """


def test_names():
    assert set(hvd.__all__) == set(KERAS_NAMES.split())
    assert set(tfscale.__all__) >= set(MORE_NAMES.split())
    for module in (tfscale, hvd, tfscale.callbacks, tfscale.data):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []
        assert len(set(module.__all__)) == len(module.__all__)
    for name in set(KERAS_NAMES.split()) & set(tfscale.__all__):
        assert getattr(hvd, name) is getattr(tfscale, name), name
    for name in CALLBACKS.split():
        found = getattr(hvd.callbacks, name)
        assert found is getattr(tfscale.callbacks, name)
        assert issubclass(found, keras.callbacks.Callback)


def test_the_stub_has_the_names_of_the_package():
    """Type checkers read it instead of the tables, from which names are imported when used."""
    stub = ast.parse(Path(tfscale.__file__).with_suffix(".pyi").read_text())
    found = {
        alias.asname: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    modules = {n: f"tfscale.{module}" for n, module in tfscale._MODULE_OF.items()}
    for name, place in tfscale._SUBMODULES.items():
        modules[name] = f"tfscale.{place}".rpartition(".")[0]
    modules |= dict.fromkeys(tfscale._OPTIONAL, "tfscale")
    assert found == modules
    own = {ast.unparse(getattr(n, "target", None) or n.targets[0]) for n in stub.body[-3:-1]}
    assert {*found, *own} == {*tfscale.__all__, *tfscale._OPTIONAL, "__version__"}


# The first arguments of each call, in their order, as far as users of Horovod pass them.
CALLS = {
    hvd.DistributedOptimizer.__init__: "self optimizer name device_dense device_sparse compression"
    " sparse_as_dense gradient_predivide_factor op backward_passes_per_step"
    " average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    hvd.init: "comm process_sets",
    tfscale.run: "func args kwargs np hosts",
    hvd.broadcast: "tensor root_rank",
    tfscale.alltoall: "tensor splits",
    tfscale.broadcast_variables: "variables root_rank process_set inplace",
    hvd.load_model: "filepath custom_optimizers custom_objects compression legacy_opts",
    hvd.callbacks.BroadcastGlobalVariablesCallback.__init__: "self root_rank device"
    " local_variables",
    hvd.callbacks.BroadcastGlobalVariablesCallback.register_local_var: "self var",
    hvd.callbacks.LearningRateScheduleCallback.__init__: "self initial_lr multiplier start_epoch"
    " end_epoch staircase momentum_correction steps_per_epoch",
    hvd.callbacks.LearningRateWarmupCallback.__init__: "self initial_lr warmup_epochs"
    " momentum_correction steps_per_epoch verbose",
    tfscale.DistributedGradientTape.register_local_source: "self source",
    tfscale.DistributedGradientTape.get_local_and_global_gradients: "self target sources"
    " output_gradients use_generic_names",
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_arguments(call):
    names = CALLS[call].split()
    assert list(inspect.signature(call).parameters)[: len(names)] == names


def defaults(function):
    return {n: p.default for n, p in inspect.signature(function).parameters.items()}


def test_defaults():
    given = defaults(hvd.DistributedOptimizer.__init__)
    assert given["op"] == hvd.Average and given["process_set"] is hvd.global_process_set
    assert given["backward_passes_per_step"] == 1 and given["num_groups"] == 0
    assert given["gradient_predivide_factor"] == 1.0 and given["scale_local_gradients"] is True
    assert given["compression"] is hvd.Compression.none
    warmup = defaults(hvd.callbacks.LearningRateWarmupCallback.__init__)
    assert warmup["warmup_epochs"] == 5 and warmup["verbose"] == 0
    assert defaults(tfscale.SyncBatchNormalization.__init__)["fused"] is False


def test_software(monkeypatch):
    assert isinstance(hvd.gloo_built(), bool)  # Horovod's, where that is installed
    monkeypatch.setattr("tfscale.comm.software.is_installed", lambda: False)
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


# Uses of names of Horovod, and what the error must hold besides the name.
MISSING = {
    "tfscale.runner.launch": ("Received: runner.launch.", "tfscale run -np 4"),
    "tfscale.spark.run": ("Received: spark.run.", "-H host1:2"),
    "tfscale.Adasum": ("Received: Adasum.", "tfscale.Average"),
    "tfscale.broadcast_object_fn": ("TensorFlow 1", "tfscale.broadcast_object."),
    "tfscale.data.TfDataServiceConfig": ("data.TfDataServiceConfig", "GlobalBatches"),
    "tfscale.data.compute_service.TfDataServiceConfig": ("TfDataServiceConfig", "GlobalBatches"),
    "from tfscale import Adasum": ("Received: Adasum.", "tfscale.Average"),
    "from tfscale.data import tf_data_service": ("data.tf_data_service", "GlobalBatches"),
    "import tfscale.elastic": ("Received: import tfscale.elastic.", "--restarts"),
    "import tfscale.spark": ("Received: import tfscale.spark.", "-H host1:2"),
    "import tfscale.data.compute_service": ("import tfscale.data.compute_service", "GlobalBatches"),
}


@pytest.mark.parametrize("use", MISSING)
def test_names_that_are_missing_name_what_to_use(use):
    with pytest.raises((ConfigError, ModuleNotFoundError)) as error:
        exec(use, {"tfscale": tfscale})
    for text in MISSING[use]:
        assert text in str(error.value)
    assert isinstance(error.value, ImportError) == ("Received: import" in str(error.value))


@pytest.mark.parametrize("use", ["tfscale.ray.run", "from tfscale.ray import RayExecutor"])
def test_ray_says_what_to_install_where_it_is_missing(use, monkeypatch):
    for name in [name for name in sys.modules if re.match(r"(tfscale\.)?ray\b", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="Received: no module ray.*pip install ray"):
        exec(use, {"tfscale": tfscale})


def test_other_names_are_no_attributes():
    assert not hasattr(tfscale, "no_such_name") and not hasattr(tfscale.data, "no_such_name")


@pytest.mark.parametrize(
    "name, unneeded",
    [
        ("DistributedGradientTape", "launcher data fit callbacks optimizer.distributed"),
        ("DistributedOptimizer", "launcher data fit callbacks exchange.auto"),
    ],
)
def test_a_name_imports_what_it_needs(name, unneeded):
    """No planner, tuner or data for a tape."""
    text = f"import sys, tfscale; tfscale.{name}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    loaded = {module for module in run.stdout.split() if module.startswith("tfscale.")}
    assert "tfscale.exchange.executor" in loaded
    assert not [m for m in loaded if m.startswith(tuple(f"tfscale.{r}" for r in unneeded.split()))]
