"""The command line: commands of launchers, and what they refuse; `tfscale doctor`."""

import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tfscale.config import ConfigError
from tfscale.launcher import cli, doctor, mpi_command, restarting
from tfscale.launcher.attempt import Outcome
from tfscale.launcher.mpi_command import LaunchSpec, Mpi, loopback_variables, thread_variables
from tfscale.transparent import __main__ as transparent

FOUR = LaunchSpec(("x",), 4, n_cores=8)
SLURM = ["run", "-np", "2", "--slurm"]


SHARED = dict.fromkeys(["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"], "2")


@pytest.mark.parametrize(
    ("fields", "environ", "expected"),
    [
        ({}, {}, SHARED),
        ({"n_cores": 2}, {}, {**dict.fromkeys(SHARED, "1"), "TF_NUM_INTEROP_THREADS": "2"}),
        ({}, {"OMP_NUM_THREADS": "7", "TF_NUM_INTEROP_THREADS": "9"}, "TF_NUM_INTRAOP_THREADS"),
        ({}, {"TFSCALE_SET_THREADS": "0"}, {}),
        ({}, {"TFSCALE_SET_THREADS": ""}, SHARED),
        ({"size": 1}, {}, {}),
        # Ranks may be on hosts with other cores; mpiexec itself reads the lists of some schedulers.
        ({"hosts": (("a", 2), ("b", 2))}, {}, {}),
        ({"hostfile": "f"}, {}, {}),
        ({"is_slurm": True}, {}, {}),
        ({}, {"SLURM_JOB_NUM_NODES": "2"}, SHARED),
        ({}, {"SLURM_JOB_NUM_NODES": "2", "HYDRA_LAUNCHER": "slurm"}, {}),
        ({}, {"LSB_MCPU_HOSTS": "a 2 b 2"}, {}),
        ({}, {"LSB_MCPU_HOSTS": "a 2"}, SHARED),
        ({}, {"HYDRA_HOST_FILE": "a file that mpiexec reads"}, {}),
        *(({}, {name: "two hosts"}, {}) for name in ("PBS_NODEFILE", "PE_HOSTFILE")),
        *(({}, {name: "one host"}, SHARED) for name in ("PBS_NODEFILE", "PE_HOSTFILE")),
        *(({"hosts": ((h, 4),)}, {}, SHARED) for h in ("localhost", socket.gethostname())),
    ],
)
def test_threads_of_ranks(fields, environ, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one host").write_text("a")
    (tmp_path / "two hosts").write_text("a\na\nb\n")
    spec = LaunchSpec(("x",), **{"size": 4, "n_cores": 8, **fields})
    expected = {expected: SHARED[expected]} if isinstance(expected, str) else expected
    assert thread_variables(spec, environ) == expected
    with pytest.raises(ConfigError, match="Received: TFSCALE_SET_THREADS='two'"):
        thread_variables(FOUR, {"TFSCALE_SET_THREADS": "two"})


def test_transports_listen_on_the_loopback_interface_where_all_ranks_share_a_host():
    mpich = Mpi("mpich", "5.0.2", "/mpi/mpiexec")
    assert loopback_variables(FOUR, mpich, {})["UCX_NET_DEVICES"] == "lo"
    assert "UCX_NET_DEVICES" not in loopback_variables(FOUR, mpich, {"UCX_NET_DEVICES": "eth0"})
    two_hosts = LaunchSpec(("x",), 4, hosts=(("a", 2), ("b", 2)))
    assert loopback_variables(two_hosts, mpich, {}) == {}
    assert loopback_variables(FOUR, mpich, {"HYDRA_HOST_FILE": "a file that mpiexec reads"}) == {}
    assert loopback_variables(FOUR, Mpi("openmpi", "5.0", "/mpi/mpiexec"), {}) == {}


@pytest.mark.parametrize("launcher", [["--slurm"], []])
def test_run_prints_the_command_without_values_of_variables(launcher, capsys, monkeypatch):
    monkeypatch.setattr(cli.Job, "run", lambda self: 3)
    words = ["-np", "2", *launcher, "--env", "KEY=secret=1", "--env", "N=2", "python", "t.py"]
    assert cli.main(["run", "--verbose", *words]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tfscale: env ") and err.endswith(" -- python t.py\n")
    assert "secret" not in err and " KEY=... N=... TFSCALE_RESTART=0 " in err
    for options in (["--quiet"], ["--quiet", "--verbose"], []):
        assert cli.main(["run", *options, *words]) == 3
        assert capsys.readouterr().err == ""
    assert cli.main(["run", "--verbose", "--dry-run", *words]) == 0
    assert capsys.readouterr().out.strip() == err.removeprefix("tfscale: ").strip()


def test_the_command_of_slurm(capsys, monkeypatch):
    """Cores that a batch script asked for are asked of its srun, too."""
    words = [*SLURM, "--dry-run", "python", "t.py", "--np"]
    for cores in ("12", ""):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cores)
        assert cli.main(words) == 0
        line = capsys.readouterr().out
        assert " TFSCALE_BEAT=1 " in line and " TFSCALE_STOP_SIGNAL=SIGUSR1 " in line
        assert " srun " in line and "--ntasks=2" in line
        assert ("--cpus-per-task=12" in line) == bool(cores) == ("--cpus-per-task" in line)
        assert line.endswith(" -m tfscale.launcher.rank_process -- python t.py --np\n")


@pytest.mark.parametrize(
    ("options", "level", "is_quiet"),
    [
        ([], "1", True),
        (["--verbose"], None, False),
        (["--env", "TF_CPP_MIN_LOG_LEVEL=0"], "0", False),
        (["--env", "TF_CPP_MIN_LOG_LEVEL=2"], "2", True),
        (["--verbose", "--env", "TF_CPP_MIN_LOG_LEVEL=2"], "2", False),
    ],
)
def test_tensorflow_is_quiet_unless_the_user_wants_to_hear_it(
    options, level, is_quiet, monkeypatch
):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    started = []

    def run_attempt(command, environ, *_, is_quiet, **__):
        started.append((environ.get("TF_CPP_MIN_LOG_LEVEL"), is_quiet))
        return Outcome(0, is_orderly=True)

    monkeypatch.setattr(restarting, "run_attempt", run_attempt)
    assert cli.main([*SLURM, "--quiet", *options, "python", "t.py"]) == 0
    assert started == [(level, is_quiet)]


def test_a_script_without_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.touch()
    for mode, word, expected in (
        (0o644, "train.py", f"{sys.executable} train.py --fast"),
        (0o755, "./train.py", "./train.py --fast"),
    ):
        script.chmod(mode)
        assert cli.main([*SLURM, "--dry-run", word, "--fast"]) == 0
        assert capsys.readouterr().out.endswith(f" -- {expected}\n")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python t.py -m --x", "python -m tfscale.transparent -- t.py -m --x"),
        ("python3 -u -Wd -X dev t.py", "python3 -u -Wd -X dev -m tfscale.transparent -- t.py"),
        ("/opt/bin/python -m a.b -c", "/opt/bin/python -m tfscale.transparent -- -m a.b -c"),
        ("python -um a.b", "python -u -m tfscale.transparent -- -m a.b"),
        ("python -OOWe -c 1", "python -OOWe -m tfscale.transparent -- -c 1"),
        ("python -c'x y' -W", "python -m tfscale.transparent -- -c 'x y' -W"),
        ("t.py --x", f"{sys.executable} -m tfscale.transparent -- t.py --x"),
    ],
)
def test_distribute_is_put_before_the_program(command, expected, capsys):
    assert cli.main([*SLURM, "--dry-run", "--distribute", *shlex.split(command)]) == 0
    shown, is_seeded = re.subn(r" --seed=\d+", "", capsys.readouterr().out)
    assert shown.endswith(f".rank_process -- {expected}\n") and is_seeded == 1


