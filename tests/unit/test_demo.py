"""`tfscale demo`: its chart, its words, the cores of its ranks, and one short run on two ranks."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.helpers.launching import run_in_folder
from tfscale.launcher import cli, demo
from tfscale.launcher.demo import Curve

ALONE = Curve("1", "one process on 1 CPU", [0.0, 2.0, 4.0, 8.0], [5.0, 4.0, 3.0, 1.0])
TWO = Curve("2", "2 ranks on 1 CPU each", [0.0, 1.0, 2.0, 4.0], [5.0, 4.0, 3.0, 1.0])
CHART = """\
  loss
  5.00 |21
       | 21
       |  2111
       |   2  1
  1.00 |    2  11
       +---------
        0   8.0 s
        1: one process on 1 CPU, 2: 2 ranks on 1 CPU each
"""


def test_the_chart_has_losses_by_time():
    assert demo.draw([ALONE, TWO], width=9, height=5) == CHART


def test_the_chart_of_a_single_step_and_of_equal_losses_is_a_line():
    one = Curve("1", "one", [0.0], [2.0])
    lines = demo.draw([one, one._replace(mark="2")], width=4, height=3).splitlines()
    assert lines[1] == "  2.00 |2222" and lines[2].strip() == "|" and lines[-2].endswith("0.0 s")
    assert set("".join(demo.draw([ALONE._replace(losses=[3.0] * 4)]).splitlines()[2:15])) <= {
        *" |1.0123456789"
    }


def test_smoothing_keeps_lengths_and_constants():
    assert demo.smooth([3.0], 2) == [3.0]
    assert demo.smooth([2.0] * 7, 3) == [2.0] * 7
    assert demo.smooth([0.0, 3.0, 6.0, 3.0], 1) == [1.5, 3.0, 4.0, 4.5]
    assert demo.smooth([1.0, 2.0], 0) == [1.0, 2.0]


def test_the_picture_has_a_line_for_each_training():
    picture = ET.fromstring(demo.draw_svg([ALONE._replace(label="one & only"), TWO]))
    names = {"svg": "http://www.w3.org/2000/svg"}
    points = [line.attrib["points"] for line in picture.findall("svg:polyline", names)]
    assert [line.split()[0] for line in points] == ["60.0,40.0"] * 2  # the same first loss
    assert [line.split()[-1] for line in points] == ["620.0,310.0", "340.0,310.0"]
    texts = [text.text for text in picture.findall("svg:text", names)]
    assert {"one & only", TWO.label, "5.00", "1.00", "8.0 s"} <= {*texts}


@pytest.mark.parametrize(
    ("factor", "n_cores", "load", "expected"),
    [
        (2.0, 4, 0.0, "2.00 times as fast.|could use all CPUs"),
        (2.0, 1, 9.0, "2.00 times as fast.|Do not count on that: the ranks share cores"),
        (0.5, 1, 0.0, "2.00 times as slow.|not faster: they share cores."),
        (1.0, 2, 9.0, ": about as fast.|not faster: other programs use the cores (load 9.0)."),
        (1.0, 2, 0.0, ": about as fast.|not faster: they wait for each other's messages"),
    ],
)
def test_the_last_lines_say_what_ranks_gained(factor, n_cores, load, expected):
    together = TWO._replace(
        seconds=[s / factor for s in ALONE.seconds], losses=[5.0, 4.0, 3.0, 1.25]
    )
    text = demo.describe_end(ALONE, together, 2, n_cores, load)
    assert "The same 4 steps took 8.0 s on one process on 1 CPU, and" in text
    assert "differ by at most 0.2.\n" in text
    assert all(part in text for part in expected.split("|")), text


def test_losses_that_differ_by_rounding_are_those_of_the_same_training():
    together = TWO._replace(losses=[5.0, 4.0, 3.0, 1.0001])
    text = demo.describe_end(ALONE, together, 2, 2, 0.0)
    assert "differ by at most 0.0001: the same training, up to rounding.\n" in text


def test_too_few_cores_and_a_busy_machine_are_said_before_the_training():
    assert "1 core for 2 ranks: they will not be faster" in demo.describe_start(2, 1, 0.0)
    assert "tfscale run -H host1,host2" in demo.describe_start(4, 2, 0.0)
    assert "busy (load 3.0, 4 cores)" in demo.describe_start(2, 4, 3.0)
    assert len(demo.describe_start(2, 4, 1.0).splitlines()) == 1


@pytest.mark.parametrize(
    ("cpus", "size", "n_cores", "expected"),
    [
        ([0, 1], 2, 2, [[0], [1]]),
        ([0], 2, 1, [[0], [0]]),
        ([4, 5, 6, 7, 8], 2, 5, [[4, 5], [6, 7]]),
        ([0, 4, 1, 5], 2, 2, [[0], [1]]),  # threads of a core side by side, and a quota of 2
        ([0, 1], 3, 2, [[0], [0], [1]]),
    ],
)
def test_ranks_have_equally_many_cores(cpus, size, n_cores, expected):
    assert [demo.share_of(cpus, rank, size, n_cores) for rank in range(size)] == expected


def test_threads_of_a_core_stand_beside_each_other():
    assert demo.cores_by_unit({3, 0, 1, 2}, lambda cpu: str(cpu % 2)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-np", "1"], "-np must be 2 or more. Received: -np=1."),
        (["--seconds", "1"], "--seconds must be in [4, 600]. Received: --seconds=1.0."),
        (["--svg", "/no/such/folder/a.svg"], "Received: /no/such/folder/a.svg. Choose another"),
    ],
)
def test_refused_options(words, expected, capsys):
    assert cli.main(["demo", *words]) == 2
    assert expected in capsys.readouterr().err


def test_without_mpi_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cli.mpi_command, "find_mpi", lambda *_: None)
    monkeypatch.setattr(cli.mpi_command, "find_tool", lambda *_: None)
    monkeypatch.setattr(cli, "_prepare_library", lambda *_: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["demo"]) == 2
    told = capsys.readouterr().err
    assert "pip install mpich" in told and "`tfscale doctor` says what to do" in told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_train_what_one_process_trains(tmp_path):
    words = ["tfscale.launcher.cli", "demo", "--seconds", "4", "--svg", "chart.svg"]
    done = run_in_folder([sys.executable, "-m", *words], tmp_path, 280)
    assert done.exit_code == 0, done.output + done.errors
    text = done.output
    marks = {character for line in text.splitlines() if " |" in line for character in line[8:]}
    assert {"1", "2"} <= marks
    assert float(re.search(r"differ by at most (\S+):", text)[1]) < 1e-3
    assert text.index("The same ") < text.index("Next steps:") and "tfscale convert" in text
    assert ET.parse(tmp_path / "chart.svg").getroot().tag.endswith("svg")
