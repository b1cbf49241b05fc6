"""`tfscale convert`: scripts as they are written by hand for several ranks."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launching import launch_script
from tfscale.config import ConfigError
from tfscale.launcher import cli
from tfscale.launcher.convert import convert

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
SCRIPT = """
import re

import numpy as np
from keras import Input, Sequential, layers, utils

NUMBER = re.compile("é", re.ASCII)
utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(100, 4)); y = x[:, :2]
model = Sequential([Input((4,)), layers.Dense(2)])
model.compile(optimizer="adam", loss="mse")
print("é", end="")
print(
    "begins",
)  # once
history = model.fit(x * 1.0, y, epochs=2, validation_split=0.36, batch_size=16, shuffle=False)
more = model.fit(x[:32], y[:32], validation_data=(x, y), verbose=0, shuffle=False, callbacks=[])
if more:
    print(";".join(f"{key} {value}" for key, value in {**history.history, **more.history}.items()))
"""


def test_a_converted_script_gives_what_the_script_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    text, notes = convert(SCRIPT, "t.py")
    assert notes == []
    numbers = []
    for size, script in ((0, SCRIPT), (2, text)):
        result = launch_script(size, script, timeout_s=150)
        assert result.exit_code == 0, result.output
        assert result.output.count("ébegins") == 1
        (line,) = re.findall(r"^loss .*$", result.output, re.MULTILINE)
        numbers.append([json.loads(part) for part in re.findall(r"\[.*?\]", line)])
    for alone, together in zip(*numbers, strict=True):
        assert together == pytest.approx(alone, rel=1e-5)


def lines_of(script):
    text, notes = convert(f"import keras\n{script}", "t.py")
    return text.splitlines(), notes


def test_what_writes_is_left_to_rank_zero():
    lines, notes = lines_of(
        "m.compile(keras.optimizers.SGD(), 'mse', loss='mse')\n"
        "cb = keras.callbacks.CSVLogger('a')\n"
        "m.fit(x, y, callbacks=cb, **more)\n"
        "for i in x:\n    m.save('a'); print(2)\n"
        "class A:\n    def f(self):\n        print(1)\n"
        "open('a', 'w')\n"
    )
    assert lines[1:4] == ["import tfscale", "", "tfscale.init()"]
    assert lines[4].startswith("m.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD()),")
    assert lines[5] == "cb = tfscale.callbacks.RankZero(keras.callbacks.CSVLogger('a'))"
    assert [line for line, _ in notes] == [4, 6, 6, 10]
    assert "    m.save('a'); print(2)" in lines and "        print(1)" in lines


def test_what_all_ranks_must_call_is_not_left_to_rank_zero():
    lines, notes = lines_of(
        "m.compile(keras.optimizers.SGD(), 'mse', loss='mse')\n"
        "print(m.fit(y=y, x=x, epochs=2).history)\n"
    )
    assert lines[-1].startswith("print(m.fit(x=tfscale.data.GlobalBatches(x, y, batch_size=32), ")
    assert [line for line, _ in notes] == [3]


@pytest.mark.parametrize(
    "text", ["import keras\nx = 1", "import keras, tfscale\nm.compile(loss='a')", "import ["]
)
def test_scripts_that_cannot_be_converted_are_refused(text):
    with pytest.raises(ConfigError, match=r"Received: t\.py"):
        convert(text, "t.py")


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("[!t_]*.py")), ids=lambda path: path.stem)
def test_users_scripts_stay_programs(path):
    text, _ = convert(path.read_text(), path.name)
    compile(text, path.name, "exec")
    assert "tfscale.DistributedOptimizer(" in text


def test_the_diff_is_printed_or_the_result_written(tmp_path, capsys):
    path, other = tmp_path / "t.py", tmp_path / "u.py"
    path.write_text(SCRIPT)
    text, _ = convert(SCRIPT, "t.py")
    assert cli.main(["convert", str(path)]) == 0
    assert "\n+tfscale.init()\n" in capsys.readouterr().out and path.read_text() == SCRIPT
    assert cli.main(["convert", str(path), "--output", str(other)]) == 0
    assert other.read_text() == text
    assert cli.main(["convert", str(path), "--in-place"]) == 0
    assert path.read_text() == text
    assert cli.main(["convert", str(tmp_path / "none.py")]) == 2
