"""PSNR, pictures, run folder and flags of the recipes."""

import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest
import training  # noqa: F401  its flags are defined once, and outlive those of a recipe
from metrics import psnr, psnr_of_enlarged
from run_folder import RunFolder

RANDOM = np.random.default_rng(0)


def _numpy_psnr(truth, restored):
    squared = (np.clip(restored, 0, 1).astype(np.float64) - truth) ** 2
    return 10 * np.log10(1 / squared.mean(axis=(1, 2, 3)))


def test_psnr_of_a_model_is_the_mean_over_pictures_whatever_the_batches():
    truth = RANDOM.random((7, 9, 7, 2)).astype(np.float32)
    restored = truth + np.float32(0.1) * RANDOM.standard_normal(truth.shape).astype(np.float32)
    expected = _numpy_psnr(truth, restored)
    np.testing.assert_allclose(psnr(truth, restored), expected, rtol=1e-5)
    np.testing.assert_allclose(psnr(truth, truth), 100.0, rtol=1e-5)  # none is infinite
    model = keras.Sequential([keras.Input((9, 7, 2)), keras.layers.Identity()])
    model.compile(loss="mse", metrics=[psnr])
    for batch_size in (1, 3, 7):
        logs = model.evaluate(restored, truth, batch_size=batch_size, verbose=0, return_dict=True)
        assert logs["psnr"] == pytest.approx(expected.mean(), rel=1e-5)


def test_psnr_of_enlarged_pictures_rounds_and_leaves_the_border_out():
    truth = RANDOM.integers(0, 256, (2, 30, 25, 3)).astype(np.float32) / 255
    restored = truth + RANDOM.uniform(-0.4, 0.4, truth.shape).astype(np.float32) / 255
    restored[:, :8], restored[:, -8:], restored[:, :, :8], restored[:, :, -8:] = 0.0, 9.0, -1.0, 0.5
    np.testing.assert_allclose(psnr_of_enlarged(2)(truth, restored), 100.0, atol=1e-3)
    restored[:, 8:-8, 8:-8] = truth[:, 8:-8, 8:-8] + np.float32(10 / 255)
    inner = np.s_[:, 8:-8, 8:-8]
    expected = _numpy_psnr(truth[inner], restored[inner])
    np.testing.assert_allclose(psnr_of_enlarged(2)(truth, restored), expected, rtol=1e-4)
    assert psnr_of_enlarged(2).__name__ == "psnr"


def _fit(folder, epochs, initial_epoch=0):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    model.compile(optimizer=keras.optimizers.SGD(schedule), loss="mse")
    x, y = RANDOM.random((16, 2)), RANDOM.random((16, 1))
    callback = RunFolder(folder, {"recipe": "test", "ranks": 1}, {"loss": 1.0})
    fit = {"epochs": epochs, "initial_epoch": initial_epoch, "verbose": 0}
    history = model.fit(x, y, validation_data=(x, y), callbacks=[callback], **fit)
    return history.history


def _lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_run_folder_holds_settings_one_line_per_epoch_and_a_picture(tmp_path):
    folder = tmp_path / "runs" / "name"
    _fit(folder, epochs=5)
    history = _fit(folder, epochs=3)  # replaces the first run
    lines = _lines(folder)
    seconds = lines[-1]["seconds"]
    expected = {"recipe": "test", "ranks": 1, "baselines": {"loss": 1.0}, "seconds": seconds}
    assert json.loads((folder / "run.json").read_text()) == expected
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert sum(line["train_seconds"] for line in lines) < seconds
    assert [line["val_loss"] for line in lines] == pytest.approx(history["val_loss"])
    rates = [line["learning_rate"] for line in lines]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]
    assert (folder / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "seco')  # cut by the end of a process
    _fit(folder, epochs=4, initial_epoch=2)  # resumes
    assert _lines(folder)[:2] == lines[:2]
    assert [line["epoch"] for line in _lines(folder)] == [1, 2, 3, 4]
    seconds = [line["seconds"] for line in _lines(folder)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_files_of_a_run_are_whole_whatever_ends_it(tmp_path, monkeypatch, name):
    _fit(tmp_path, epochs=2)
    before = (tmp_path / name).read_text()
    replace = os.replace

    def torn(source, target):
        if Path(target).name == name:
            raise KeyboardInterrupt  # all is written, and nothing has taken the file's name
        replace(source, target)

    monkeypatch.setattr(os, "replace", torn)
    with pytest.raises(KeyboardInterrupt):
        _fit(tmp_path, epochs=3, initial_epoch=1)
    assert (tmp_path / name).read_text() == before
