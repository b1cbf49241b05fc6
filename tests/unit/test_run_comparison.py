"""Differences between two runs of a script, and those that do not count."""

import json
import math
import zipfile

import h5py
import numpy as np
import pytest

from tests.helpers.run_comparison import compare_files, compare_lines, read_files, read_lines

BAR = (
    "\x1b[1m{}/6\x1b[0m \x1b[32m━━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m{}s\x1b[0m {}ms/step - loss: 0.1"
)
PRINTED = f"""Epoch 1/2
\r{BAR.format(1, 9, 30)}\x08\x08\r{BAR.format(5, 1, 9)}\x08\x08\r{BAR.format(6, 0, 20)}2

Epoch 2/2
6/6 - 12s - 2s/step - loss: 0.25 - val_loss: 1.5000e-04
\r{BAR.format(5, 1, 9)}
done in 3 steps
"""
LINES = ["Epoch 1/2", "6/6 - loss: 0.12", "Epoch 2/2"]
LINES += ["6/6 - loss: 0.25 - val_loss: 1.5000e-04", "done in 3 steps"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("6/6 - loss: 0.12", "6/6 - loss:  0.120000001"), None),
        (("6/6 - loss: 0.12", "6/6 - loss: 0.1201"), "line 2: 0.1201 in place of 0.12"),
        (("0.25", "nan"), "line 4: nan in place of 0.25"),
        (("1.5000e-04", "1.5000e-03"), "line 4: 1.5000e-03 in place of 1.5000e-04"),
        (("6/6 - loss", "6/6 - mae"), "+#/#-mae:#"),
        (("Epoch 2/2\n", ""), "-Epoch#/#"),
    ],
)
def test_lines_are_compared_without_times_and_unfinished_bars(change, told):
    lines = read_lines(PRINTED)
    assert lines == LINES
    wrong = "\n".join(compare_lines(lines, "\n".join(LINES).replace(*change).split("\n"), 1e-5))
    assert told in wrong if told else wrong == ""


def write_run(folder, name="w", bias=0.5, rate=0.1, text="a,1\nb,0.25\n"):
    (folder / "sub").mkdir(parents=True)
    with h5py.File(folder / f"{name}.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.arange(6.0).reshape(2, 3)
        file["layers/dense/vars/1"] = np.array([0.0, bias])
    with zipfile.ZipFile(folder / "m.keras", "w") as archive:
        config = {"layers": [{"name": "dense", "units": [2, None]}], "rate": rate, "none": {}}
        archive.writestr("config.json", json.dumps(config))
        archive.writestr("metadata.json", json.dumps({"date_saved": str(folder), "version": "3"}))
        archive.write(folder / f"{name}.weights.h5", "model.weights.h5")
    np.savez(folder / "p.npz", n=np.arange(3), words=np.array(["a", str(rate)]))
    (folder / "sub" / "log.csv").write_text(text)
    return read_files(folder)


WEIGHTS = "m.keras, model.weights.h5:layers/dense/vars/1: "


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bias": 0.5 + 1e-9}, []),
        ({"bias": 0.5 + 1e-6}, [f"{WEIGHTS}0.500001 in place of 0.5"]),
        ({"bias": math.nan}, [f"{WEIGHTS}nan in place of 0.5 at [1], 1 of 2 values"]),
        ({"rate": 0.2}, ["config.json:/rate: 0.2 in place of 0.1", "p.npz, words.npy:array"]),
        ({"text": "a,1\nb,0.5\n"}, ["sub/log.csv, text: 0.5 in place of 0.25"]),
        ({"name": "v"}, ["missing: w.weights.h5", "in addition: v.weights.h5"]),
    ],
)
def test_files_are_compared_without_dates(changes, told, tmp_path):
    wrong = compare_files(write_run(tmp_path / "one"), write_run(tmp_path / "two", **changes), 1e-8)
    assert bool(wrong) == bool(told), wrong
    for text in told:
        assert any(text in line for line in wrong), wrong


def test_scalars_of_tensorboard_and_a_second_file_of_them(tmp_path):
    import tensorflow as tf

    def write(folder, values):
        for value in values:
            writer = tf.summary.create_file_writer(str(folder), filename_suffix=str(value))
            with writer.as_default():
                tf.summary.scalar("epoch_loss", value, step=0)
                tf.summary.text("graph", str(value), step=0)
            writer.close()
        return read_files(folder)

    one = write(tmp_path / "one", [0.25])
    assert one == {"events": {"epoch_loss, step 0": np.float32(0.25)}}
    assert "0.5 in place" in compare_files(one, write(tmp_path / "three", [0.5]), 1e-8)[0]
    added = compare_files(one, write(tmp_path / "four", [0.25, 0.5]), 1e-8)
    assert added == ["in addition: events (another)"]
