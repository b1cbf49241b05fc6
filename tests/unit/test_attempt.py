"""One run of a launcher, to its end."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tfscale.launcher.attempt import Outcome, StopRequest, run_attempt
from tfscale.launcher.hosts import StartWatch
from tfscale.launcher.mpi_command import JOB_VARIABLE, LaunchSpec, find_processes
from tfscale.launcher.reports import Change, Report, Start, encode
from tfscale.launcher.restarting import may_restart


def run(code):
    with StopRequest(10.0) as stop:
        return run_attempt([sys.executable, "-c", code], os.environ, stop)


def test_exit_code_is_passed_on():
    assert run("raise SystemExit(7)").exit_code == 7
    assert run("pass").is_orderly
    outcome = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert "no rank said why" in outcome.describe()


# The child must be ended long before it would end by itself.
LEAVES_A_CHILD = """
import subprocess, sys
command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
subprocess.Popen(command, start_new_session=True)
"""


def test_no_process_is_left_behind(tmp_path):
    before = time.monotonic()
    mark = tmp_path / "job"
    code = f"import os; open({str(mark)!r}, 'w').write(os.environ[{JOB_VARIABLE!r}])"
    assert run(code + LEAVES_A_CHILD).exit_code == 0
    assert find_processes(mark.read_text()) == []
    assert time.monotonic() - before < 20


# A launcher that does not end by itself within the time of a test: it must be killed.
RUNS_ON = "time.sleep(60)\n"


def says(*reports):
    """Return a program that prints reports on stderr, among other lines."""
    return "import os, time\n" + "".join(
        f"os.write(2, b'line {i}\\n' + {encode(report)!r})\n" for i, report in enumerate(reports)
    )


def test_the_first_failure_counts_and_ends_the_launcher(capfd):
    ended = Report(0, "a", 4, None, False, True)
    killed = Report(2, "b", None, 9, True, True, "sum of w (slot 3 of step), run 7")
    late = Report(1, "a", 1, None, True, True, error="rank 2 has left\n", is_told=True)
    outcome = run(says(ended, killed, late) + RUNS_ON)
    assert outcome.exit_code == 137
    assert outcome.failure == killed
    assert not outcome.is_orderly
    assert outcome.describe().splitlines()[-1].endswith("sum of w (slot 3 of step), run 7.")
    assert capfd.readouterr().err == "line 0\nline 1\nline 2\n"


def test_exit_status_of_ranks_that_left_together():
    preempted = Report(0, "a", 75, None, False, True, was_asked=True)
    other = Report(1, "a", 5, None, False, True)
    for reports, exit_code in (((preempted, preempted), 75), ((preempted, other), 5)):
        outcome = run(says(*reports))
        assert outcome.exit_code == exit_code and outcome.is_orderly


STARTS = (Start(0, "a", 1, 2), Start(1, "b", 2, 2))
WELL = tuple(Report(rank, "a", 0, None, False, True) for rank in range(2))


def test_what_the_launcher_says_does_not_count_once_all_ranks_have_ended_well():
    outcome = run(says(*STARTS, *WELL) + "raise SystemExit(7)")
    assert (outcome.exit_code, outcome.is_orderly, may_restart(outcome)) == (0, True, False)
    assert "ended with exit code 7, which is ignored" in outcome.describe()
    killed = run(says(*STARTS, *WELL) + "os.kill(os.getpid(), 9)")
    assert (killed.exit_code, may_restart(killed)) == (0, False)
    # The end of one rank is not known.
    outcome = run(says(*STARTS, WELL[0]) + "raise SystemExit(7)")
    assert (outcome.exit_code, may_restart(outcome)) == (7, True)


def test_an_error_of_communication_that_a_program_has_caught_is_told():
    caught = Report(0, "a", 0, None, False, True, failed="rank 1 has left the job.")
    outcome = run(says(*STARTS, WELL[1], caught))
    assert outcome.exit_code == 0
    assert outcome.describe() == (
        "tfscale: rank 0 on host a ended well, but a collective failed there, and the program "
        "caught the error: rank 1 has left the job.\n"
    )
    # Where a rank has failed, that line would hide the cause.
    failed = Report(1, "b", 3, None, True, True)
    assert "caught the error" not in run(says(*STARTS, caught, failed)).describe()


ENDED = Report(1, "b", 0, None, False, False)  # before tfscale.init
CALLS = tuple(Change(rank, "starting") for rank in range(2))


@pytest.mark.parametrize("messages", [(ENDED, CALLS[0]), (CALLS[0], ENDED)])
@pytest.mark.parametrize("may_kill", [True, False])
def test_a_rank_for_which_others_wait_in_init_is_named_at_once(messages, may_kill):
    before = time.monotonic()
    with StopRequest(10.0) as stop:
        command = [sys.executable, "-c", says(*STARTS, *messages) + RUNS_ON]
        outcome = run_attempt(command, os.environ, stop, may_kill=may_kill)
    assert time.monotonic() - before < 30  # RUNS_ON would take a minute
    assert (outcome.exit_code, may_restart(outcome)) == (1, False)
    assert outcome.describe().endswith(
        "tfscale: rank 1 on host b ended with exit status 0 without tfscale.init(), in which other "
        "ranks wait for it.\n"
    )


def test_programs_without_init_may_end_when_they_like():
    assert run(says(*STARTS, ENDED, Report(0, "a", 0, None, False, False))).exit_code == 0
    # Of ranks that have joined, an earlier message is read late.
    joined = Report(1, "b", 0, None, False, True)
    assert run(says(*STARTS, joined, CALLS[0], WELL[0])).exit_code == 0


def waited(*messages, pause_s=0.0):
    """Return the last line when rank 0 has waited in `tfscale.init` in vain."""
    gave_up = Report(0, "a", 1, None, True, False, error="x\n", is_told=True, is_starting=True)
    pause = f"time.sleep({pause_s})\n"
    outcome = run(says(*STARTS, CALLS[0]) + pause + says(*messages, gave_up))
    assert outcome.exit_code == 1
    return outcome.describe().splitlines()[-1]


def test_the_reason_why_ranks_wait_in_init_in_vain():
    assert waited() == "tfscale: rank 1 on host b had not called tfscale.init() by then."
    # The pause lets the reader tell apart the times of the calls, 2 s and almost none.
    late = "tfscale: rank 1 on host b called tfscale.init() 2 s after the first."
    assert waited(CALLS[1], pause_s=2.0) == late


def test_hosts_that_cannot_reach_each_other_are_named():
    gave_up = Report(0, "a", 1, None, True, False, error="x\n", is_told=True, is_starting=True)
    # All have called it at about the same time, 2 s before the limit.
    outcome = run(says(*STARTS, *CALLS) + "time.sleep(2)\n" + says(gave_up))
    last = outcome.describe().splitlines()[-1]
    assert "all ranks called tfscale.init(), but hosts a, b cannot reach each other." in last


def test_a_rank_that_left_first_is_to_blame_whoever_noticed_it_before(capfd):
    told = Report(0, "a", 1, None, True, True, error="rank 1 has left\n", is_told=True)
    left = Report(1, "a", 5, None, True, True, has_left=True)
    # The cause comes later, but while reports are collected; then the launcher is killed.
    outcome = run(says(told) + "time.sleep(0.5)\n" + says(left) + RUNS_ON)
    assert outcome.exit_code == 5
    assert outcome.describe().splitlines() == [
        "rank 1 has left",
        "tfscale: the traceback of rank 0.",
        "tfscale: rank 1 on host a failed with exit status 5, leaving the job before the others.",
    ]


# As mpiexec, which ends when the output of all ranks does; here a child of one keeps it open.
HOLDS_THE_OUTPUT = """
import os, subprocess, sys, time
from tfscale.launcher.reports import Report, Start, send
read, write = os.pipe()
subprocess.run(["sh", "-c", "sleep 60 &"], pass_fds=[write])  # no child of this process
os.close(write)
for rank in range(2):
    send(Start(rank, os.uname().nodename, os.getpid(), 2))
    send(Report(rank, "a", 0, None, False, True))
