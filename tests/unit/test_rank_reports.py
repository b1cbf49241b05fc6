"""Reports of how ranks ended, among the lines that they print."""

import os
import signal
import subprocess
import sys

import pytest

from tfscale.comm.process import ALONE, FINISHED, JOINED, RAISED, TOLD, WAITING, Launch, RankStatus
from tfscale.launcher.rank_process import judge
from tfscale.launcher.reports import Beat, Pulse, Report, ReportReader, encode, encode_beat

KILLED = Report(1, "node7", None, 9, True, True, "sum of w (slot 3 of step), run 7")


def read(*chunks):
    """Return what is passed on of the chunks, and the reports."""
    source, out = os.pipe()
    passed, target = os.pipe()
    reader = ReportReader(source, target)
    for chunk in chunks:
        os.write(out, chunk)
    os.close(out)
    reader.join(10)
    os.close(target)
    with os.fdopen(passed, "rb") as file:
        text = file.read()
    os.close(source)
    return text, reader.reports


def test_reports_are_taken_out():
    line = encode(KILLED)
    for prefix in (b"", b"[1] ", b"1: ", b"[1,1]<stderr>:"):
        text, reports = read(b"first\n" + prefix + line + b"last")
        assert text == b"first\nlast", prefix
        assert reports == [KILLED]


def test_reports_in_pieces():
    line = encode(KILLED)
    for cut in (1, 5, len(line) - 1):
        text, reports = read(b"so far " + line[:cut], line[cut:] + b"more")
        assert text == b"so far more"
        assert reports == [KILLED]


@pytest.mark.parametrize(
    "text", [b"\x1etfscale {}\n", b"\x1etfscale [\n", b"\x1e other\n", b"\x1e"]
)
def test_other_lines_with_that_character_stay(text):
    assert read(text) == (text, [])


def test_a_report_stays_in_one_piece():
    long = Report(1, "a", 1, None, True, True, error="früher " * 2000 + "ValueError: the end")
    line = encode(long)
    assert len(line) < 4096
    assert read(line)[1][0].error.endswith("früher ValueError: the end")


@pytest.mark.parametrize(
    ("code", "state", "was_stopped", "is_failure"),
    [
        (0, "", False, False),
        (0, FINISHED, False, False),
        (0, JOINED, False, True),
        (0, ALONE, False, False),
        (3, "", False, True),
        (3, JOINED, False, True),
        (3, FINISHED, False, False),
        (3, ALONE, False, False),
        (0, RAISED, False, False),
        (1, RAISED, False, True),
        (0, TOLD, False, True),
        (1, TOLD, False, True),
        (1, WAITING, False, True),
        (75, JOINED, False, False),
        (-9, "", False, True),
        (-9, JOINED, False, True),
        (-15, JOINED, True, False),
        (-9, JOINED, True, True),
        (-9, ALONE, False, False),
    ],
)
def test_which_ends_are_failures(code, state, was_stopped, is_failure):
    launch = Launch(2, 4, None, None, "mpich")
    report = judge(launch, code, RankStatus(state, "", ""), was_stopped)
    assert report.is_failure == is_failure
    assert report.rank == 2
    assert bool(report.exit_code) == (code != 0 or is_failure)


@pytest.mark.parametrize(
    ("state", "has_joined", "is_told"),
    [
        ("", False, False),
        (WAITING, False, True),
        (JOINED, True, False),
        (TOLD, True, True),
        (RAISED, True, False),
    ],
)
def test_who_is_to_blame(state, has_joined, is_told):
    report = judge(Launch(2, 4, None, None, "mpich"), 1, RankStatus(state, "", ""), False)
    assert (report.has_joined, report.is_told) == (has_joined, is_told)


def test_the_first_rank_that_failed_by_itself_counts():
    told = Report(0, "a", 1, None, True, True, is_told=True)
    source, out = os.pipe()
    reader = ReportReader(source, os.dup(2))
    os.write(out, encode(told) + encode(KILLED))
    os.close(out)
    reader.join(10)
    os.close(source)
    assert reader.failure() == KILLED
    reader.reports.remove(KILLED)
    assert reader.failure() == told


def test_lines_for_people():
    text = KILLED.describe()
    assert "rank 1 on host node7 was killed by signal 9 (SIGKILL)" in text
    assert text.splitlines()[-1].endswith("sum of w (slot 3 of step), run 7.")
    assert (
        "exit status 0 before tfscale.shutdown()" in Report(1, "a", 0, None, True, True).describe()
    )
    failed = Report(1, "a", 3, None, True, False, error="ValueError: x\n").describe()
    assert failed.splitlines() == [
        "ValueError: x",
        "tfscale: rank 1 on host a failed with exit status 3, before tfscale.init().",
    ]


def test_signs_of_life_are_taken_out():
    line = encode_beat(Beat(1, "b")) + encode_beat(Beat(1, "b", is_last=True))
    assert read(b"a\n" + line + b"z") == (b"a\nz", [])


def beat(pulse, now, *hosts):
    for rank, host in hosts:
        pulse.hear(Beat(rank, host), now)


A, B = (0, "a"), (1, "b")


def test_a_silent_host_is_lost():
    pulse = Pulse()
    beat(pulse, 0, A, B)
    for now in range(1, 23):
        beat(pulse, now, A)
        assert pulse.find_lost(now) is None, now
    beat(pulse, 23, A)
    assert pulse.find_lost(23) == Beat(1, "b")


def test_a_blocked_launcher_hears_nobody():
    pulse = Pulse()
    beat(pulse, 0, A, B)
    assert pulse.find_lost(100) is None
    beat(pulse, 100, A)  # what piled up arrives host by host
    assert pulse.find_lost(100.1) is None
    beat(pulse, 100.2, B)
    assert all(pulse.find_lost(100.3 + i / 10) is None for i in range(30))


def test_a_rank_that_ended_is_not_missed():
    pulse = Pulse()
    beat(pulse, 0, A, B)
    pulse.hear(Beat(1, "b", is_last=True), 1)
    for now in range(1, 60):
        beat(pulse, now, A)
        assert pulse.find_lost(now) is None


def test_one_host_alone_is_never_lost():
    pulse = Pulse()
    beat(pulse, 0, A, (1, "a"))
    for now in range(1, 60):
        beat(pulse, now, A)
        assert pulse.find_lost(now) is None


def test_a_signal_without_a_name():
    report = Report(1, "node7", None, signal.SIGRTMAX - 6, True, True)
    assert f"killed by signal {signal.SIGRTMAX - 6} (a real-time signal)" in report.describe()


@pytest.mark.parametrize(("state", "code"), [(FINISHED, 0), (ALONE, 0), (None, 75)])
def test_a_rank_that_has_left_ends_nobody(state, code):
    """mpirun and srun end all ranks when one ends with another status than 0."""
    leave = f"process.write_state({state!r}); " if state else ""
    program = f"from tfscale.comm import process; import sys; {leave}sys.exit(75)"
    command = [sys.executable, "-m", "tfscale.launcher.rank_process", "--"]
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True)
    assert done.returncode == code
    assert [report.exit_code for report in read(done.stderr)[1]] == [75]
