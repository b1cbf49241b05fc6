"""Which backend, which GPU: pure functions, so the choices for GPUs are tested without one."""

import itertools

import pytest

from tfscale.comm.process import Launch
from tfscale.comm.start import Machine, choose_backend, own_gpu
from tfscale.config import ConfigError

MPI = Launch(0, 4, 0, 4, "mpich")
GLOO = Launch(0, 4, 0, 4, "gloo")
HOROVOD = Machine(has_horovod=True)
NCCL = Machine(n_gpus=4, has_horovod=True, has_nccl=True)


@pytest.mark.parametrize(
    ("launch", "is_parallel", "machine", "expected"),
    [
        (None, False, Machine(), "single"),
        (None, False, NCCL, "single"),
        (MPI, True, Machine(), "engine"),
        (MPI, True, HOROVOD, "engine"),
        (MPI, True, Machine(n_gpus=4, has_horovod=True), "engine"),
        (MPI, True, Machine(n_gpus=1, has_horovod=True, has_nccl=True), "engine"),
        (MPI, True, NCCL, "horovod"),
        (GLOO, True, HOROVOD, "horovod"),
        (None, True, Machine(), "engine"),  # an mpi4py communicator was given
    ],
)
def test_auto(launch, is_parallel, machine, expected):
    assert choose_backend("auto", launch, is_parallel, machine) == expected


@pytest.mark.parametrize("name", ["engine", "horovod", "single"])
def test_a_named_backend_is_taken(name):
    for launch, machine in itertools.product((None, MPI, GLOO), (Machine(), NCCL)):
        assert choose_backend(name, launch, launch is not None, machine) == name


def test_gloo_needs_horovod():
    with pytest.raises(ConfigError, match="build_horovod"):
        choose_backend("auto", GLOO, True, Machine())


def test_each_rank_of_a_host_has_a_gpu_of_its_own():
    assert [own_gpu(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [own_gpu(rank, 2, 8) for rank in range(2)] == [0, 1]
    assert [own_gpu(rank, 4, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert own_gpu(0, 1, 8) is None  # alone: all of them
    assert own_gpu(1, 4, 1) is None  # the launcher shows each rank its own
    assert own_gpu(1, 4, 0) is None
