"""Messages of the processes beside ranks, among the lines that ranks print."""

import array
import fcntl
import os
import socket
import subprocess
import sys
import termios
import time

import pytest

from tfscale.comm import process
from tfscale.comm.process import (
    ALONE,
    FINISHED,
    JOINED,
    LEAVING,
    LEFT,
    RAISED,
    STARTING,
    TOLD,
    WAITING,
    Launch,
    RankStatus,
)
from tfscale.launcher.rank_process import report_end
from tfscale.launcher.reports import (
    Beat,
    Pulse,
    Report,
    ReportReader,
    Start,
    describe_errors,
    describe_training,
    encode,
    without_start_messages,
)

LAUNCH = Launch(2, 4, None, None, "mpich")
KILLED = Report(1, "node7", None, 9, True, True, "sum of w (slot 3 of step), run 7")


def read(*chunks, is_quiet=False, pause_s=0.0):
    source, out = os.pipe()
    passed, target = os.pipe()
    reader = ReportReader(source, target, is_quiet)
    for chunk in chunks:
        os.write(out, chunk)
        time.sleep(pause_s)  # so that the reader sees most of them alone
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
        assert read(b"first\n" + prefix + line + b"last") == (b"first\nlast", [KILLED]), prefix
    for cut in (1, 5, len(line) - 1):
        assert read(b"so far " + line[:cut], line[cut:] + b"more") == (b"so far more", [KILLED])
    beats = encode(Beat(1, "b")) + encode(Start(1, "b", 7, 2))  # signs of life
    assert read(b"a\n" + beats + b"z") == (b"a\nz", [])


def test_other_lines_with_that_character_stay():
    for text in (b"\x1etfscale {}\n", b"\x1etfscale [\n", b"\x1e other\n", b"\x1e"):
        assert read(text) == (text, [])


def test_a_long_error_is_whole_although_each_line_stays_in_one_piece():
    error = "früher 𝄞 " * 2000 + "ValueError: the end"
    text = encode(Report(1, "a", 1, None, True, True, error=error))
    assert all(len(line) < 4096 for line in text.splitlines())
    assert read(text)[1][0].error == error


STARTUP = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795356069.251987    6027 port.cc:153] oneDNN custom operations are on.\n"
    b"To enable the following instructions: AVX2 AVX512F, in other operations, rebuild.\n"
    b"E0000 00:00:1795356081.085340    6027 cuda_platform.cc:52] failed call to cuInit: INTERNAL\n"
    b"2026-11-22 13:54:08.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations\n"
)
# Two lines: an iterator that a stop within `fit` has left.
LEFT_ITERATOR = (
    b"W0000 00:00:1795868800.125669    9850 generator_dataset_op.cc:108] Error occurred when "
    b"finalizing GeneratorDataset iterator: FAILED_PRECONDITION: Python interpreter state is not "
    b"initialized. The process may be terminated.\n\t [[{{node PyFunc}}]]\n"
)
SAID = (
    b"\t [[{{node PyFunc}}]]\n"
    b"W0000 00:00:1795356069.251987    6027 op.cc:153] slow\n"
    b"E0000 00:00:1795356081.085340    6027 conv.cc:52] failed\n"
    b"I1122 13:54:08.123456 140234 train.py:12] step 7\n"
    b"2026-11-22 13:54:08.1: W tensorflow/core/x.cc:1] slow\nWARNING:root:careful\n"
)


@pytest.mark.parametrize("prefix", [b"", b"[1] ", b"1: "])
def test_what_tensorflow_says_at_its_start_is_left_out(prefix, monkeypatch):
    monkeypatch.setattr("tfscale.launcher.reports._HELD_S", 60.0)
    lines = [prefix + line for line in (STARTUP + LEFT_ITERATOR + SAID).splitlines(keepends=True)]
    n_left_out = len((STARTUP + LEFT_ITERATOR).splitlines())
    text, kept = (b"".join(own) for own in (lines, lines[n_left_out:]))
    assert read(text, is_quiet=True)[0] == kept
    assert read(text)[0] == text
    slowly = [text[i : i + 1] for i in range(1100)] + [text[1100:]]
    first = text.index(b"\t [[") - len(prefix)  # where the second of two lines begins
    halves = [text[:first], text[first:]]
    for chunks, pause_s in (
        ([text[:3], text[3:100], text[100:]], 0.0),
        (halves, 0.05),
        (slowly, 0.0005),
    ):
        assert read(*chunks, is_quiet=True, pause_s=pause_s)[0] == kept


