"""A real Slurm on hosts that are network namespaces of this machine: one controller, two nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tools.cluster import control

_TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "nsenter")
N_CPUS = 2  # of each node

_CONF = """
ClusterName=tfscale
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits until its old credentials have expired: 120 s by default.
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=5
MpiDefault=none
StateSaveLocation={folder}/node0/state
SlurmctldLogFile={folder}/node0/slurmctld.log
SlurmctldPidFile={folder}/node0/slurmctld.pid
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdSpoolDir={folder}/%n/spool
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
NodeName=node[1-2] CPUs={cpus} RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=node[1-2] MaxTime=INFINITE PriorityTier=10 PreemptMode=off
"""


def require_slurm() -> None:
    """Skip a test where no Slurm can be started."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found (packages slurm-wlm, munge, util-linux)")
    if obstacle := control.find_obstacle():
        pytest.skip(obstacle)


class SlurmHosts:
    """Hosts `node0` (controller), `node1` and `node2`, while this is used as a context.

    Each has a network device, a host name, process ids and a /dev/shm of its own; files are shared.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._name = folder, f"slurm{os.getpid()}"
        # The first process of each host: its end is the end of all processes of the host.
        self._hosts: list[subprocess.Popen[bytes]] = []
        self._others: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmHosts:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._hosts, *self._others]:
            process.kill()
        for process in [*self._hosts, *self._others]:
            process.wait()
        control.down(self._name)

    def _start(self) -> None:
        layout = control.up(self._name, 3)
        names = "".join(f"{node.address} {node.name}\n" for node in layout.nodes)
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (self._folder / "slurm.conf").write_text(_CONF.format(folder=self._folder, cpus=N_CPUS))
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start_munge()
        for node in layout.nodes:
            (self._folder / node.name / "state").mkdir(parents=True)
            (self._folder / node.name / "spool").mkdir()
            setup = (
                f"hostname {node.name} && mount --make-rprivate / && "
                f"mount --bind {self._folder}/hosts /etc/hosts && "
                "mount -t tmpfs tmpfs /dev/shm && echo ready && exec sleep infinity"
            )
            unshare = ("unshare", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child")
            host = subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    node.namespace,
                    *unshare,
                    "--mount-proc",
                    "sh",
                    "-c",
                    setup,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
            self._hosts.append(host)
            assert host.stdout is not None and host.stdout.readline() == b"ready\n"
        self.start(0, ["slurmctld", "-D"], self._folder / "node0" / "daemon.log")
        for i in (1, 2):
            self.start_node(i)
        self.wait_until(lambda: self._states() == ["idle", "idle"], "both nodes to be idle")

    def start_node(self, host: int) -> None:
        """Start Slurm's daemon of a node."""
        log = self._folder / f"node{host}" / "daemon.log"
        self.start(host, ["slurmd", "-D", "-N", f"node{host}"], log)

    def _start_munge(self) -> None:
        folder = self._folder / "munge"
        folder.mkdir(mode=0o755)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        files = {"key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        words = [f"--{option}={folder / name}" for option, name in files.items()]
        with (self._folder / "munge.log").open("wb") as log:
            process = subprocess.Popen(
                ["munged", "--foreground", "--force", f"--socket={folder}/socket", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._others.append(process)

    def _states(self) -> list[str]:
        done = self.run(0, ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"])
        return done.stdout.split()

    def _words(self, host: int, command: Sequence[str]) -> list[str]:
        # The child of unshare, which is process 1 of the host.
        pid = self._hosts[host].pid
        first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        spaces = ("--net", "--uts", "--mount", "--ipc", "--pid")
        return ["nsenter", f"--target={first}", *spaces, f"--wd={os.getcwd()}", *command]

    def _environ(self, environ: Mapping[str, str] | None) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf"), **(environ or {})}

    def start(
        self,
        host: int,
        command: Sequence[str],
        output: Path,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host and return at once."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._words(host, command),
                env=self._environ(environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._others.append(process)
        return process

    def run(
        self,
        host: int,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(
            self._words(host, command),
            env=self._environ(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def output_of(
        self,
        host: int,
        command: Sequence[str],
        output: Path,
        environ: Mapping[str, str],
        timeout_s: float,
    ) -> str:
        """Run a command on a host, which must end well; return its output."""
        process = self.start(host, command, output, environ)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            self.run(0, ["scancel", "--state=running", "--user=root"])
        assert code == 0, f"{code}: {output.read_text()}{self.logs()}"
        return output.read_text()

    def lose(self, host: int) -> None:
        """Take a host off the network, then end all its processes."""
        layout = control.existing(self._name).layout
        node = layout.nodes[host]
        down = ["ip", "-n", layout.bridge_namespace, "link", "set", node.port, "down"]
        subprocess.run(down, check=True)
        with contextlib.suppress(ProcessLookupError):
            self._hosts[host].send_signal(signal.SIGKILL)
        self._hosts[host].wait()

    def wait_until(
        self,
        holds: Callable[[], bool],
        what: str,
        timeout_s: float = 60.0,
        output: Path | None = None,
    ) -> None:
        """Wait for a condition; the output of a job is shown where it does not come."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                said = output.read_text() if output and output.exists() else ""
                raise AssertionError(f"no {what} in {timeout_s} s:\n{said}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the ends of the daemons' logs."""
        paths = sorted(self._folder.glob("node*/*.log"))
        return "".join(f"\n{path}:\n{path.read_text()[-2000:]}" for path in paths)
