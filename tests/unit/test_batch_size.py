"""How gradients depend on the batch: measured, judged, and measured while a script trains."""

import json
import math
import textwrap

import keras
import numpy as np
import pytest

from tests.unit.callback_models import single_job  # noqa: F401
from tfscale.config import ConfigError
from tfscale.data import GlobalBatches
from tfscale.data.slices import epoch_order
from tfscale.launcher import cli
from tfscale.measure.batch_size import SizeMeasures, Stage, advise, measure
from tfscale.testing import require_identical
from tfscale.tune.scripts import measure_script

SAMPLES = 256


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 3)).astype("float32")
    return x, (x @ np.ones((3, 1)) + rng.normal(size=(SAMPLES, 1))).astype("float32")


def make_data():
    return GlobalBatches(*arrays(), batch_size=32, seed=1)


def linear():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def gradient(model, x, y):
    kernel, bias = model.get_weights()
    error = 2 * (x @ kernel + bias - y) / len(x)
    return np.concatenate([(x.T @ error).ravel(), error.sum(axis=0)])


def test_measures_are_those_of_the_gradients():
    model, (x, y) = linear(), arrays()
    stage = measure(model, make_data(), (8, 64), SAMPLES, epoch=2, seed=5)
    order = epoch_order(5, 0, SAMPLES)
    full = gradient(model, x, y)
    assert stage.epoch == 2
    assert stage.full_norm == pytest.approx(np.linalg.norm(full), rel=1e-5)
    for measured in stage.sizes:
        rows = order.reshape(-1, measured.batch_size)
        gradients = [gradient(model, x[r], y[r]) for r in rows]
        norms = [np.linalg.norm(g) for g in gradients]
        distances = [np.linalg.norm(g - full) for g in gradients]
        assert measured.batches == SAMPLES // measured.batch_size
        assert measured.mean_norm == pytest.approx(np.mean(norms), rel=1e-5)
        assert measured.mean_square == pytest.approx(np.mean(np.square(norms)), rel=1e-5)
        assert measured.mean_distance == pytest.approx(np.mean(distances), rel=1e-4)
        assert measured.descent_share == np.mean(np.less(distances, norms))


def test_noise_scale_is_near_that_of_single_samples():
    model, (x, y) = linear(), arrays()
    stage = measure(model, make_data(), (1, 64), SAMPLES)
    singles = np.array([gradient(model, x[[i]], y[[i]]) for i in range(SAMPLES)])
    full = singles.mean(axis=0)
    expected = singles.var(axis=0, ddof=1).sum() / (full @ full)
    assert stage.noise_scale == pytest.approx(expected, rel=0.25)


def test_nothing_is_trained_or_moved():
    layers = keras.layers
    inner = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *inner])
    model.compile("sgd", "mse")
    before, data = [v.numpy() for v in model.variables], make_data()
    measure(model, data, (8, 32), SAMPLES)
    require_identical(model.variables, before)
    assert (data.batch_size, data.epoch) == (32, 0)


def test_sizes_out_of_range():
    for sizes, samples in (((8,), 64), ((0, 8), 64), ((8, 128), 64), ((8, 512), 9999)):
        with pytest.raises(ConfigError, match="Use smaller sizes, or more samples"):
            measure(linear(), make_data(), sizes, samples)


# Advice


def stage(norms, shares, noise, epoch=0):
    sizes = tuple(
        SizeMeasures(2 ** (4 + i), 9, norm, norm**2, 0.0, share)
        for i, (norm, share) in enumerate(zip(norms, shares, strict=True))
    )
    return Stage(epoch, 1.0, noise, sizes)


@pytest.mark.parametrize(
    ("stages", "start", "maximum", "reasons"),
    [
        # The largest size with a similar norm at all stages.
        (
            [([4, 3.5, 3, 2.5, 2.4], [1] * 5, 20), ([4, 3, 2, 1.5, 1.2], [1] * 5, 140, 3)],
            *(32, 128, ["88%, 75%", "after 3 epochs is 140 samples"]),
        ),
        # Steps of smaller batches do not descend; then none does.
        ([([4, 1, 1, 1], [0.1, 0.2, 0.6, 1.0], 1e9)], 64, 128, ["below 64", "above all sizes"]),
        ([([4, 4], [0.1, 0.2], 1.0)], 32, 32, ["measure larger sizes", "little is gained"]),
        # No noise, no growth.
        ([([4, 3.9, 3.8], [1, 1, 1], math.nan)], 64, 64, []),
        ([([4, 3.9, 3.8], [1, 1, 1], 0.0)], 64, 64, []),
    ],
)
def test_advice(stages, start, maximum, reasons):
    advice = advise([stage(*each) for each in stages])
    assert (advice.start_batch_size, advice.max_batch_size) == (start, maximum)
    for words, reason in zip(reasons, advice.reasons, strict=False):
        assert words in reason


