"""Begun on four ranks, resumed with two, then with three: as if undisturbed."""

import numpy as np
import pytest

from tests.helpers.spawn import spawn

TOLERANCE = 1e-10


@pytest.mark.quick
@pytest.mark.timeout(0)
def test_other_numbers_of_ranks(tmp_path):
    """Weights, complete state, loss and metrics of the last epoch; float64."""
    for size, case in ((4, "begin"), (2, "go_on"), (3, "finish")):
        name = f"tests.parallel.checkpoint_resume_cases:{case}"
        results = spawn(size, [name], 500.0, {"RESUME_FOLDER": str(tmp_path)})
        bad = [f"rank {r.rank}: {r.status}\n{r.text}" for r in results if r.status != "ok"]
        assert not bad, "\n".join(bad)
    for name in ("allreduce", "sharded", "growing", "passes"):
        for size in (2, 3):
            with np.load(tmp_path / f"{name}-whole.npz") as whole:
                found = np.load(tmp_path / f"{name}-{size}.npz")
                assert found.files == whole.files
                for key in whole.files:
                    np.testing.assert_allclose(
                        found[key], whole[key], rtol=0, atol=TOLERANCE, err_msg=f"{name} {key}"
                    )
