"""`tfscale run` when ranks, or it itself, end; TensorFlow plays no part in it."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.killed_job import START_S, Job, job_of, listening_addresses, wait_for_end
from tests.helpers.launching import WHOLE_LINES, job_words

pytestmark = pytest.mark.timeout(2 * START_S)
RESTARTS = ("--restarts", "3")
PLAIN = """
import os, signal, sys, time
kind, rank = sys.argv[1], int(os.environ["PMI_RANK"])
n_signals = 0

def on_term(*_):
    global n_signals
    n_signals += 1

if kind == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif kind == "saves":
    signal.signal(signal.SIGTERM, on_term)
if kind == "fails once" and os.environ["TFSCALE_RESTART"] == "0" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "exits" and rank == 1:
    time.sleep(0.5)
    print(f"READY 1 {os.getpid()} {time.time()} .", flush=True)
    sys.exit(3)
if kind == "fails once":
    print(f"rank {rank} after {os.environ['TFSCALE_RESTART']}", flush=True)
    sys.exit()
print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
deadline = time.time() + 100
while not n_signals and time.time() < deadline:
    time.sleep(0.05)
# Saving takes a while. The test is that no second signal comes within it, so it must last.
time.sleep(1)
print(f"rank {rank} had {n_signals} signal", flush=True)
sys.exit(75)
"""


def require_one_signal(job):
    """All ranks have saved, asked by one signal."""
    output = job.output_of_end(75)
    assert all(f"rank {rank} had 1 signal" in output for rank in range(2)), output


def test_exit_before_init(tmp_path):
    with Job(tmp_path, PLAIN, "exits", options=RESTARTS) as job:
        _, since = job.ready(1)
        assert job.end(since) == 3
    # It would end so again, so it was not started again.
    assert job.last_lines()[-1].endswith("failed with exit status 3, before tfscale.init().")
    assert "restart 1" not in job.output()


def test_ranks_save_when_the_launcher_is_asked_to_end(tmp_path):
    with Job(tmp_path, PLAIN, "saves", options=RESTARTS) as job:
        job.pids()
        job.process.send_signal(signal.SIGTERM)
        require_one_signal(job)


STAYS = """
import os, signal, sys, time
from tfscale.comm import process
kind, rank = sys.argv[1], int(os.environ["PMI_RANK"])
was_asked = False

def on_term(*_):
    global was_asked
    was_asked = True

signal.signal(signal.SIGTERM, on_term)
process.write_state(process.JOINED)
print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
while not was_asked:
    time.sleep(0.05)
if kind == "saves" or rank == 0:
    process.write_request(has_saved=True)  # as tfscale.callbacks.Checkpoint does
process.write_state(process.FINISHED)
if rank == 0:
    sys.exit(75)
time.sleep(100)  # longer than the test: as a program that copies its results away at its end
"""


# Seconds to end: enough for a busy machine to save, and for the launcher to notice it.
@pytest.mark.parametrize(("kind", "grace_s", "code"), [("saves", 6, 75), ("fails to", 1, 143)])
def test_a_rank_that_ends_too_slowly_is_named_and_what_all_have_saved_counts(
    tmp_path, kind, grace_s, code
):
    with Job(tmp_path, STAYS, kind, options=(*RESTARTS, "--grace-s", str(grace_s))) as job:
        pids, since = job.pids(), time.time()
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(START_S) == code, job.output()
        wait_for_end(pids, since + grace_s)
    last = job.output().splitlines()[-1]
    host = os.uname().nodename
    assert f"{grace_s} s (--grace-s) after SIGTERM, still running: rank 1 on host {host}." in last
    assert ("All ranks had saved before: exit code 75." in last) == (code == 75)


# As tfscale.init, without TensorFlow and MPI: ranks that wait for others, of which none comes.
WAITS = """
import os, sys, time
from tfscale.comm import process
from tfscale.config import Settings
kind, rank = sys.argv[1], int(os.environ["PMI_RANK"])
print(f"READY {rank} {os.getpid()} {time.time()} .", flush=True)
if kind == "absent" and rank == 1:
    sys.exit()
process.write_state(process.STARTING)
with process.deadline_of_start(Settings(stall_shutdown_s=100 if kind == "absent" else 3), "init"):
    time.sleep(60)  # longer than the test
