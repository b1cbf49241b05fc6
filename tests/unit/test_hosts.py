"""Hosts are asked, before the start, whether ranks can start there; ssh is a stand-in."""

import sys
import time
from pathlib import Path

import pytest

from tfscale.config import ConfigError
from tfscale.launcher.hosts import check_hosts
from tfscale.launcher.mpi_command import LaunchSpec, Mpi

# As ssh: options, the host, and a command for a shell. Names of hosts say what is wrong with them.
SSH = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
case $host in
  hangs) exec sleep 60;;
  asks) echo "Permission denied (publickey,password)." >&2; exit 255;;
  no-folder) set -- "$(echo "$*" | sed "s,$PWD,/no/such/folder,")";;
  no-python) set -- "$(echo "$*" | sed "s,{sys.executable},/no/python,g")";;
  no-package) PYTHONPATH=; set -- "$(echo "$*" | sed "s,import tfscale,import no_such_tfscale,")";;
esac
exec sh -c "$*"
"""


@pytest.fixture
def environ(tmp_path, monkeypatch):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "hydra_pmi_proxy").touch(mode=0o755)
    for path in ("ssh", "hydra_pmi_proxy"):
        (tmp_path / path).chmod(0o755)
    package = str(Path.cwd())
    (tmp_path / "a folder").mkdir()
    monkeypatch.chdir(tmp_path / "a folder")
    return {"HYDRA_LAUNCHER_EXEC": str(tmp_path / "ssh"), "PYTHONPATH": package}


def check(environ, *hosts, **fields):
    mpi = Mpi("mpich", "5.0.2", str(Path(environ["HYDRA_LAUNCHER_EXEC"]).with_name("mpiexec")))
    spec = LaunchSpec(("x",), len(hosts), hosts=tuple((host, 1) for host in hosts), **fields)
    check_hosts(spec, mpi, environ, timeout_s=10.0 if "hangs" not in hosts else 1.0)


def test_hosts_that_can_start_ranks(environ):
    check(environ, "localhost", "good", "also-good")


@pytest.mark.parametrize(
    ("host", "texts"),
    [
        ("hangs", ["no answer in 1 s. Try: ssh -o BatchMode=yes hangs true"]),
        ("asks", ["ssh fails. Try: ssh -o BatchMode=yes asks true (Permission denied (publickey"]),
        ("no-folder", ["the working folder", "a folder is missing there"]),
        ("no-python", [f"{sys.executable} is missing there"]),
        ("no-package", [f"{sys.executable} cannot import tfscale there", "No module named"]),
    ],
)
def test_a_host_that_cannot_is_named_with_the_reason(environ, host, texts):
    before = time.monotonic()
    with pytest.raises(ConfigError, match=rf"1 that cannot:\n  {host}: ") as caught:
        check(environ, "localhost", host)
    for text in texts:
        assert text in str(caught.value)
    assert time.monotonic() - before < 30  # the stand-in hangs for longer


def test_the_mpi_must_be_there(environ):
    Path(environ["HYDRA_LAUNCHER_EXEC"]).with_name("hydra_pmi_proxy").unlink()
    with pytest.raises(ConfigError, match="hydra_pmi_proxy of MPICH is missing there"):
        check(environ, "good")


def test_all_hosts_are_asked_and_named(environ):
    with pytest.raises(ConfigError, match=r"2 that cannot:\n  asks: [^\n]*\n  no-folder: "):
        check(environ, "asks", "localhost", "good", "no-folder")


def test_hosts_that_are_not_reached_by_ssh_are_not_asked(environ):
    check({**environ, "HYDRA_LAUNCHER": "slurm"}, "asks")
    check(environ, "asks", is_slurm=True)
