"""Scripts whose gradients are measured, whatever way they call fit."""

import pytest

from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.launcher.tune.scripts import measure_script

SCRIPT = """
import keras, numpy as np, tfscale
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(128, 3)).astype("float32")
y, w = x[:, :1], np.full(128, 3.0, "float32")
classes = dict.fromkeys(range(-9, 10), 3.0)
model = {model}
model.compile("sgd", "mse")
note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("trained", epoch))
model.fit({arguments})
print("never reached")
"""
MODEL = "keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])"
FACTORS = {  # of the gradient
    "x, y": 1,
    "x=x, y=y": 1,
    "x, y, 32": 1,
    "x, y, 32, 5, 0, [note]": 1,
    "x, y, 32, callbacks=[note]": 1,
    "x, y, 32, callbacks=note": 1,
    "x, y, 32, callbacks=keras.callbacks.CallbackList([note], model=model)": 1,
    "[x], y": 1,
    "x, y, validation_split=0.5, validation_data=(x, y)": 1,
    "x, y, class_weight=classes": 3,
    "tfscale.data.GlobalBatches(x, y, batch_size=32), class_weight=classes": 3,
    "x, y, sample_weight=w": 3,
    "x, y, 32, 5, sample_weight=w, verbose=0": 3,
    "tfscale.data.GlobalBatches(x, y, batch_size=32)": 1,
    "tfscale.data.GlobalBatches(x, y, sample_weight=w, batch_size=32)": 3,
}


def measured(path, arguments, at_epochs=(0,), model=MODEL):
    path.write_text(SCRIPT.format(arguments=arguments, model=model))
    return measure_script([str(path)], batch_sizes=(8, 32), at_epochs=at_epochs, samples=128)


@pytest.mark.parametrize("arguments", FACTORS)
def test_calls(tmp_path, arguments, capsys):
    (plain,) = measured(tmp_path / "plain.py", "x, y")
    (stage,) = measured(tmp_path / "train.py", arguments)
    assert stage.full_norm == pytest.approx(FACTORS[arguments] * plain.full_norm, rel=1e-4)
    assert "never reached" not in capsys.readouterr().out


def test_a_model_that_is_not_built(tmp_path):
    """Also before its first step."""
    layers = "keras.layers.BatchNormalization(), keras.layers.Dense(1)"
    stages = [
        measured(
            tmp_path / "train.py", "x, y, 32, 9", (0, 1), f"keras.Sequential([{first}{layers}])"
        )
        for first in ("", "keras.Input((3,)), ")
    ]
    assert stages[0] == stages[1]


def test_inputs_by_name(tmp_path):
    inputs = "inputs := {name: keras.Input((3,), name=name) for name in 'ab'}"
    layer = "keras.layers.Dense(1)(keras.layers.add([inputs['a'], inputs['b']]))"
    model = f"keras.Model(({inputs}), {layer})"
    (stage,) = measured(tmp_path / "train.py", "dict(a=x, b=x), y", model=model)
    assert stage.full_norm > 0


def test_stages_count_from_the_first_epoch(tmp_path, capsys):
    stages = measured(tmp_path / "train.py", "x, y, 32, 9, 0, note, initial_epoch=5", (0, 1))
    assert [stage.epoch for stage in stages] == [0, 1]
    assert "trained 5" in capsys.readouterr().out