os.read(read, 1)
"""


def test_ranks_are_waited_for_and_not_what_keeps_their_output_open(capfd):
    before = time.monotonic()
    outcome = run(HOLDS_THE_OUTPUT)
    assert outcome == Outcome(0, is_orderly=True)
    assert time.monotonic() - before < 20
    said = capfd.readouterr().err
    assert "all ranks have ended. Left of what they started, and ended now: " in said
    assert "(sleep 60)" in said


# As an mpiexec whose connection to another host stays open.
WAITS_FOR_A_HOST = """
import os, subprocess
from tfscale.launcher.reports import Report, Start, send
connection = subprocess.Popen(["sleep", "60"])
for rank in range(2):
    send(Start(rank, "other", 1, 2))
    send(Report(rank, "other", 0, None, False, True))
connection.wait()
"""


def test_a_job_has_succeeded_if_its_ranks_have_whatever_the_launcher_waits_for(capfd, monkeypatch):
    monkeypatch.setattr("tfscale.launcher.attempt._LAUNCHER_S", 2.0)
    assert run(WAITS_FOR_A_HOST) == Outcome(0, is_orderly=True)
    said = capfd.readouterr().err
    assert "on another host. The job ends." in said and "ended now" not in said


# Ranks that do not end at SIGTERM, which the launcher asks for as a user would, once or twice.
STAYS = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range({n}):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.2)  # two that come at once are one
time.sleep(60)
"""
KEPT = tuple(Change(rank, "joined", has_saved=True) for rank in range(2))
SAID = Report(0, "a", 75, None, False, True, was_asked=True)


