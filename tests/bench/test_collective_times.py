"""Allreduces by size and place, in blocks."""

import pytest

from benchmarks import collective_times as times

SESSION = {
    "machine": {"cpu": "AMD", "n_cores": 2},
    "versions": {"mpi": "mpich 5", "tensorflow": "2.21"},
    "created": "today",
}


def _runs(system, ms_of_blocks, place="4x1@1gbit"):
    return [
        {
            **{"suite": "collectives", "group": place, "place": place, "system": system},
            **{"round": block, "session": "s", "commit": "abc", "load": [0.5]},
            "samples": {str(n): [ms / 1e3] for n in times.SIZES},
        }
        for block, ms in enumerate(ms_of_blocks)
    ]


def test_a_size_is_lost_where_the_interval_says_so():
    noisy, slow = [1.0, 1.2, 0.9, 1.1, 1.0], [2.0, 2.4, 1.8, 2.2, 2.0]
    runs = [*_runs("engine", slow), *_runs("mpi", noisy)]
    one = times.compare(runs, "4x1@1gbit", 1024, "engine", "mpi")
    assert one.is_slower and one.ratio.median == pytest.approx(0.5)
    assert (one.ours_s, one.other_s) == (2.0e-3, 1.0e-3)
    others = [1.1, 1.0, 1.0, 1.0, 1.1]  # before and after
    runs = [*_runs("engine", noisy), *_runs("mpi", others)]
    assert not times.compare(runs, "4x1@1gbit", 1024, "engine", "mpi").is_slower
    assert times.compare(runs, "4x1@1gbit", 1024, "engine", "open-mpi") is None


def test_the_page_counts_sizes_and_names_who_is_faster(tmp_path):
    runs = [*_runs("tfscale", [1.0] * 5), *_runs("horovod", [2.0] * 5)]
    runs += [*_runs("engine", [3.0] * 5), *_runs("mpi", [2.0] * 5)]
    runs += [*_runs("engine", [1.0] * 5, "1x2@memory"), *_runs("mpi", [1.0] * 5, "1x2@memory")]
    content = {"sessions": {"s": SESSION}, "runs": runs}
    found = times.comparisons(runs)
    page = times.page(content, found)
    assert "Not slower in 10 of 20 cells." in page
    line = "| 1,024 | 3 | 2 | 0.67 (0.67..0.67) | 1 | 2 | 2.00 (2.00..2.00) | mpi |"
    assert line in page
    times.draw(content, found, tmp_path / "collectives.png")
    assert (tmp_path / "collectives.png").stat().st_size > 0


def test_the_program_is_read_by_size(monkeypatch):
    def run(place, n_ranks, command, extra, timeout_s):
        with open(extra["BENCH_LOG"], "w") as log:
            log.write(
                "     bytes     engine        MPI   ratio\n      1024      0.500      0.250\n"
            )

    monkeypatch.setattr(times, "run_ranks", run)
    found = times.time_program(times.Path("program"), "2x2@1gbit")
    assert found == {"engine": {"1024": [5e-4]}, "mpi": {"1024": [2.5e-4]}}