# Scripts, whatever way they call fit

SCRIPT = """
import keras, numpy as np, tfscale
tfscale.init()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(256, 3)).astype("float32")
y, w = x[:, :1], np.full(256, 3.0, "float32")
classes = dict.fromkeys(range(-9, 10), 3.0)
model = {model}
model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
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


def measured(folder, arguments, at_epochs=(0,), model=MODEL):
    path = folder / "train.py"
    path.write_text(SCRIPT.format(arguments=arguments, model=model))
    return measure_script([str(path)], batch_sizes=(8, 32), at_epochs=at_epochs, samples=128)


@pytest.mark.parametrize("arguments", FACTORS)
def test_calls(tmp_path, arguments, capsys):
    (plain,) = measured(tmp_path, "x, y")
    (stage,) = measured(tmp_path, arguments)
    assert stage.full_norm == pytest.approx(FACTORS[arguments] * plain.full_norm, rel=1e-4)
    assert "never reached" not in capsys.readouterr().out


def test_a_model_that_is_not_built(tmp_path):
    """Also before its first step."""
    layers = "keras.layers.BatchNormalization(), keras.layers.Dense(1)"
    models = [f"keras.Sequential([{first}{layers}])" for first in ("", "keras.Input((3,)), ")]
    stages = [measured(tmp_path, "x, y, 32, 9", (0, 1), model) for model in models]
    assert stages[0] == stages[1]


def test_inputs_by_name(tmp_path):
    inputs = "inputs := {name: keras.Input((3,), name=name) for name in 'ab'}"
    layer = "keras.layers.Dense(1)(keras.layers.add([inputs['a'], inputs['b']]))"
    model = f"keras.Model(({inputs}), {layer})"
    (stage,) = measured(tmp_path, "dict(a=x, b=x), y", model=model)
    assert stage.full_norm > 0


def test_stages_count_from_the_first_epoch_and_end_with_the_last(tmp_path, capsys):
    stages = measured(tmp_path, "x, y, 32, 9, 0, note, initial_epoch=5", (0, 1, 99))
    assert [stage.epoch for stage in stages] == [0, 1]
    assert "trained 5" in capsys.readouterr().out


def test_command(tmp_path, capsys):
    """Of a script that imports what lies beside it, and runs with absl."""
    arguments = "tfscale.data.GlobalBatches(x, y, batch_size=32), epochs=5, callbacks=note"
    body = textwrap.indent(SCRIPT.format(model=MODEL, arguments=arguments), "    ")
    (tmp_path / "helper_of_script.py").write_text(f"def main(words):{body}")
    path, out = tmp_path / "train.py", tmp_path / "out"
    path.write_text("import helper_of_script\nfrom absl import app\napp.run(helper_of_script.main)")
    words = ["tune", "batch-size", "--sizes", "8,32,128", "--samples", "256", "--stages", "0,2"]
    assert cli.main([*words, "--output", str(out), str(path)]) == 0
    shown = capsys.readouterr().out
    assert "trained 1" in shown and "trained 2" not in shown and "never reached" not in shown
    for words in ("After 0 epochs", "After 2 epochs", "Start with ", "Grow up to "):
        assert words in shown
    content = json.loads((out / "batch_size.json").read_text())
    assert [s["epoch"] for s in content["stages"]] == [0, 2]
    assert [s["batch_size"] for s in content["stages"][0]["sizes"]] == [8, 32, 128]
    assert content["stages"][1]["full_norm"] < content["stages"][0]["full_norm"]
    assert content["advice"]["start_batch_size"] in (8, 32, 128)
    assert (out / "batch_size.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("x = 1", "which ended before"),
        ("raise SystemExit(3)", "exit code 3"),
        (
            SCRIPT.format(
                model=MODEL, arguments="tensorflow.data.Dataset.from_tensors((x, y))"
            ).replace("import keras", "import tensorflow, keras"),
            "Use tfscale.data.GlobalBatches, or arrays",
        ),
    ],
)
def test_scripts_that_cannot_be_measured(tmp_path, code, text):
    path = tmp_path / "train.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=text):
        measure_script([str(path)], batch_sizes=(8, 32), at_epochs=(0,), samples=64)
