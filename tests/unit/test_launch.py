"""Rank discovery, choice of a backend and a GPU, and the command lines of each MPI."""

import itertools
import json

import pytest

from tfscale.comm.places import parse_places, require_hosts, spread
from tfscale.comm.process import Launch, discover, slurm_variables
from tfscale.config import ConfigError, ExchangeError
from tfscale.launcher.mpi_command import (
    LaunchSpec,
    Mpi,
    allocation_variables,
    build_command,
    parse_version,
    quote,
    variables_of,
)
from tfscale.start import Machine, choose_backend, own_gpu, require_size

MPICH = Mpi("mpich", "5.0.2", "/mpi/mpiexec")
INTEL = Mpi("intel", "2021.14", "/mpi/mpiexec")
OPENMPI = Mpi("openmpi", "5.0.11", "/mpi/mpiexec")
TRAIN = ("python", "train.py", "--epochs", "3")


def line(mpi, size=4, command=TRAIN, **fields):
    return " ".join(build_command(LaunchSpec(command, size, **fields), mpi))


MPICH_FILE = "# two hosts\na:2\n\nb\n"
OPENMPI_VARIABLES = (
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0"
    " OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_RANK=2"
)
SLURM = "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7"
HOSTS = "SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=2(x3),1"
HOROVOD = "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("PMI_RANK=1", None),
        ("PMI_RANK=0 PMI_SIZE=1", Launch(0, 1, None, None, "mpich")),
        ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", Launch(3, 4, 1, 2, "mpich")),
        ("PMI_RANK=3 PMI_SIZE=4 I_MPI_HYDRA_TOPOLIB=hwloc", Launch(3, 4, None, None, "intel")),
        (OPENMPI_VARIABLES, Launch(2, 3, 0, 1, "openmpi")),
        (f"{SLURM} {HOSTS}", Launch(5, 7, 1, 2, "srun")),
        # The batch script itself runs outside any step.
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", None),
        # Inside an allocation, mpiexec's word is the one that counts.
        (f"PMI_RANK=1 PMI_SIZE=2 {SLURM}", Launch(1, 2, None, None, "mpich")),
        # Horovod's own variables for jobs of MPI do not make it a job of Gloo.
        (HOROVOD, None),
        (f"HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1 {HOROVOD}", Launch(3, 4, 1, 2, "gloo")),
    ],
)
def test_discover(variables, expected):
    assert discover(dict(word.split("=") for word in variables.split())) == expected


def test_mpich_line():
    assert line(MPICH) == f"/mpi/mpiexec -n 4 {' '.join(TRAIN)}"
    text = line(MPICH, hosts=(("a", 2), ("b", 2)), is_prefixed=True, environment={"K": "V"})
    assert text == f"/mpi/mpiexec -prepend-rank -hosts a:2,b:2 -n 4 {' '.join(TRAIN)}"
    assert "-f hosts.txt -bind-to core" in line(MPICH, hostfile="hosts.txt", bind_to="core")


def test_openmpi_line():
    text = line(OPENMPI, command=("x",))
    assert text == "/mpi/mpiexec --oversubscribe --bind-to none -np 4 x"
    text = line(OPENMPI, is_root=True, is_prefixed=True, environment={"K": "V"})
    assert "--allow-run-as-root --oversubscribe --tag-output --bind-to none -x K -np 4" in text
    text = line(OPENMPI, hosts=(("a", 1), ("b", 3)), bind_to="socket")
    assert "--bind-to socket -H a:1,b:3 -np 4" in text
    assert "--oversubscribe" not in text


def test_intel_line():
    assert line(INTEL, is_prefixed=True, command=("x",)) == "/mpi/mpiexec -prepend-rank -n 4 x"
    text = line(INTEL, hosts=(("a", 3), ("b", 1)), environment={"K": "V"}, command=("x",))
    assert text == "/mpi/mpiexec -host a -n 3 x : -host b -n 1 x"