def test_the_process_that_ended_first_is_named_by_a_reader_that_was_kept_waiting():
    beside = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    (source, out), (passed, target) = os.pipe(), os.pipe()
    reader = ReportReader(source, target)
    for rank, sleeping in enumerate(beside):
        os.write(out, encode(Start(rank, socket.gethostname(), sleeping.pid, 2)))
    wait_until(lambda: len(reader.pids_beside()) == 2)
    text = b"x" * ((1 << 16) + 10)  # more than the reader's output takes
    os.write(out, text)
    left = array.array("i", [1])
    wait_until(lambda: not fcntl.ioctl(source, termios.FIONREAD, left) and not left[0])
    for sleeping in reversed(beside):
        sleeping.kill()
        sleeping.wait()
    os.close(out)
    with os.fdopen(passed, "rb") as file:
        assert file.read(len(text)) == text
    reader.join(30)
    assert reader.find_unreported().rank == 1
    os.close(source)
    os.close(target)


RAISES = """
import os, sys
from tfscale.comm import process
process.end_job_on_error(os._exit)
raise RuntimeError(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("text", "is_told"), [("{{node x}} TFSCALE_FAILED: rank 1 is gone", True), ("bad data", False)]
)
def test_a_rank_whose_own_step_is_ended_by_communication_is_not_the_cause(text, is_told):
    status = process.create()
    environ = {**os.environ, process.STATUS_VARIABLE: process.path_of(status)}
    words = [sys.executable, "-c", RAISES, text]
    ended = subprocess.run(words, env=environ, pass_fds=[status])
    found = report_end(LAUNCH, ended.returncode, process.read(status), was_stopped=False)
    os.close(status)
    assert text in found.error and found.is_told == is_told


def wait_until(is_true):
    deadline = time.monotonic() + 30
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("state", "was_stopped", "failures", "others"),
    [
        ("", False, [3, -9], [0]),
        (STARTING, False, [0, 3, -9], []),
        (JOINED, False, [0, 3, 75, -9], []),
        (FINISHED, False, [], [0, 3, 75]),
        (ALONE, False, [], [0, 3, -9]),
        (RAISED, False, [1], [0]),
        (TOLD, False, [0, 1], []),
        (WAITING, False, [1], []),
        (LEAVING, False, [0, 5], []),
        (LEFT, False, [0, 5], []),
        (JOINED, True, [-9], [75, -15]),
        ("", True, [], [75]),
    ],
)
def test_which_ends_are_failures(state, was_stopped, failures, others):
    for code in (*failures, *others):
        report = report_end(LAUNCH, code, RankStatus(state), was_stopped)
        assert report.is_failure == (code in failures) and report.rank == 2
        assert bool(report.exit_code) == (code != 0 or code in failures)
        assert report.has_left == (state == LEFT) and report.is_told == (state in (WAITING, TOLD))
        assert report.has_joined == (state not in ("", STARTING, WAITING, ALONE))
        assert report.is_starting == (state in (STARTING, WAITING))


def test_75_needs_a_request():
    for state in (JOINED, FINISHED, LEAVING, ""):
        alone = report_end(LAUNCH, 75, RankStatus(state), False)
        assert alone.exit_code == 1 and "there was no request" in alone.describe()
        for was_asked in (True, False):
            report = report_end(LAUNCH, 75, RankStatus(state, was_asked=was_asked), not was_asked)
            assert report.exit_code == 75 and not report.is_failure


def test_where_a_rank_failed_that_has_not_joined():
    for state, where in (("", "before"), (STARTING, "in"), (WAITING, "in"), (ALONE, "before")):
        text = report_end(LAUNCH, 3, RankStatus(state), False).describe()
        assert f"failed with exit status 3, {where} tfscale.init().\n" in text


def test_each_traceback_is_shown_once_and_that_of_the_failure_last():
    told = [Report(n, "a", 1, None, True, True, error="left\n", is_told=True) for n in (0, 3, 2)]
    failed = Report(1, "a", 1, None, True, True, error="bad sample\n")
    silent = Report(4, "a", 0, None, False, True)
    assert describe_errors([failed, *told, silent], failed) == (
        "left\ntfscale: the traceback of ranks 0, 2, 3.\nbad sample\n"
    )
    assert describe_errors([failed], None) == "bad sample\ntfscale: the traceback of rank 1.\n"
    assert describe_errors([silent], None) == ""


@pytest.fixture
def pulse():
    """Two ranks on two hosts that have been heard once."""
    pulse = Pulse()
    for beat in (A, B):
        pulse.hear(beat, 0)
    return pulse


A, B = Beat(0, "a"), Beat(1, "b")


def first_lost(pulse, seconds):
    """Hear rank 0 every second; return the second in which another is lost, or None."""
    for now in range(1, seconds):
        pulse.hear(A, now)
        if pulse.find_lost(now):
            return now, pulse.find_lost(now)
    return None


def test_a_silent_host_is_lost_unless_its_rank_ended_or_another_is_heard(pulse):
    assert first_lost(pulse, 60) == (23, B)
    pulse.forget(1)
    assert first_lost(pulse, 60) is None
    shared = Pulse()
    shared.hear(Beat(1, "a"), 0)
    assert first_lost(shared, 60) is None


def test_a_blocked_launcher_hears_nobody(pulse):
    assert pulse.find_lost(100) is None
    pulse.hear(A, 100)  # what piled up arrives host by host
    assert pulse.find_lost(100.1) is None
    pulse.hear(B, 100.2)
    assert all(pulse.find_lost(100.3 + i / 10) is None for i in range(30))


@pytest.mark.parametrize(
    ("call", "code"),
    [(f"write_state({FINISHED!r})", 0), (f"write_state({ALONE!r})", 0), ("write_request()", 75)],
)
def test_a_rank_that_has_left_ends_nobody(call, code):
    """mpirun and srun end all ranks when one ends with another status than 0."""
    leave = f"process.write_request(); process.{call}; "
    program = f"from tfscale.comm import process; import sys; {leave}sys.exit(75)"
    command = [sys.executable, "-m", "tfscale.launcher.rank_process", "--"]
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True)
    assert done.returncode == code
    assert [report.exit_code for report in read(done.stderr)[1]] == [75]


def trained(*texts):
    reports = [Report(n, "a", 0, None, False, True, training=t) for n, t in enumerate(texts)]
    return describe_training(reports)


def test_closing_lines_say_what_to_try_next():
    assert trained("", "") == ""  # trained nothing
    text = trained("0.30 1500000 allreduce 0 32", "0.10 1500000 allreduce 0 32")
    assert (
        "the last steps spent 20 % of their time waiting" in text
        and "a step exchanges 1.5 MB" in text
    )
    assert "--exchange auto" in text and "more ranks" not in text
    assert "--exchange auto" not in trained("0.30 1500000 mixed 0 32", "")
    assert "a step exchanges 102 MB" in trained("0.30 102400000 allreduce 0 32", "")
    # Nothing is advised that is in use.
    assert "int8" in trained("0.30 1500000 sharded 0 16", "")
    assert "ompression" not in trained("0.30 1500000 sharded 0 8", "")
    assert "was still measuring" in trained("0.30 1500000 undecided 0 32", "")
    little = ("0.04 1500000 allreduce 0 32", "0.01 1500000 allreduce 0 32")
    assert "try next: more ranks. See " in trained(*little)
    # What is sent is so little that another way to send it would change nothing.
    text = trained("0.30 40000 allreduce 0 32", "")
    assert "exchanges 0.04 MB" in text and "larger batches or fewer ranks" in text
    assert "exchange=" not in text and "bf16" not in text
    # On one of the hosts ranks outnumber cores.
    text = trained("0.30 1500000 allreduce 0 32", "0.30 1500000 allreduce 1 32")
    assert "next: fewer ranks" in text and "bf16" not in text and "larger batches" not in text
    assert "next: no more ranks" in trained("0.01 1500000 allreduce 1 32", "")


def test_start_messages_of_this_process_are_hidden(capfd):
    with without_start_messages():
        os.write(2, b"I0000 00:00:1795996890.667772   19449 port.cc:153] oneDNN is on.\n")
        os.write(2, b"A warning of the user's model.\n")
    os.write(2, b"Afterwards.\n")
    assert capfd.readouterr().err == "A warning of the user's model.\nAfterwards.\n"
