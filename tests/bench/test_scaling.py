"""Speedup over one process from runs in places where layers sleep."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, scaling


def run(place, system, step_s):
    n_ranks = int(place.partition("-")[2].partition("x")[0])
    return {
        "suite": "step",
        "group": f"resnet50 {place}",
        "system": system,
        "place": place,
        "n_ranks": n_ranks,
        "samples": {"resnet50": [step_s]},
    }


def runs(*places):
    seconds = {"compute": 1.0, "tcp": 0.5, "tfscale-sharded": 1.25}
    return [run(place, system, s) for place in places for system, s in seconds.items()]


def test_weak_and_strong_series_are_told_apart():
    listed = scaling.series_of(runs("sleep-2x1@1gbit", "sleep-4x1@1gbit", "sleep0.5-2x1@1gbit"))
    weak, strong = listed
    assert weak.title == "resnet50, 1gbit, 8 samples on each rank"
    assert weak.speedups["tfscale-sharded"] == pytest.approx({2: 1.6, 4: 3.2})
    assert weak.speedups["limit"] == pytest.approx({2: 2, 4: 4})
    assert strong.title == "resnet50, 1gbit, 32 samples on all ranks"
    assert set(strong.speedups["tfscale-sharded"]) == {2, 4}
    assert "1.60 (0.80)" in scaling.series_table(weak)


def test_one_number_of_ranks_is_no_series():
    assert scaling.series_of(runs("sleep-2x1@1gbit")) == []


def test_the_legend_names_the_systems_of_all_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first panel may lack some."""
    drawn: list[Any] = []
    monkeypatch.setattr(pictures, "save", lambda figure, path, made: drawn.append(figure))
    ours = scaling.Series("a", {"tfscale-sharded": {2: 2.0, 4: 3.9}})
    both = scaling.Series("b", {"tfscale-sharded": {2: 2.0, 4: 3.8}, "horovod": {2: 1.9, 4: 2.8}})
    scaling.draw([ours, both], tmp_path / "scaling.png", "")
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["tfscale sharded", "Horovod"]