def test_variables_are_handed_over_in_the_environment():
    """Every user of a host may read the arguments of all processes."""
    given = {"KEY": "secret"}
    for mpi in (MPICH, INTEL, OPENMPI):
        spec = LaunchSpec(TRAIN, 4, environment=given)
        assert "secret" not in " ".join(build_command(spec, mpi))
        assert variables_of(spec, mpi) == given
    assert "secret" not in line(MPICH, is_slurm=True, environment=given)
    pins = {"none": {"I_MPI_PIN": "0"}, "core": {"I_MPI_PIN_DOMAIN": "core"}}
    for bind_to, expected in pins.items():
        assert variables_of(LaunchSpec(TRAIN, 4, bind_to=bind_to), INTEL) == expected
        assert variables_of(LaunchSpec(TRAIN, 4, bind_to=bind_to), MPICH) == {}


def test_a_word_that_mpiexec_would_take_is_quoted():
    assert quote(TRAIN) == ("--", *TRAIN)
    option, text = quote(("python", "t.py", "--map", "a", ":", "ü"))
    assert option == "--words" and json.loads(text)[-2:] == [":", "ü"]


def test_srun_line():
    srun = "srun --kill-on-bad-exit=1 --export=ALL"
    assert line(None, is_slurm=True, command=("x",)) == f"{srun} --ntasks=4 --input=none x"
    assert "--input=0 python" in line(MPICH, is_slurm=True, has_stdin=True)
    text = line(MPICH, is_slurm=True, is_prefixed=True, bind_to="cores", environment={"K": "a,b"})
    assert text.startswith(f"{srun} --mpi=pmi2 --ntasks=4 --label") and "--cpu-bind=cores" in text
    assert "--mpi=pmix" in line(OPENMPI, is_slurm=True)
    text = line(MPICH, is_slurm=True, hosts=(("a", 2), ("b", 2)), cpus_per_task="16")
    assert "--cpus-per-task=16 --nodelist=a,b --nodes=2 --ntasks-per-node=2 --input=none" in text
    text = line(MPICH, is_slurm=True, hosts=(("a", 3), ("b", 1)))
    assert "--nodelist=a,b --nodes=2 --input=none python" in text


def test_an_allocation_does_not_choose_how_ranks_start():
    stale = {"SLURM_JOB_ID": "1", "SLURM_NODELIST": "gone[1-2]"}
    spec, by_srun = LaunchSpec(TRAIN, 4), LaunchSpec(TRAIN, 4, is_slurm=True)
    own = {"HYDRA_LAUNCHER": "ssh", "HYDRA_RMK": "user"}
    assert allocation_variables(spec, MPICH, stale) == own
    assert allocation_variables(spec, MPICH, {}) == {}
    assert allocation_variables(spec, MPICH, {**stale, "HYDRA_LAUNCHER": "slurm"}) == {
        "HYDRA_RMK": "user"
    }
    assert set(allocation_variables(spec, OPENMPI, stale).values()) == {"^slurm"}
    assert allocation_variables(spec, INTEL, stale) == {"I_MPI_HYDRA_BOOTSTRAP": "ssh"}
    assert allocation_variables(by_srun, MPICH, stale) == {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    for mpi in (OPENMPI, INTEL, None):
        assert allocation_variables(by_srun, mpi, stale) == {}


def test_what_ranks_of_srun_need():
    step = {"PMI_JOBID": "7.0", "SLURM_STEP_NUM_NODES": "2"}
    assert slurm_variables(step) == {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    for other in ({"SLURM_STEP_NUM_NODES": "1"}, {"MPI_LOCALRANKID": "0"}):
        assert slurm_variables({**step, **other}) == {}
    assert slurm_variables({"SLURM_STEP_NUM_NODES": "2"}) == {}


def test_impossible_launches_are_refused():
    for mpi, fields, text in (
        (None, {}, "no mpiexec"),
        (MPICH, {"size": 0}, "-np 0"),
        (MPICH, {"command": ()}, "command a program"),
    ):
        with pytest.raises(ConfigError, match=text):
            line(mpi, **fields)


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("a:2,b:2", 4, {"a": 2, "b": 2}),
        ("a:2,b:2", 3, {"a": 2, "b": 1}),
        ("a:2,b:2", 2, {"a": 2}),
        ("a,b", 2, {"a": 1, "b": 1}),
        ("a\na\nb\nb", 3, {"a": 2, "b": 1}),  # as PBS writes it
        ("a:2,b,a slots=3,b", 7, {"a": 5, "b": 2}),
        ("a slots=2\nb  slots = 1 # the small one\n", 3, {"a": 2, "b": 1}),
        (MPICH_FILE, 3, {"a": 2, "b": 1}),
    ],
)
def test_hosts_are_read_and_filled(text, size, expected):
    assert spread(parse_places(text), size) == tuple(expected.items())


