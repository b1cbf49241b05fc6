"""The comparison of two files."""

import json
import sys

import compare as program
import pytest
from compare import compare


def _content(seconds, system="tfscale-allreduce"):
    run = {"suite": "step", "group": "g", "system": system, "samples": {"vgg": seconds}}
    return {"runs": [run]}


def test_compare_tells_slower_from_noise():
    old = _content([1.0, 1.1, 1.2])
    assert compare(old, _content([1.0, 1.5, 2.0]), 0.1)[1] is False  # spreads overlap
    lines, is_worse = compare(old, _content([2.0, 2.1, 2.2]), 0.1)
    assert is_worse
    assert lines[0].endswith("SLOWER")
    assert compare(_content([2.0], "horovod"), _content([9.0], "horovod"), 0.1)[1] is False
    assert "faster" in compare(old, _content([0.5, 0.5, 0.5]), 0.1)[0][0]


@pytest.mark.parametrize(
    ("suite", "case", "is_ours"),
    [("single", "tfscale", True), ("single", "keras", False), ("report", "without", True)],
)
def test_compare_knows_ours_in_suites_that_measure_both(suite, case, is_ours):
    old, new = (
        {"runs": [{"suite": suite, "group": "g", "system": "both", "samples": {case: [seconds]}}]}
        for seconds in (1.0, 2.0)
    )
    lines, is_worse = compare(old, new, 0.1)
    assert lines[0].endswith("SLOWER")
    assert is_worse is is_ours


def test_compare_names_what_is_missing_and_what_failed():
    new = _content([1.0])
    old = {"runs": new["runs"] + _content([1.0], "horovod")["runs"]}
    lines, is_worse = compare(old, new, 0.1)
    assert is_worse and lines[0].split() == ["step", "g", "vgg", "horovod", "MISSING"]
    assert compare(new, old, 0.1)[1] is False  # more than there was
    failed = {"suite": "step", "group": "g", "system": "tfscale-allreduce", "error": "killed"}
    for runs in ([failed], [*new["runs"], failed]):  # all rounds, and one of them
        lines, is_worse = compare(new, {"runs": runs}, 0.1)
        assert is_worse and not any("MISSING" in line for line in lines)
        assert lines[0].split() == ["step", "g", "tfscale-allreduce", "FAILED"]


def test_older_files_are_compared_with_newer_ones(tmp_path, monkeypatch, capsys):
    runs = [{**_content([1.0])["runs"][0], "commit": "abc"}]
    about = {"machine": {"cpu": "A"}, "versions": {"keras": "3"}, "commit": "abc"}
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps({**about, "runs": runs}))
    later = {**about, "machine": {"cpu": "B"}}
    new.write_text(json.dumps({"sessions": {"s": later}, "runs": [{**runs[0], "session": "s"}]}))
    monkeypatch.setattr(sys, "argv", ["compare.py", str(old), str(new)])
    assert program.main() == 0
    told = capsys.readouterr().out
    assert 'machine differs: {"cpu": "A"} / {"cpu": "B"}' in told
    assert "versions differs" not in told
