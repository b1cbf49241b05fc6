"""Tables whose rows are spread over the ranks: jobs of their own."""

import numpy as np
import pytest

from tests.helpers.launching import launch_script
from tests.parallel.test_resume import require_equal
from tfscale.testing import require_ok, spawn


def run(size: int, case: str, folder, name: str = "", **env: str) -> list:
    variables = {"TABLE_FOLDER": str(folder), "TABLE_RUN": name, **env}
    return spawn(size, [f"tests.parallel.table_runs:{case}"], 200.0, variables)


@pytest.mark.timeout(0)
def test_other_numbers_of_ranks_resume(tmp_path):
    """Rows and slots are those of a run on one rank that nothing interrupted: 1e-10."""
    require_ok(run(1, "train", tmp_path / "whole", "whole"))
    for size, epoch in ((2, "0"), (3, "1")):
        require_ok(run(size, "train_until", tmp_path / "cut", TABLE_EPOCH=epoch))
    require_ok(run(1, "train", tmp_path / "cut", "cut"))
    (tmp_path / "whole" / "whole.npz").rename(tmp_path / "whole.npz")
    (tmp_path / "cut" / "cut.npz").rename(tmp_path / "cut.npz")
    with np.load(tmp_path / "cut.npz") as found:
        assert len(found.files) > 8
    require_equal(tmp_path, "cut", "whole")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ["fit", "predict"])
def test_ids_that_are_no_rows(name, tmp_path):
    results = run(2, "ids_that_are_no_rows", tmp_path, name)
    assert [(r.status, r.text) for r in results if r.status != "ok"] == []


@pytest.mark.timeout(0)
def test_a_rank_that_predicts_alone(tmp_path):
    require_ok(run(2, "predict_alone", tmp_path, TFSCALE_SAVE_TIMEOUT_S="2"))


@pytest.mark.timeout(0)
def test_an_unchanged_script(tmp_path):
    require_ok(run(3, "unchanged_script", tmp_path))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("size", [2, 3])
def test_tables_that_a_script_reads(size, tmp_path):
    require_ok(run(size, "tied_tables", tmp_path))


LEFT_ALONE = """
import keras
import numpy as np
import tfscale
tfscale.init()
rows = tfscale.layers.ShardedEmbedding(50, 4, name="items")
model = keras.Sequential([keras.Input((3,), dtype="int64"), rows])
model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
tfscale.prepare(model)
ids = np.zeros((4, 3), "int64")
if tfscale.rank() == 0:
    calls = {
        "model.predict on rank 0": lambda: model.predict(ids, verbose=0),
        "model.save on rank 0": lambda: model.save("alone.keras"),
        "a call on rank 0": lambda: model(ids),
    }
    for what, call in calls.items():
        try:
            call()
        except tfscale.ExchangeError as error:
            assert what in str(error) and "items/embeddings" in str(error), error
            assert "rank 1 has left the job" in str(error), error
            assert error.__cause__ is None, error.__cause__
            assert error.__context__ is None or error.__suppress_context__, error.__context__
            print("told:", what, flush=True)
"""


@pytest.mark.timeout(0)
def test_a_rank_that_others_have_left():
    """Its errors are single ones, which name the table and the call."""
    output = launch_script(2, LEFT_ALONE, timeout_s=200.0).output
    for what in ("model.predict", "model.save", "a call"):
        assert f"told: {what} on rank 0" in output, output