@pytest.mark.parametrize(
    ("messages", "code", "text"),
    [
        ((*KEPT, SAID), 75, "running: rank 1 on host b. All ranks had saved before: exit code 75."),
        ((KEPT[1], SAID), 75, "All ranks had saved before"),
        ((KEPT[1],), 143, "still running: rank 0 on host a, rank 1 on host b. Not all ranks had"),
        ((SAID,), 143, "still running: rank 1 on host b. Not all ranks had reported a checkpoint"),
        # A rank has chosen another exit status since.
        ((*KEPT, Report(0, "a", 3, None, False, True)), 143, "still running: rank 1 on host b."),
    ],
)
def test_ranks_that_are_killed_are_named_and_what_they_have_saved_counts(messages, code, text):
    for n, when in ((1, "killed 0.7 s (--grace-s) after SIGTERM"), (300, "at the second signal")):
        with StopRequest(0.7 if n == 1 else 60.0) as stop:
            command = [sys.executable, "-c", says(*STARTS, *messages) + STAYS.format(n=n)]
            outcome = run_attempt(command, os.environ, stop)
        assert outcome.exit_code == code and not may_restart(outcome)
        last = outcome.describe().splitlines()[-1]
        assert text in last and when in last, last


def test_a_rank_that_a_signal_ends_after_all_have_saved_is_no_reason_to_begin_again():
    killed = Report(1, "b", None, 11, True, True, has_saved=True)
    outcome = run(says(*STARTS, *KEPT, SAID, killed))
    assert (outcome.exit_code, may_restart(outcome)) == (75, False)
    assert "rank 1 on host b was killed by signal 11 (SIGSEGV)" in outcome.describe()
    assert run(says(*STARTS, KEPT[0], killed)).exit_code == 75
    unsaved = Report(1, "b", None, 11, True, True)
    assert run(says(*STARTS, SAID, unsaved)).exit_code == 128 + 11


HANGS = f"""
import os, time
from tfscale.launcher.reports import Start, encode
for rank in range(2):
    os.write(2, encode(Start(rank, "here", 1, 4)))
{RUNS_ON}
"""
FOUR_RANKS = LaunchSpec(("x",), 4, hosts=(("localhost", 2), ("far", 1), ("away", 1)))


def test_a_host_without_a_sign_is_named_and_ends_the_job(capfd):
    with StopRequest(10.0) as stop:
        watch = StartWatch(FOUR_RANKS, limit_s=0.4)
        outcome = run_attempt([sys.executable, "-c", HANGS], os.environ, stop, watch=watch)
    said, why = capfd.readouterr().err, outcome.describe()
    assert (outcome.exit_code, outcome.is_orderly) == (1, False)
    for text in (said, why):  # on a busy machine also of ranks on this host
        assert " s without a sign of hosts far, away (ranks " in text and text.count("\n") == 1


def test_ranks_that_have_not_started_are_named_where_the_launcher_ends():
    with StopRequest(10.0) as stop:
        watch = StartWatch(FOUR_RANKS, limit_s=60.0)
        code = HANGS.replace(RUNS_ON, "os._exit(5)")
        outcome = run_attempt([sys.executable, "-c", code], os.environ, stop, watch=watch)
    assert "exit code 5 before the start of hosts far, away (ranks 2, 3)." in outcome.describe()


