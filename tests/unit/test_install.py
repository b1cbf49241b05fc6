"""`make venv` says what pip installs, and shows a bar on a terminal."""

import io
import subprocess
import sys

import pytest

from tools import install

PIP = """
import sys, time
print("Collecting keras>=3.10 (from tfscale==0.1.0)")
print("  Downloading https://a/keras-3.15.1-py3-none-any.whl (1.6 MB)", flush=True)
time.sleep(1)  # the bar is drawn every 0.25 s: it must have been drawn in between
print("Installing collected packages: keras, numpy, tfscale")
print(sys.argv[1:])
if "broken" in sys.argv:
    sys.exit("ERROR: no such package")
print("Successfully installed numpy-2.0.0 keras-3.15.1 tfscale-0.1.0")
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def install_with(out, *words):
    def run(pip, **options):
        return subprocess.Popen([sys.executable, "-c", PIP, *pip], **options)

    return install.install(words, out, run)


def test_a_file_gets_what_is_installed_and_what_was():
    out = io.StringIO()
    assert install_with(out, "--no-compile", "-e", ".[mpich]") == 0
    first, last = out.getvalue().splitlines()
    assert first.startswith("Installing .[mpich] into ")
    assert last.startswith("Installed 3 packages in ")
    assert last.endswith(" s: keras-3.15.1, 2 more")


def test_a_terminal_gets_a_bar_that_moves_and_is_removed():
    out = Terminal()
    assert install_with(out, "keras") == 0
    *bars, last = out.getvalue().split("\r\x1b[K")
    places = {bar.index("###") for bar in bars if "###" in bar}
    assert len(places) >= 2 and last.startswith("Installed 3 packages")
    assert any("downloading keras-3.15.1 (1.6 MB)" in bar for bar in bars)


def test_a_failure_shows_all_that_pip_has_printed():
    out = io.StringIO()
    assert install_with(out, "broken") == 1
    assert "Collecting keras" in out.getvalue() and "ERROR: no such package" in out.getvalue()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Collecting tensorflow>=2.18", "looking for tensorflow>=2.18"),
        ("  Downloading a/b-1-py3-none-any.whl (2 MB)\n", "downloading b-1 (2 MB)"),
        ("Installing collected packages: a, b, c\n", "installing 3 packages"),
        ("Requirement already satisfied: a", ""),
    ],
)
def test_lines_of_pip(line, expected):
    assert install.describe(line) == expected


def test_the_bar_fits_into_its_line_and_stays_in_its_frame():
    for quarter in range(200):
        line = install.draw(quarter / 4, "x" * 100, 60).removeprefix("\r\x1b[K")
        bar = line[1:].partition("]")[0]
        assert len(line) == 59 and len(bar) == 24 and bar.strip(".") == "###"