"""


def test_a_rank_that_ends_before_init_is_named_at_once(tmp_path):
    with Job(tmp_path, WAITS, "absent", options=RESTARTS) as job:
        _, since = job.ready(1)
        assert job.end(since) == 1
    host = os.uname().nodename
    assert job.last_lines()[-1] == (
        f"tfscale: rank 1 on host {host} ended with exit status 0 without tfscale.init(), in which "
        "other ranks wait for it."
    )
    assert "restart 1" not in job.output()


def test_ranks_that_do_not_reach_each_other_are_no_cause(tmp_path):
    with Job(tmp_path, WAITS, "unreachable") as job:
        job.pids()
        assert "all ranks called tfscale.init(), but did not reach" in job.output_of_end(1)
    assert "did not reach each other" in job.output().splitlines()[-1]


def test_launcher_killed_with_ranks_that_ignore_signals(tmp_path):
    with Job(tmp_path, PLAIN, "ignores SIGTERM") as job:
        pids, since = job.pids(), time.time()
        job.process.kill()
        wait_for_end(pids, since)


@pytest.mark.parametrize("pause_s", [0.3, 1.0, 2.5])
def test_a_stop_while_ranks_start(tmp_path, pause_s):
    """Python of `tfscale run`, mpiexec, or TensorFlow of the ranks is being loaded."""
    # The ranks sleep until the stop ends them: one that ignored it would be noticed.
    script = "import tensorflow, tfscale; tfscale.init(); import time; time.sleep(100)"
    with Job(tmp_path, script, options=RESTARTS) as job:
        time.sleep(pause_s)
        pids = [int(p) for p in os.listdir("/proc") if p.isdigit() and is_of(p, tmp_path)]
        since = time.time()
        job.process.send_signal(signal.SIGTERM)
        assert job.end(since) in (-signal.SIGTERM, 128 + signal.SIGTERM), job.output()
        wait_for_end(pids, since)
        assert "restart 1" not in job.output()


def is_of(pid, folder):
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


FLOOD = """
import sys
line = "x" * 99 + "\\n"
for stream in (sys.stdout, sys.stderr):
    for _ in range(200):
        stream.write(line * 1000)
    stream.write("y" * 20_000_000 + "\\n")
    stream.flush()
"""


def test_a_flood_of_output(tmp_path):
    """All of 160 MB, a quarter of them in lines of 20 MB, in a launcher that stays small."""
    with Job(tmp_path, FLOOD) as job:
        peak_mb = 0
        while job.process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                status = Path(f"/proc/{job.process.pid}/status").read_text()
                peak_mb = max([peak_mb, *map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))])
            time.sleep(0.1)
        assert job.process.returncode == 0
        printed = Path(tmp_path / "output").read_bytes()
    assert printed.count(b"x") >= 2 * 2 * 99 * 200_000
    assert printed.count(b"y") >= 2 * 2 * 20_000_000
    assert 0 < peak_mb < 200_000  # in units of 1024 bytes


# A namespace of process ids needs root, which CI has.
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root")
def test_the_launcher_is_process_1_of_a_container(tmp_path):
    """It gets orphans, has no default handlers of signals, and its end is that of all."""
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    orphan = "import subprocess; subprocess.Popen(['sh', '-c', '(sleep 0.1 &)'])\n"
    with Job(tmp_path, orphan + PLAIN, "fails once", options=RESTARTS, prefix=prefix) as job:
        assert "tfscale: restart 1 of 3, with 2 ranks." in job.output_of_end(0)
    with Job(tmp_path, PLAIN, "saves", prefix=prefix) as job:
        job.pids()
        inside = int(Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text())
        os.kill(inside, signal.SIGTERM)
        job.output_of_end(75)


@pytest.mark.quick
def test_a_job_is_started_again(tmp_path):
    with Job(tmp_path, PLAIN, "fails once", options=RESTARTS) as job:
        output = job.output_of_end(0)
    assert all(f"rank {rank} after 1" in output for rank in range(2)), output
    assert "tfscale: restart 1 of 3, with 2 ranks." in output


def test_a_rank_whose_neighbour_is_killed_is_named(tmp_path):
    with Job(tmp_path, PLAIN, "saves") as job:
        pids = job.pids()
        with open(f"/proc/{pids[1]}/stat") as file:
            beside = int(file.read().rpartition(")")[2].split()[1])
        since = time.time()
        os.kill(beside, signal.SIGKILL)
        assert job.end(since) == 137, job.output()
        wait_for_end(pids, since)
    line = job.output().splitlines()[-1]
    assert line.startswith(f"tfscale: rank 1 on host {os.uname().nodename} was killed with the")


def test_words_that_mpiexec_would_take(tmp_path):
    words = ("--map", ":", "a:b", "", "two words", "-n", "ü")
    with Job(tmp_path, "import sys; print(sys.argv[1:])", *words) as job:
        assert job.output_of_end(0).count(str(list(words))) == 2


LOOKS = """
import os, sys, time
print(f"READY {os.environ['PMI_RANK']} {os.getpid()} {time.time()} .", flush=True)
assert os.environ["KEY"] == "se=cret: 7"
time.sleep(100)
"""


def test_no_process_shows_secrets_or_inherits_listening_sockets(tmp_path):
    with Job(tmp_path, LOOKS, options=("--env", "KEY=se=cret: 7")) as job:
        pids = job.pids()
        processes = job_of(pids[0])
        assert set(pids) < set(processes)  # and mpiexec, its proxy and those beside ranks
        for pid in processes:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                assert b"se=cret" not in file.read()
        assert not any(listening_addresses(pid) for pid in pids)
    assert "se=cret" not in job.output()


# As Slurm's, with tasks followed by cgroups: SIGTERM kills, others go to the tasks, no further.
# SIGUSR2 stands for what its daemons do at `scancel` and before the time limit.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

ranks = []
instead = {{signal.SIGTERM: signal.SIGKILL, signal.SIGHUP: signal.SIGKILL,
           signal.SIGUSR2: signal.SIGTERM}}

def pass_on(number, frame):
    for rank in ranks:
        rank.send_signal(instead.get(number, number))

for number in (signal.SIGUSR1, *instead):
    signal.signal(number, pass_on)
words = sys.argv[1:]
command = words[[word.startswith("--") for word in words].index(False):]
print(f"srun {{os.getpid()}} .", flush=True)
for rank in range(2):
    environ = {{**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": "2"}}
    ranks.append(subprocess.Popen(command, env=environ))
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT", "by Slurm"])
def test_ranks_save_under_slurm(tmp_path, sent):
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    environ = {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}
    with Job(tmp_path, PLAIN, "saves", options=("--slurm",), environ=environ) as job:
        pids = job.pids()
        os.kill(pids[0], signal.SIGUSR1)  # Slurm may signal all processes
        if sent == "by Slurm":
            os.kill(int(job.output().split("srun ")[-1].split()[0]), signal.SIGUSR2)
        else:
            job.process.send_signal(signal.Signals[sent])
        require_one_signal(job)


LOOP = """
while read name; do
  "{python}" -m tfscale.launcher.cli run --quiet -np 2 -- "{python}" -c \\
    "{whole_lines}; print('$name', repr(sys.stdin.read()))" || exit 1
