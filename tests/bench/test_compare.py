"""The comparison of two files."""

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
