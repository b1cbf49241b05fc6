"""`tfscale plan`: its table, its picture, and what it says of models of one's own."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from models.edsr import edsr
from models.resnet import resnet
from models.resnet50 import resnet50
from models.vgg import VGG_16, vgg

import tfscale
from tfscale.config import ConfigError
from tfscale.launcher import cli
from tfscale.measure.model_layers import find_model, read_layers
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import AUTO, LOCAL_SGD, forecast, winners
from tfscale.plan.machines import PRESETS
from tfscale.plan.published import published


def small_model() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = layers.Flatten()(layers.BatchNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Dense(10, name="top")(x), name="small")


def test_a_keras_model_is_read_and_left_as_it_was():
    model = small_model()
    before = model.get_weights()
    table = read_layers(model)
    names = "conv/kernel conv/bias norm/gamma norm/beta top/kernel top/bias"
    assert [p.name for p in table.parameters] == names.split()
    named = {layer.name: layer for layer in table.layers}
    assert named["conv"].flops == 2 * 3 * 3 * 3 * 4 * 64
    assert (named["top"].flops, named["top"].dense) == (2 * 256 * 10, (256, 10))
    assert all("call" not in vars(layer) for layer in model.layers)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


def test_rows_frozen_and_shared_layers():
    inputs = keras.Input((5, 6))
    shared = keras.layers.Dense(6, name="shared")
    x = shared(shared(inputs))
    frozen = keras.layers.Dense(3, name="frozen", trainable=False)(x)
    table = read_layers(keras.Model(inputs, keras.layers.Dense(2, name="rows")(frozen)))
    named = {layer.name: layer for layer in table.layers}
    assert named["shared"].dense is None  # its activations are those of two calls
    assert named["shared"].flops >= 2 * (2 * 36 * 5)
    assert named["rows"].rows == 5
    assert not any("frozen" in p.name for p in table.parameters)


def flops_by_name(inputs, outputs):
    return {layer.name: layer.flops for layer in read_layers(keras.Model(inputs, outputs)).layers}


def test_attention_and_products_of_any_dimensions():
    n_heads, size, steps, width = 8, 3, 6, 16
    inputs = keras.Input((steps, width))
    attention = keras.layers.MultiHeadAttention(n_heads, size, name="mha")
    flops = flops_by_name(inputs, attention(inputs, inputs))
    parts = ("query", "key", "value", "attention_output")
    assert flops == {f"mha/{part}": 2 * steps * n_heads * size * width for part in parts}

    inputs = keras.Input((7, 4, 3))
    equations = {"...x,xy->...y": 5, "ab...,bc->ac...": 5, "abcd,cde->abe": (7, 5)}
    for equation, shape in {**equations, "abcd,bde->abce": (7, 4, 5)}.items():
        dense = keras.layers.EinsumDense(equation, shape, name="dense")
        assert flops_by_name(inputs, dense(inputs)) == {"dense": 2 * 7 * 4 * 3 * 5}


@pytest.mark.parametrize("options", [{}, {"unroll": True}, {"return_sequences": True}])
def test_recurrent_layers_make_all_their_steps(options):
    inputs = keras.Input((20, 4))
    lstm = keras.layers.LSTM(5, name="lstm", **options)(inputs)
    top = keras.layers.Bidirectional(keras.layers.SimpleRNN(6), name="top")
    table = read_layers(keras.Model(inputs, top(lstm) if "return_sequences" in options else lstm))
    first, *others = table.layers
    assert first.flops == 20 * 2 * (4 * 20 + 5 * 20) and first.values == 20 * 5
    assert first.weights[0][0] == "lstm/lstm_cell/kernel"
    assert all(one.flops == 20 * 2 * (5 * 6 + 6 * 6) for one in others)
    assert len(others) == (2 if "return_sequences" in options else 0)
    cells = [keras.layers.LSTMCell(5), keras.layers.SimpleRNNCell(6)]
    layer = keras.layers.RNN(cells, stateful=True, name="two")
    inputs = keras.Input(batch_shape=(1, 20, 4))
    flops = flops_by_name(inputs, layer(inputs))
    assert flops == {"two": 20 * 2 * (4 * 20 + 5 * 20 + 5 * 6 + 6 * 6)}


class Own(keras.Model):
    """A model in a class of its own, with a weight that belongs to no layer."""

    def __init__(self):
        super().__init__(name="own")
        self.dense = keras.layers.Dense(3)

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), name="scale")
        self.dense.build(shape)

    def call(self, inputs):
        return self.scale * self.dense(inputs)


def test_models_in_classes_of_their_own():
    table = read_layers(Own(), (7,))
    assert sorted(p.n_values for p in table.parameters) == [1, 3, 21]
    with pytest.raises(ConfigError, match="own must be built"):
        read_layers(Own())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "resnet20", "edsr16"])
def test_published_tables_agree_with_the_recipes(name):
    """The same parameters, and operations within 3 %: norms count as traffic in one, not both."""
    models = {"vgg16": lambda: vgg(VGG_16), "resnet50": resnet50, "resnet20": lambda: resnet(20)}
    model, shape = (edsr, (32, 32, 1)) if name == "edsr16" else (models[name], None)
    table, other = read_layers(model(), shape), published(name)
    sizes = [sorted(p.n_values for p in t.parameters) for t in (table, other)]
    assert sizes[0] == sizes[1]
    flops, expected = (sum(layer.flops for layer in t.layers) for t in (table, other))
    assert flops == pytest.approx(expected, rel=0.03)


def test_models_are_found(tmp_path):
    small_model().save(tmp_path / "model.keras")
    assert find_model(None, str(tmp_path / "model.keras")).count_params() > 0
    assert find_model("tests.unit.test_forecast:small_model", None).name == "small"
    for name in ("tests.unit.test_forecast:nothing", "no_such_module:f"):
        with pytest.raises(ConfigError, match="saved file or module:function"):
            find_model(name, None)
    with pytest.raises(ConfigError, match="must return a Keras model"):
        find_model("builtins:dict", None)


def test_auto_is_never_far_from_the_best():
    """Within the 3 % that the planner wants to gain before it leaves plain allreduce."""
    scenario = Scenario(published("vgg-a"), PRESETS["ethernet-1g"], 1, 128)
    points = forecast(scenario, (1, 2, 16), n_groups=2)
    best = winners(points)
    for point in points:
        if point.exchange == AUTO:
            assert point.predicted.step_s <= best[point.n_ranks].predicted.step_s / 0.97
    assert {p.n_ranks for p in points if p.exchange == LOCAL_SGD} == {2, 16}
    assert all(p.speedup == pytest.approx(1.0, rel=0.05) for p in points if p.n_ranks == 1)


@pytest.mark.parametrize("ranks, samples, has_any", [(4, 63, False), (3, 64, False), (3, 63, True)])
def test_groups_divide_ranks_and_samples(ranks, samples, has_any):
    scenario = Scenario(published("resnet20"), PRESETS["ethernet-1g"], 1, samples)
    points = forecast(scenario, (ranks,), n_groups=3)
    assert any(point.exchange == LOCAL_SGD for point in points) == has_any


def plan(capsys, words):
    assert cli.main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def test_the_command_writes_table_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = f"--model resnet20 --ranks 1,4 --global-batch 64 --output {tmp_path}"
    shown = plan(capsys, words)
    assert shown == (tmp_path / "plan.md").read_text()
    assert "Which exchange wins" in shown and "sharded" in shown
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_says_how_far_it_is(capsys):
    assert cli.main(["plan", "--model", "resnet20", "--ranks", "1,4", "--global-batch", "64"]) == 0
    told = capsys.readouterr().err
    assert told == "Planning for 1 rank (1 of 2) ...\nPlanning for 4 ranks (2 of 2) ...\n"


def test_ranks_of_a_host_share_its_link(capsys):
    """A gradient crosses between 4 hosts instead of 16: 2 * 3/4 of its bytes instead of 15/8."""
    steps_ms = []
    for more in ("", " --ranks-per-host 4"):
        shown = plan(capsys, "--model vgg-a --ranks 16 --global-batch 16" + more)
        steps_ms.append(float(re.search(r"\| allreduce +\| +([\d.]+) \|", shown)[1]))
    assert steps_ms[1] == pytest.approx(steps_ms[0] * 4 / 5, rel=0.05)


def test_a_model_of_a_module_in_the_working_directory(tmp_path):
    """Of a console script, whose own folder is on Python's path instead."""
    model = "keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])"
    (tmp_path / "own_models.py").write_text(f"import keras\nbuild = lambda: {model}")
    package = Path(tfscale.__file__).parents[1]
    code = f"import sys; sys.path[0] = {str(package)!r}; from tfscale.launcher.cli import main; "
    code += "sys.exit(main(['plan', '--model', 'own_models:build', '--explain', '2']))"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "dense/kernel" in done.stdout


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("--model alexnet", "model must be one of"),
        ("--model vgg-a --machine nowhere", "machine must be one of"),
        ("--model vgg-a --ranks 1,x", "--ranks must be numbers"),
        ("--model vgg-a --global-batch 0", "global_batch must be 1 or more"),
        ("--model vgg-a --input-shape 64,64,3", "--input-shape is for models of your"),
        ("--model vgg-a --explain -3", "--explain takes 1 rank or more"),
        ("--model vgg-a --explain 4 --output x", "and prints only"),
        ("--model resnet20 --groups 2 --interval 0", "groups=2, interval=0"),
        ("--model resnet20 --groups 1", "groups must be 2 or more"),
        ("--model resnet20 --groups -2 --explain 4", "groups=-2, interval=8"),
    ],
)
def test_bad_arguments_are_explained(arguments, text, capsys):
    assert cli.main(["plan", *arguments.split()]) == 2
    assert text in capsys.readouterr().err