def test_hosts_that_cannot_be():
    for text, size in (("a:2,b", 4), ("a:x", 1), ("a:0", 1), ("a slots=2 max_slots=4", 2)):
        with pytest.raises(ConfigError, match="1 too few" if size == 4 else f"Received: {text}"):
            spread(parse_places(text), size)
    assert parse_places("") == ()
    assert require_hosts(MPICH_FILE, "-H") == MPICH_FILE
    for nothing in ("", " , ", "# none yet\n\n"):
        with pytest.raises(ConfigError, match=r"Received: --hostfile f without a name.*leave"):
            require_hosts(nothing, "--hostfile f")


def test_parse_version():
    hydra = "HYDRA build details:\n    Version:                5.0.2\n"
    intel = "Intel(R) MPI Library for Linux* OS, Version 2021.14 Build\n"
    assert parse_version(hydra) == ("mpich", "5.0.2")
    assert parse_version(intel) == ("intel", "2021.14")
    assert parse_version("mpiexec (OpenRTE) 4.1.4\n\nReport bugs") == ("openmpi", "4.1.4")
    assert parse_version("mpiexec (Open MPI) 5.0.11\n") == ("openmpi", "5.0.11")
    assert parse_version("mpirun by hand") is None


def test_processes_that_do_not_find_each_other_are_refused():
    launch = discover({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(ExchangeError, match=r"4 of them, and a job of 1"):
        require_size(launch, 1)
    require_size(launch, 4)
    require_size(None, 1)


# Backends and GPUs: pure functions, so the choices for GPUs are tested without one.

MPI = Launch(0, 4, 0, 4, "mpich")
GLOO = Launch(0, 4, 0, 4, "gloo")
WITH_HOROVOD = Machine(has_horovod=True)
NCCL = Machine(n_gpus=4, has_horovod=True, has_nccl=True)


@pytest.mark.parametrize(
    ("launch", "is_parallel", "machine", "expected"),
    [
        (None, False, Machine(), "single"),
        (None, False, NCCL, "single"),
        (MPI, True, Machine(), "engine"),
        (MPI, True, WITH_HOROVOD, "engine"),
        (MPI, True, Machine(n_gpus=4, has_horovod=True), "engine"),
        (MPI, True, Machine(n_gpus=1, has_horovod=True, has_nccl=True), "engine"),
        (MPI, True, NCCL, "horovod"),
        (Launch(0, 8, 0, 8, "mpich"), True, NCCL, "engine"),  # two ranks would share a GPU
        (Launch(0, 4, 0, None, "mpich"), True, NCCL, "engine"),
        (GLOO, True, WITH_HOROVOD, "horovod"),
        (None, True, Machine(), "engine"),  # an mpi4py communicator was given
    ],
)
def test_auto(launch, is_parallel, machine, expected):
    assert choose_backend("auto", launch, is_parallel, machine) == expected


def test_a_named_backend_is_taken_and_gloo_needs_horovod():
    names = ("engine", "horovod", "single")
    for name, launch, machine in itertools.product(names, (None, MPI, GLOO), (Machine(), NCCL)):
        assert choose_backend(name, launch, launch is not None, machine) == name
    with pytest.raises(ConfigError, match="build_horovod"):
        choose_backend("auto", GLOO, True, Machine())


def test_each_rank_of_a_host_has_a_gpu_of_its_own():
    assert [own_gpu(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert [own_gpu(rank, 2, 8) for rank in range(2)] == [0, 1]
    assert [own_gpu(rank, 4, 2) for rank in range(4)] == [0, 1, 0, 1]
    assert own_gpu(0, 1, 8) is None  # alone: all of them
    assert own_gpu(1, 4, 1) is None  # the launcher shows each rank its own
    assert own_gpu(1, 4, 0) is None