done
"""


def test_a_loop_of_a_shell_keeps_its_input(tmp_path):
    """And no rank waits for input: each reads to the end."""
    loop = ["sh", "-c", LOOP.format(python=sys.executable, whole_lines=WHOLE_LINES.strip())]
    done = subprocess.run(loop, input="a\nb\n", capture_output=True, text=True, timeout=START_S)
    assert sorted(done.stdout.split()) == sorted(["a", "''", "a", "''", "b", "''", "b", "''"]), (
        done.stderr
    )


def test_rank_0_reads_the_input_if_that_is_wanted():
    script = f"{WHOLE_LINES}import os; print(os.environ['PMI_RANK'], repr(sys.stdin.read()))"
    words = job_words(["-np", "2", "--stdin"], [sys.executable, "-c", script])
    done = subprocess.run(words, input="x\n", capture_output=True, text=True, timeout=START_S)
    assert sorted(done.stdout.splitlines()) == ["0 'x\\n'", "1 ''"], done.stderr
    # The descriptor 0 is another file, if any, where the caller's input is closed.
    words = ["sh", "-c", f"exec {shlex.join(words)} <&-"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S)
    assert sorted(done.stdout.splitlines()) == ["0 ''", "1 ''"], done.stderr


def test_old_variables_of_slurm_do_not_choose_the_launcher(tmp_path):
    """Without srun mpiexec would wait for ever for it."""
    stale = {"SLURM_JOB_ID": "1", "SLURM_NODELIST": "gone[1-2]", "SLURM_JOB_NODELIST": "gone[1-2]"}
    stale |= {"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    with Job(tmp_path, "import os; print('rank', os.environ['PMI_RANK'])", environ=stale) as job:
        output = job.output_of_end(0)
    assert "rank 0\n" in output and "rank 1\n" in output
    assert "Slurm has given this job 2 nodes, and without --slurm" in output


# As an ssh that answers a test, and never starts MPI's helper.
HANGING_SSH = """#!/bin/sh
case "$*" in *rank_process*) exit 0;; esac
exec sleep 100
"""


def test_a_host_on_which_no_rank_starts_ends_the_job(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(HANGING_SSH)
    ssh.chmod(0o755)
    environ = {"HYDRA_LAUNCHER_EXEC": str(ssh), "TFSCALE_START_S": "0.5"}
    options = ("-H", "localhost:1,127.0.0.9:1")
    with Job(tmp_path, "import time; time.sleep(100)", options=options, environ=environ) as job:
        output = job.output_of_end(1)
    assert output.splitlines()[-1].endswith(
        "s without a sign of host 127.0.0.9 (rank 1). "
        "Try: ssh -o BatchMode=yes 127.0.0.9 true ('Several hosts' in the documentation)."
    )
