"""Hosts that a real ssh reaches: two addresses of this machine, with a server of the test."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.killed_job import START_S, Job
from tfscale.launcher.mpi_command import find_mpi

pytestmark = pytest.mark.timeout(2 * START_S)
HOSTS = "127.0.0.2:1,127.0.0.3:1"
SERVER = """
Port {port}
ListenAddress 127.0.0.2
ListenAddress 127.0.0.3
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
CLIENT = """
Port {port}
User {user}
IdentityFile {folder}/{key}
IdentitiesOnly yes
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""
PRINTS = "import os; print('rank', os.environ['PMI_RANK'], 'runs', flush=True)"


def find_server():
    paths = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    return shutil.which("sshd", path=paths), shutil.which("ssh")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Yield a folder with scripts: `ssh` has a key that opens, `stranger` another one."""
    server, client = find_server()
    mpi = find_mpi()
    if server is None or client is None or mpi is None or mpi.kind != "mpich":
        pytest.skip("needs ssh and sshd (package openssh-server), and MPICH")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path_factory.mktemp("ssh")
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    for name in ("host_key", "key", "other_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    user = pwd.getpwuid(os.geteuid()).pw_name
    for name, key in (("ssh", "key"), ("stranger", "other_key")):
        text = CLIENT.format(port=port, folder=folder, key=key, user=user)
        (folder / f"{name}.config").write_text(text)
        (folder / name).write_text(f'#!/bin/sh\nexec {client} -F {folder}/{name}.config "$@"\n')
        (folder / name).chmod(0o755)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [server, "-D", "-e", "-f", str(folder / "server")], stdin=subprocess.DEVNULL, stderr=log
        )
    try:
        words, deadline = [str(folder / "ssh"), "127.0.0.3", "true"], time.monotonic() + 30
        while subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"sshd cannot be used here: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.1)
        yield folder
    finally:
        process.terminate()
        process.wait()


def start(tmp_path, folder, name):
    environ = {"HYDRA_LAUNCHER_EXEC": str(folder / name), "HYDRA_IFACE": "lo"}
    return Job(tmp_path, PRINTS, options=("-H", HOSTS), environ=environ)


def test_ranks_start_by_ssh(tmp_path, folder):
    with start(tmp_path, folder, "ssh") as job:
        output = job.output_of_end(0)
    assert "rank 0 runs\n" in output and "rank 1 runs\n" in output


def test_a_key_that_is_missing_is_said_before_the_start(tmp_path, folder):
    with start(tmp_path, folder, "stranger") as job:
        output = job.output_of_end(2)
    for host in ("127.0.0.2", "127.0.0.3"):
        assert f"  {host}: ssh fails. Try: ssh -o BatchMode=yes {host} true (" in output
    assert output.count("Permission denied (publickey)") == 2 and "rank 0" not in output