def test_options_of_distribute_are_passed_on(capsys, monkeypatch):
    words = [*SLURM, "--dry-run", "--distribute", "--exchange", "auto"]
    words += ["--batch-norm", "local", "--seed", "0", "--all-output", "python", "t.py"]
    own = "--exchange=auto --batch-norm=local --seed=0 --all-output -- t.py\n"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for value, is_set in ((None, True), ("random", True), ("3", False)):
        if value is not None:
            monkeypatch.setenv("PYTHONHASHSEED", value)
        assert cli.main(words) == 0
        shown = capsys.readouterr().out
        assert ("PYTHONHASHSEED=" in shown) == is_set and shown.endswith(own)
    assert transparent.split(shlex.split(own)) == (own.split()[:4], ["t.py"])
    with pytest.raises(SystemExit):
        cli.main([*words[:6], "--exchange", "allgather", "python", "t.py"])
    assert "invalid choice: 'allgather'" in capsys.readouterr().err


def test_the_command_line_does_not_wait_for_tensorflow():
    code = "import sys; from tfscale.launcher import cli; cli.main(sys.argv[1:])"
    code += "; assert 'tensorflow' not in sys.modules"
    words = [sys.executable, "-c", code, *SLURM, "--dry-run", "true"]
    subprocess.run(words, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "python"], "Received: no -np"),
        (["run", "--slurm", "python"], "no -np, and no SLURM_NTASKS: not in an allocation"),
        (["run", "-np", "2"], "command a program"),
        (["run", "-np", "2", "--env", "K", "python"], "Received: --env K"),
        (["run", "-np", "3", "-H", "a:2", "python"], "1 too few"),
        (["run", "-np", "3", "-H", "a:2", "--hostfile", "f", "python"], "-H excludes --hostfile"),
        (["run", "-np", "3", "--hostfile", "/no", "--restarts", "1", "python"], "readable"),
        (["run", "-np", "3", "--restarts", "-1", "python"], "Received: --restarts=-1"),
        (["run", "-np", "3", "--restarts", "1", "--stdin", "python"], "input is read once"),
        (["run", "-np", "3", "--min-np", "4", "python"], r"in [1, 3]"),
        (["run", "-np", "3", "--min-np", "2", "--slurm", "python"], "requeue"),
        (["run", "-np", "2", "--exchange", "auto", "python", "t.py"], "an option of --distribute"),
        (["run", "-np", "2", "--all-output", "python", "t.py"], "an option of --distribute"),
        (["run", "-np", "2", "--distribute", "--seed", "-1", "python", "t.py"], "in [0, 2**32)"),
        (["run", "-np", "2", "--distribute", "numactl", "t.py"], "-m tfscale.transparent"),
        (["run", "-np", "2", "--distribute", "python", "-u"], "Received: python -u"),
        (["run", "-np", "2", "--distribute", "python", "-"], "needs a script"),
        (["run", "-np", "2", "--distribute"], "command a program"),
    ],
)
def test_impossible_runs_are_refused(words, message, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_slurm_needs_srun(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main([*SLURM, "python", "t.py"]) == 2
    assert "starts ranks. Received: srun. Use --slurm" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", [[], ["--slurm"], ["--restarts", "1"]])
def test_places_without_a_host_are_refused(launcher, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {"nothing": "", "comments": "# none\n\n", "hosts": "#\n" + "node1\n" * 3}
    for name, text in texts.items():
        Path(name).write_text(text)
    for places, message in (
        (["-H", ""], "Received: -H without a name"),
        (["--hostfile", ""], "readable"),
        (["--hostfile", "nothing"], "Received: --hostfile nothing without a name"),
        (["--hostfile", "comments"], "Received: --hostfile comments without a name"),
        (["--hostfile", "hosts"], ""),
    ):
        code = cli.main(["run", "-np", "3", *launcher, *places, "--dry-run", "python"])
        assert code == (2 if message else 0) and message in capsys.readouterr().err


@pytest.mark.parametrize("launcher", [[], ["--slurm"]])
def test_an_mpiexec_that_cannot_be_used_is_named(launcher, tmp_path, capsys, monkeypatch):
    fake = tmp_path / "mpiexec"
    fake.write_text("#!/bin/sh\necho something else\n")
    fake.chmod(0o755)
    words = ["run", "-np", "2", *launcher, "--dry-run"]
    for path in (fake, f"{fake}.none"):
        assert cli.main([*words, "--mpiexec", str(path), "python"]) == 2
        assert f"Received: {path}, which is another one" in capsys.readouterr().err
    monkeypatch.setattr(mpi_command, "find_tool", lambda name: str(fake))
    assert cli.main([*words, "python"]) == (0 if launcher else 2)  # srun needs none
    assert launcher or f"Received: {fake}, which" in capsys.readouterr().err


SRUN_LIST = "MPI plugin types are...\n\tnone\n\t{}\n"


@pytest.mark.parametrize(
    ("kind", "plugin", "device", "status", "text"),
    [
        ("mpich", "pmi2", "ch4:ucx ofi", "info", "sets MPIR_CVAR_CH4_NETMOD=ofi"),
        ("mpich", "pmi2", "ch4:ucx", "warning", "may hang in init"),
        ("mpich", "pmix", "ch4:ofi", "warning", "without --mpi=pmi2"),
        ("openmpi", "pmix", "", "info", "srun --mpi=pmix"),
    ],
)
def test_doctor_knows_what_srun_needs(kind, plugin, device, status, text, tmp_path, monkeypatch):
    for name, output in (
        ("srun", SRUN_LIST.format(plugin)),
        ("mpichversion", f"MPICH Device:  {device}"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<END\n{output}\nEND\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    check = doctor.check_slurm(Mpi(kind, "5", str(tmp_path / "mpiexec")))
    assert check.status == status and text in check.detail
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert doctor.check_slurm(None) is None


def test_doctor_without_mpi_or_library(monkeypatch, capsys):
    failing = mock.Mock(side_effect=doctor.ExchangeError("no library"))
    monkeypatch.setattr(doctor.mpi_command, "find_mpi", lambda: None)
    monkeypatch.setattr(doctor.compiler, "find_tool", lambda name: None)
    monkeypatch.setattr(doctor.mpi_library, "find", failing)
    monkeypatch.setattr(doctor, "check_gpus", lambda timeout_s: doctor.Check("gpus", "info", "0"))
    assert cli.main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["ok"] is False and checks["mpi"]["status"] == "missing"
    assert "self test" not in checks
    assert (checks["library"]["status"], checks["library"]["detail"]) == ("missing", "no library")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"-> {checks['mpi']['remedy']}" in out and "Not ready" in out
    assert doctor.check_keras({"KERAS_BACKEND": "jax"}).status == "missing"
    assert doctor.check_threads({"TF_NUM_INTEROP_THREADS": "1"}).status == "warning"


@pytest.mark.parametrize(
    ("package", "version", "status", "detail", "remedy"),
    [
        ("tensorflow", None, "missing", "not installed", "'tensorflow>=2.18,<2.22'"),
        ("tensorflow", "2.17.1", "missing", "not 2.18 to 2.21", "'tensorflow>=2.18,<2.22'"),
        ("tensorflow", "2.18.0", "ok", "2.18.0", ""),
        ("tensorflow", "2.22.0rc0", "warning", "newer than", "'tensorflow<2.22'"),
        ("keras", "3.9.2", "missing", "not 3.10 to 3.15", "'keras>=3.10,<3.16'"),
        ("keras", "3.15.1", "ok", "3.15.1", ""),
        ("keras", "3.16.0.dev20261101", "warning", "newer than", "'keras<3.16'"),
    ],
)
def test_doctor_compares_versions_with_the_tested_ones(package, version, status, detail, remedy):
    check = doctor.check_version(package, version)
    assert check.status == status and detail in check.detail
    assert remedy in check.remedy and bool(remedy) == bool(check.remedy)


@pytest.mark.timeout(240)
def test_doctor_of_a_healthy_machine(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in answer["checks"]}
    assert answer["ok"] is True and {"threads", "gpus"} <= set(checks)
    for name in ("tensorflow", "keras", "mpi", "library", "self test"):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["self test"]["detail"] == "2 ranks: allreduce is right"


def test_doctor_names_files_of_ended_jobs_and_no_others(monkeypatch):
    left = [("/dev/shm/mpich_shm_a", 2**20)]
    for files, free, status, remedy in (
        (left, 2**30, "warning", "rm /dev/shm/mpich_shm_a"),
        (left, 2**20, "warning", "rm /dev/shm/mpich_shm_a, or give the container more"),
        ([], 2**20, "warning", "end jobs that use it, or give the container more"),
        ([], 2**30, "ok", ""),
    ):
        monkeypatch.setattr(doctor.mpi_files, "find_left", lambda files=files: files)
        monkeypatch.setattr(doctor.mpi_files, "free_bytes", lambda free=free: free)
        check = doctor.check_shared_memory()
        assert check.status == status and check.remedy.startswith(remedy)


def test_doctor_shows_a_quota(monkeypatch):
    monkeypatch.setattr(doctor, "count_cores", lambda: 0)  # less than any machine has
    monkeypatch.setattr(doctor, "find_quota", lambda: 2.5)
    assert "cores, by a CPU quota of 2.5; each" in doctor.check_threads({}).detail
