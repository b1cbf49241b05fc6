"""ThetaMonitor: theta of each record by hand, peaks, a run that resumes, reports drawn again."""

import json

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.ranks import InterruptAt, Interruption
from tests.unit.adaptive_model import make_data, make_model
from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.callbacks import BackupAndRestore, ThetaMonitor
from tfscale.config import ConfigError
from tfscale.files import write_json_lines
from tfscale.launcher.cli import main
from tfscale.measure.theta import write_report


def train(folder, *callbacks, every=3, at_once=1):
    model, data = make_model(keras.optimizers.SGD(0.05)), make_data()
    model.steps_per_execution = at_once
    monitor = ThetaMonitor(folder, every)
    try:
        history = model.fit(data, epochs=4, verbose=0, callbacks=[*callbacks, monitor]).history
    except Interruption:
        history = {}
    rows = [json.loads(line) for line in (folder / "theta.jsonl").read_text().splitlines()]
    return model, history, rows


@pytest.mark.parametrize("every", [1, 3, None])
def test_theta_is_that_of_the_losses_and_parameters(tmp_path, every):
    losses, weights = [], []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: (
            losses.append(logs["loss"] * (batch + 1)),  # Keras's is the mean over the epoch
            weights.append([w.copy() for w in note.model.get_weights()]),
        )
    )
    start = make_model(keras.optimizers.SGD(0.05)).get_weights()
    _, history, rows = train(tmp_path, note, every=every)
    n_steps = len(losses) // 4
    own = np.diff(losses, prepend=0)
    own[::n_steps] = losses[::n_steps]  # the first of each epoch
    updates = list(range(every or n_steps, len(losses) + 1, every or n_steps))
    assert [row["update"] for row in rows] == updates
    for row, before, now in zip(rows, [0, *updates], updates, strict=False):
        moves = (a - b for a, b in zip(weights[now - 1], start, strict=True))
        distance = np.sqrt(sum(float(np.sum(move**2)) for move in moves))
        assert row["distance"] == pytest.approx(distance, rel=1e-5)
        assert row["loss"] == pytest.approx(np.mean(own[before:now]), rel=1e-4)
        theta = (losses[0] - row["loss"]) / row["distance"]
        assert row["theta"] == pytest.approx(theta, rel=1e-4)
    peak = max(rows, key=lambda row: row["theta"])
    assert history["theta_peak_update"][-1] == peak["update"]
    assert f"at update {peak['update']}" in (tmp_path / "theta.md").read_text()


def test_the_last_execution_may_have_fewer_steps(tmp_path):
    """8 steps in an epoch, three at a time: 3, 3 and 2."""
    _, _, singles = train(tmp_path / "one", every=1)
    _, _, rows = train(tmp_path / "three", every=2, at_once=3)
    updates = [epoch + n for epoch in (0, 8, 16, 24) for n in (3, 6, 8)]
    assert [row["update"] for row in rows] == updates
    for row, before in zip(rows, [0, *updates], strict=False):
        own = [single["loss"] for single in singles[before : row["update"]]]
        assert row["loss"] == pytest.approx(np.mean(own), rel=1e-4)


@pytest.mark.parametrize("every", [3, 15])
def test_a_resumed_run_has_the_record_of_an_undisturbed_one(every, tmp_path):
    """The epoch that is trained again has 8 updates: it may have none that is recorded."""
    keras.config.set_floatx("float32")
    _, whole, expected = train(tmp_path / "whole", every=every)
    backup = str(tmp_path / "backup")
    train(tmp_path / "cut", BackupAndRestore(backup), InterruptAt(2, 1), every=every)
    _, history, rows = train(tmp_path / "cut", BackupAndRestore(backup), every=every)
    assert rows == expected and history["theta"] == whole["theta"][-2:]


def test_reports_are_written_again_from_the_record(tmp_path, capsys):
    train(tmp_path)
    text = (tmp_path / "theta.md").read_text()
    (tmp_path / "theta.md").unlink()
    (tmp_path / "theta.png").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (tmp_path / "theta.md").read_text() == text
    assert (tmp_path / "theta.png").stat().st_size > 1000
    for thetas, told in (
        ([1.0, 2.0, 3.0], "it has not peaked"),
        ([3.0, 2.0, None], "it falls from there on"),
    ):
        rows = [{"update": i + 1, "epoch": i, "theta": theta} for i, theta in enumerate(thetas)]
        write_json_lines(tmp_path / "theta.jsonl", rows)
        assert told in write_report(tmp_path)


def test_norms_need_two_ranks(tmp_path):
    model = make_model()
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ConfigError, match="needs two ranks or more"):
        model.fit(make_data(), verbose=0, callbacks=[ThetaMonitor(tmp_path, has_norms=True)])
