"""Rank discovery and the command lines of each MPI."""

import json

import pytest

from tfscale.comm.process import Launch, discover
from tfscale.comm.start import require_size
from tfscale.config import ConfigError, ExchangeError
from tfscale.launcher.mpi_command import (
    LaunchSpec,
    Mpi,
    build_command,
    parse_places,
    parse_version,
    quote,
    require_hosts,
    spread,
    variables_of,
)

MPICH = Mpi("mpich", "5.0.2", "/mpi/mpiexec")
INTEL = Mpi("intel", "2021.14", "/mpi/mpiexec")
OPENMPI = Mpi("openmpi", "5.0.11", "/mpi/mpiexec")
TRAIN = ("python", "train.py", "--epochs", "3")


def line(mpi, size=4, command=TRAIN, **fields):
    return " ".join(build_command(LaunchSpec(command, size, **fields), mpi))


OPENMPI_VARIABLES = (
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=0"
    " OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_RANK=2"
)
SLURM_VARIABLES = (
    "SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=1 SLURM_NODEID=2"
    " SLURM_STEP_TASKS_PER_NODE=2(x3),1"
)
GLOO_VARIABLES = (
    "HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1 HOROVOD_RANK=3 HOROVOD_SIZE=4"
    " HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2"
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("PMI_RANK=1", None),
        ("PMI_RANK=0 PMI_SIZE=1", Launch(0, 1, None, None, "mpich")),
        ("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", Launch(3, 4, 1, 2, "mpich")),
        ("PMI_RANK=3 PMI_SIZE=4 I_MPI_HYDRA_TOPOLIB=hwloc", Launch(3, 4, None, None, "intel")),
        (OPENMPI_VARIABLES, Launch(2, 3, 0, 1, "openmpi")),
        (SLURM_VARIABLES, Launch(5, 7, 1, 2, "srun")),
        # The batch script itself runs outside any step.
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", None),
        # Inside an allocation, mpiexec's word is the one that counts.
        (
            "PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1",
            Launch(1, 2, None, None, "mpich"),
        ),
        (GLOO_VARIABLES, Launch(3, 4, 1, 2, "gloo")),
        # Horovod's own variables for jobs of MPI do not make it a job of Gloo.
        ("HOROVOD_RANK=3 HOROVOD_SIZE=4", None),
    ],
)
def test_discover(variables, expected):
    assert discover(dict(word.split("=") for word in variables.split())) == expected


def test_mpich_line():
    assert line(MPICH) == "/mpi/mpiexec -n 4 python train.py --epochs 3"
    assert (
        line(MPICH, hosts=(("a", 2), ("b", 2)), is_prefixed=True, environment={"K": "V"})
        == "/mpi/mpiexec -prepend-rank -hosts a:2,b:2 -n 4 python train.py --epochs 3"
    )
    assert "-f hosts.txt -bind-to core" in line(MPICH, hostfile="hosts.txt", bind_to="core")


def test_openmpi_line():
    assert line(OPENMPI, n_cores=4) == (
        "/mpi/mpiexec --oversubscribe --bind-to none -np 4 python train.py --epochs 3"
    )
    assert line(OPENMPI, n_cores=2, is_root=True, is_prefixed=True, environment={"K": "V"}) == (
        "/mpi/mpiexec --allow-run-as-root --oversubscribe --tag-output --bind-to none "
        "-x K -np 4 python train.py --epochs 3"
    )
    text = line(OPENMPI, hosts=(("a", 1), ("b", 3)), bind_to="socket")
    assert "--bind-to socket -H a:1,b:3 -np 4" in text
    assert "--oversubscribe" not in text


def test_intel_line():
    assert line(INTEL, is_prefixed=True) == (
        "/mpi/mpiexec -prepend-rank -n 4 python train.py --epochs 3"
    )
    assert line(INTEL, hosts=(("a", 3), ("b", 1)), environment={"K": "V"}, command=("x",)) == (
        "/mpi/mpiexec -host a -n 3 x : -host b -n 1 x"
    )


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
    assert line(None, is_slurm=True) == (
        "srun --kill-on-bad-exit=1 --export=ALL --ntasks=4 python train.py --epochs 3"
    )
    text = line(MPICH, is_slurm=True, is_prefixed=True, bind_to="cores", environment={"K": "a,b"})
    assert text.startswith("srun --kill-on-bad-exit=1 --export=ALL --mpi=pmi2 --ntasks=4 --label")
    assert "--cpu-bind=cores" in text
    assert "--mpi=pmix" in line(OPENMPI, is_slurm=True)
    text = line(MPICH, is_slurm=True, hosts=(("a", 2), ("b", 2)), cpus_per_task="16")
    assert "--cpus-per-task=16 --nodelist=a,b --nodes=2 --ntasks-per-node=2" in text
    text = line(MPICH, is_slurm=True, hosts=(("a", 3), ("b", 1)))
    assert "--nodelist=a,b --nodes=2 python" in text


def test_impossible_launches_are_refused():
    with pytest.raises(ConfigError, match=r"Received: no mpiexec.*pip install"):
        line(None)
    with pytest.raises(ConfigError, match="Received: -np 0"):
        line(MPICH, size=0)
    with pytest.raises(ConfigError, match="at least one rank"):
        line(MPICH, command=())


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("a:2,b:2", 4, (("a", 2), ("b", 2))),
        ("a:2,b:2", 3, (("a", 2), ("b", 1))),
        ("a:2,b:2", 2, (("a", 2),)),
        ("a,b", 2, (("a", 1), ("b", 1))),
        ("a,a,b,b", 3, (("a", 2), ("b", 1))),
        ("a\na\nb\n", 3, (("a", 2), ("b", 1))),  # as PBS writes it
        ("a:2,b,a slots=3,b", 7, (("a", 5), ("b", 2))),
        ("a:2,b", 4, "1 too few"),
        ("a:x", 1, "Received: a:x"),
        ("a:0", 1, "Received: a:0"),
    ],
)
def test_hosts_are_read_and_filled(text, size, expected):
    if isinstance(expected, tuple):
        assert spread(parse_places(text), size) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            spread(parse_places(text), size)


def test_host_files():
    mpich = "# two hosts\na:2\n\nb\n"
    openmpi = "a slots=2\nb  slots = 1 # the small one\n"
    assert parse_places(mpich) == parse_places(openmpi) == (("a", 2), ("b", 1))
    assert parse_places("") == ()
    assert require_hosts(mpich, "-H") == mpich
    for nothing in ("", " , ", "# none yet\n\n"):
        with pytest.raises(ConfigError, match=r"Received: --hostfile f without a name.*leave"):
            require_hosts(nothing, "--hostfile f")
    with pytest.raises(ConfigError, match="Received: a slots=2 max_slots=4"):
        parse_places("a slots=2 max_slots=4")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HYDRA build details:\n    Version:                5.0.2\n", ("mpich", "5.0.2")),
        ("mpiexec (OpenRTE) 4.1.4\n\nReport bugs", ("openmpi", "4.1.4")),
        ("mpiexec (Open MPI) 5.0.11\n", ("openmpi", "5.0.11")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.14 Build\n", ("intel", "2021.14")),
        ("mpirun by hand", None),
    ],
)
def test_parse_version(text, expected):
    assert parse_version(text) == expected


def test_processes_that_do_not_find_each_other_are_refused():
    launch = discover({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"})
    with pytest.raises(ExchangeError, match=r"4 of them, and a job of 1"):
        require_size(launch, 1)
    require_size(launch, 4)
    require_size(None, 1)