def test_a_stopped_launcher_has_not_waited(monkeypatch):
    clock = iter([0.0, 100.0, 100.2, 102.0, *range(103, 120)])
    monkeypatch.setattr("tfscale.launcher.hosts.time.monotonic", lambda: next(clock))
    # hydra starts no rank before it has heard of all hosts: those that answer are not to blame.
    watch = StartWatch(FOUR_RANKS, limit_s=2.0, find_silent=lambda names: [names[0]])
    starts: list[Start] = []
    said = [watch.look(starts) for _ in range(3)]
    assert said[:2] == ["", ""] and said[2].startswith(
        "tfscale: 2 s without a sign of host far (rank 2). Try: ssh -o BatchMode=yes far true "
    )
    while not watch.has_failed:
        assert watch.look(starts) == ""
    assert watch.describe(starts, 1).startswith("tfscale: 10 s without a sign of host far (rank 2)")
    assert watch.describe([Start(rank, "a", 1, 4) for rank in range(4)], 1) == ""


# As srun, which ends its ranks at SIGTERM; it also asks for the end of the job, as a user would.
# Without SIGTERM it would end by itself, too late for the test.
ENDS_ITS_RANKS = """
import os, signal, sys, time
def end_ranks(*_):
    open(sys.argv[1], "w").close()
    sys.exit(1)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGTERM, end_ranks)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


def test_srun_is_asked_to_end_ranks_whose_time_is_over(tmp_path):
    command = [sys.executable, "-S", "-c", ENDS_ITS_RANKS, str(tmp_path / "ended")]
    with StopRequest(0.3) as stop:
        outcome = run_attempt(command, os.environ, stop, signal.SIGUSR1, may_kill=False)
    assert (tmp_path / "ended").exists() and outcome.was_stopped


# Both wait for a signal; without one they would end by themselves, too late for the test.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(60)
"""
POLITE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open(sys.argv[1], "w").close()
time.sleep(60)
"""
SAVED = Report(0, "a", 75, None, False, True, was_asked=True)
# It ends in time; what it leaves is killed when the time is over.
LEAVES_A_STUBBORN_CHILD = POLITE.replace(
    "open(", "import subprocess; subprocess.Popen(['sh', '-c', \"trap '' TERM; sleep 60\"])\nopen("
)
# As mpiexec, which may take a moment when its ranks have ended: here longer than their time lasts.
LINGERS = f"""
import os, signal, sys, time
def end(*_):
    os.write(2, {b"".join(map(encode, [Start(0, "a", 1, 1), SAVED]))!r})
    {RUNS_ON}
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
{RUNS_ON}
"""
RUNS = """
import os, sys
from tfscale.launcher.attempt import StopRequest, run_attempt
with StopRequest(float(sys.argv[3])) as stop:
    command = [sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]]
    has_stdin = sys.argv[4:] == ["stdin"]
    sys.exit(run_attempt(command, os.environ, stop, has_stdin=has_stdin).exit_code)
"""


@pytest.mark.parametrize(
    ("code", "grace_s", "expected"),
    [
        (STUBBORN, 1.0, 128 + signal.SIGINT),
        (POLITE, 30.0, 75),
        (LEAVES_A_STUBBORN_CHILD, 1.8, 75),
        (LINGERS, 1.0, 75),
    ],
)
def test_any_signal_asks_ranks_to_end_and_one_that_ignores_it_is_killed(
    tmp_path, code, grace_s, expected
):
    ready = tmp_path / "ready"
    process = subprocess.Popen([sys.executable, "-c", RUNS, code, str(ready), str(grace_s)])
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == expected
    finally:
        process.kill()


# A shell in a terminal of its own, which starts a job in front or, as with "&", in the background.
SHELL = """
import fcntl, os, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
leave = os.setpgrp if sys.argv[1] == "background" else None
sys.exit(subprocess.run([sys.executable, "-c", *sys.argv[2:]], preexec_fn=leave).returncode)
"""
READS = "import sys; open(sys.argv[1], 'w').write(sys.stdin.readline())"


@pytest.mark.parametrize(
    ("where", "words", "expected"),
    [("in front", ["stdin"], "typed\n"), ("in front", [], ""), ("background", ["stdin"], "")],
)
def test_a_job_leaves_what_is_typed_to_the_shell(tmp_path, where, words, expected):
    terminal, inside = pty.openpty()
    read = tmp_path / "read"
    command = [sys.executable, "-c", SHELL, where, RUNS, READS, str(read), "1", *words]
    process = subprocess.Popen(command, stdin=inside, start_new_session=True)
    try:
        os.write(terminal, b"typed\n")
        assert process.wait(60) == 0
        assert read.read_text() == expected
    finally:
        process.kill()
        os.close(terminal), os.close(inside)
