"""The tool that tests with other versions of TensorFlow and Keras."""

import argparse

import pytest

from tools import test_versions as tool


def test_pairs():
    assert tool.requirements_of("2.20/3.13") == ("tensorflow==2.20.*", "keras==3.13.*")
    assert tool.requirements_of("coming") == ("tf-nightly", "keras-nightly")
    for text in ("2.20", "latest", "2.20/", "2.20/3.13/3"):
        with pytest.raises(argparse.ArgumentTypeError, match="as 2.20/3.13. Received: "):
            tool.requirements_of(text)


def test_a_table_is_written_and_failures_are_its_status(monkeypatch, tmp_path, capsys):
    rows = {
        "lowest": tool.Row("2.18.1", "3.10.0", "3.11.7", "90 passed", 8.4),
        "2.20/3.13": tool.Row("2.20.0", "3.13.2", "3.11.7", "1 failed, 89 passed", 8.0),
    }
    monkeypatch.setattr(tool, "prepare", lambda pair, python: pair)
    monkeypatch.setattr(tool, "test", lambda pair, is_whole, words: rows[pair])
    assert tool.main(["lowest", "--output", str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text()
    assert table == f"{tool.HEADER}\n| 2.18.1 | 3.10.0 | 3.11.7 | 90 passed | 8 min |\n"
    assert table in capsys.readouterr().out
    assert tool.main(list(rows)) == 1
    with pytest.raises(SystemExit):
        tool.main(["lowest", "newest"])
    assert "a pair must be lowest, highest, coming or" in capsys.readouterr().err
