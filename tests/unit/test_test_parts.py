"""The units of `make test-all` and how they are dealt out."""

import argparse
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
    folders = {f"tests/{p.parent.name}" for p in TESTS.glob("*/test_*.py")}
    assert folders - {"tests/bench"} <= named  # tests/bench is part of `make check`


def test_parts_are_read():
    assert parts.parse_part("2/3") == (2, 3) and parts.parse_part("1/1") == (1, 1)
    for text in ("0/2", "3/2", "2", "1/0", "a/b", "-1/2"):
        with pytest.raises(argparse.ArgumentTypeError, match="k from 1 to n"):
            parts.parse_part(text)


def test_units_without_enough_time_are_left_out_and_named(capsys):
    assert parts.main(["--list", "--minutes", "17", "--only", "ranks"]) == 0
    said = capsys.readouterr().out
    assert "== 2 ranks" in said and "== 3 ranks" not in said  # 8 + 1.4 * 7 > 17
    assert "Left out, as 17 minutes are too few: 3 ranks, 4 ranks." in said
