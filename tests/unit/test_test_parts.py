"""The units of `make test-all` and how they are dealt out."""

import argparse
import math
import re
from pathlib import Path

import pytest

from tools import test_all as parts

TESTS = Path(__file__).resolve().parents[1]


def test_every_unit_is_in_exactly_one_part_and_parts_are_about_as_long():
    for n_parts in (1, 2, 3, 20):
        dealt = parts.deal_out(parts.UNITS, n_parts)
        assert len(dealt) == n_parts
        assert sorted(u.name for part in dealt for u in part) == sorted(u.name for u in parts.UNITS)
    minutes = [sum(u.minutes for u in part) for part in parts.deal_out(parts.UNITS, 3)]
    assert max(minutes) <= 1.15 * sum(minutes) / 3


def test_every_folder_of_tests_is_run():
    named = {word for unit in parts.UNITS for word in unit.words if word.startswith("tests/")}
    makefile = (TESTS.parent / "Makefile").read_text()
    for unit in parts.UNITS:
        if unit.tool == "make":  # its target says which tests
            (recipe,) = re.findall(rf"^{unit.words[0]}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
            named |= set(re.findall(r"tests/\S+", recipe))
    paths = {p.relative_to(TESTS.parent) for p in TESTS.glob("*/test_*.py")}
    left_out = {p for p in paths if not named & {str(p), str(p.parent)}}
    assert {p.parent.name for p in left_out} == {"bench"}  # part of `make check`


def test_ci_begins_with_every_unit_in_turn():
    """Its `--first` grows by 5 with each commit."""
    assert math.gcd(5, len(parts.UNITS)) == 1


def test_parts_are_read():
    assert parts.parse_part("2/3") == (2, 3) and parts.parse_part("1/1") == (1, 1)
    for text in ("0/2", "3/2", "2", "1/0", "a/b", "-1/2"):
        with pytest.raises(argparse.ArgumentTypeError, match="k from 1 to n"):
            parts.parse_part(text)


def test_units_without_enough_time_are_left_out_and_named(capsys):
    assert parts.main(["--list", "--minutes", "40", "--only", "[234] ranks"]) == 0
    said = capsys.readouterr().out
    assert "== 2 ranks" in said and "== 3 ranks" in said and "== 4 ranks" not in said
    assert "Left out, as 40 minutes are too few: 4 ranks." in said


def test_units_are_left_out_sooner_where_the_machine_is_slow(capsys, monkeypatch):
    now = iter(range(0, 10**6, 60 * 30))  # each unit takes half an hour
    monkeypatch.setattr(parts.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(parts, "run", lambda *arguments: (0, []))
    assert parts.main(["--minutes", "55", "--only", "[234] ranks"]) == 0  # 20, 14, 14 as usual
    said = capsys.readouterr().out
    assert "30.0 min  passed  2 ranks" in said
    assert "Left out, as 55 minutes are too few: 3 ranks, 4 ranks." in said  # 30 + 1.25 * 21 > 55


def test_what_a_failed_unit_printed_last_is_printed_again_at_the_end(capfd):
    n_lines = parts.LAST_LINES + 9
    unit = parts.Unit(
        "fails", 1.0, ("-c", f"for i in $(seq {n_lines}); do echo line $i; done; false"), "sh"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "UNITS", (unit, parts.Unit("passes", 1.0, (), "true")))
        assert parts.main([]) == 1
    said = capfd.readouterr().out.splitlines()
    again = said.index("== the end of fails")
    assert said[1] == "line 1" and again > said.index("== passes, about 1 min")
    assert said[again + 1 : again + 3] == ["line 10", "line 11"] and said[-4] == f"line {n_lines}"
    assert "FAILED (1)  fails" in said[-3] and "passed  passes" in said[-2]


def test_another_unit_comes_first(capsys):
    names = [unit.name for unit in parts.UNITS]
    for first in (0, 3, len(names) + 3):
        assert parts.main(["--list", "--first", str(first)]) == 0
        said = [
            line.split(",")[0][3:] for line in capsys.readouterr().out.splitlines() if "==" in line
        ]
        k = first % len(names)
        assert said == [name.split(",")[0] for name in names[k:] + names[:k]]
