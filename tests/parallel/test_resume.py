"""Runs that other numbers of ranks resume end as if undisturbed: float64, 1e-10."""

import json

import numpy as np
import pytest

from tfscale.testing import require_ok, spawn


def run(size: int, case: str, folder, **env: str) -> None:
    name = f"tests.parallel.resume_cases:{case}"
    require_ok(spawn(size, [name], 500.0, {"RESUME_FOLDER": str(folder), **env}))


def require_equal(folder, name: str, whole: str) -> None:
    """Compare the arrays of a run with those of one that was not interrupted."""
    with np.load(folder / f"{name}.npz") as found, np.load(folder / f"{whole}.npz") as expected:
        assert found.files and found.files == expected.files
        for key in found.files:
            np.testing.assert_allclose(
                found[key], expected[key], rtol=0, atol=1e-10, err_msg=f"{name}: {key}"
            )


@pytest.mark.quick
@pytest.mark.timeout(0)
def test_checkpoints(tmp_path):
    """Weights, complete state, loss and metrics of the last epoch."""
    for size, case in ((4, "begin"), (2, "go_on"), (3, "finish")):
        run(size, case, tmp_path)
    for name in ("allreduce", "sharded", "growing", "passes"):
        for size in (2, 3):
            require_equal(tmp_path, f"{name}-{size}", f"{name}-whole")


@pytest.mark.timeout(0)
def test_groups_of_local_sgd(tmp_path):
    """Intervals that grow, averages on their way and a measured overlap, with other groups."""
    run(4, "begin_groups", tmp_path)
    run(2, "go_on_with_groups", tmp_path)


@pytest.mark.timeout(400)
def test_growing_batches(tmp_path):
    """Of sharded ranks, from a backup that rank 0 alone reads."""
    for size, name in ((1, "whole"), (3, "cut-1 3"), (2, "cut-2 6"), (1, "cut-3")):
        run(size, "grow", tmp_path, RESUME_RUN=name)
    require_equal(tmp_path, "cut-3", "whole")
    whole, cut = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    )
    for key in ("epoch", "batch_size", "interval", "next_rate_scale", "next_batch_size"):
        assert [line[key] for line in cut] == [line[key] for line in whole]
    thetas = [[line["theta"] for line in lines] for lines in (cut, whole)]
    np.testing.assert_allclose(*thetas, rtol=1e-9)
    assert [line["active_ranks"] for line in cut] == [3, 3, 3, 2, 2, 2, 1, 1, 1]
    assert len({line["batch_size"] for line in cut}) > 1
