"""Common parts of recipes: flags refused, exchanges by name, rates, callbacks, precision."""

import contextlib
import re
import runpy
import sys
from pathlib import Path

import batch_growth
import command_line
import keras
import momentum
import numpy as np
import pytest
import training
from absl import flags
from absl.testing import flagsaver
from models.lenet import lenet5
from models.vgg import VGG_A, vgg

import tfscale
from tfscale.comm.backends.base import Group
from tfscale.config import PlanError
from tfscale.data import GlobalBatches
from tfscale.exchange.plan import Parameter, Sum, Table
from tfscale.plan.buckets import GradientSpec, owner_of

FLAGS = flags.FLAGS
RECIPES = Path(training.__file__).parent


@pytest.fixture(autouse=True)
def parsed():
    FLAGS(["recipe"], known_only=True)
    with flagsaver.flagsaver():
        yield
    keras.config.set_dtype_policy("float32")


@contextlib.contextmanager
def _recipe(name, words):
    """Read a recipe's flags from words, and give what it defines."""
    with flagsaver.flagsaver():  # which forgets the recipe's own flags afterwards
        names = runpy.run_path(str(RECIPES / f"{name}.py"))
        command_line.flags_parser()([name, *words])
        yield names


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--adaptive-batch 256 --schedule cosine", "Received: --schedule cosine. Leave"),
        ("--batch-schedule 3:256 --schedule cosine", "--batch-schedule takes the place"),
        ("--average-every 1 --groups 2", "exchange no gradients. Received: --groups 2"),
        ("--average-every 1 --interval 8", "Received: --interval 8"),
        ("--average-every 1 --exchange sharded", "Received: --exchange sharded"),
        ("--average-every 1 --compression bf16", "Received: --compression bf16"),
        ("--exchange horovod --groups 2", "Under --exchange horovod .*: --groups 2"),
        ("--exchange horovod --compression int8", "Received: --compression int8"),
        ("--distance-weights 1", "--distance-weights needs --average-every"),
        ("--overlap 2", "--overlap needs --groups"),
        ("--local-average gradients", "--local-average needs --groups"),
        ("--outer SGD", "--outer needs --groups"),
        ("--local-start after_first_decay", "--local-start needs --groups"),
        ("--theta-norms", "--theta-norms needs --theta-every"),
        ("--adaptive-interval 3", "--adaptive-interval needs --adaptive-batch"),
        ("--adaptive-rule peak", "--adaptive-rule needs --adaptive-batch"),
        ("--adaptive-signal noise_scale", "--adaptive-signal needs --adaptive-batch"),
        ("--adaptive-decay 0.8", "--adaptive-decay needs --adaptive-batch"),
        ("--adaptive-ranks grow", "--adaptive-ranks needs --adaptive-batch"),
    ],
)
def test_flags_without_effect_are_refused(words, told):
    with _recipe("lenet", words.split()), pytest.raises(SystemExit, match=told):
        training.start()


def test_vgg_stops_at_an_accuracy():
    with _recipe("vgg", ["--stop-at", "0.9"]) as names:
        stop = names["StopAt"]()
        stop.set_model(keras.Sequential())
        for accuracy, is_over in ((0.8999, False), (0.9, True)):
            stop.model.stop_training = False
            stop.on_epoch_end(0, {"val_accuracy": accuracy})
            assert stop.model.stop_training is is_over


def test_horovod_is_needed_for_its_exchange(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", None)
    with _recipe("vgg", ["--exchange", "horovod"]), pytest.raises(SystemExit, match="make horovod"):
        training.distributed(keras.optimizers.SGD())


def test_commands_that_are_published_are_taken(monkeypatch):
    monkeypatch.setattr(training, "distributed", lambda optimizer: optimizer)
    table = (RECIPES / "README.md").read_text().split("## Studies")[0]
    commands = re.findall(r"`(\w+)\.py (.*?)`", table)
    assert {recipe for recipe, _ in commands} == {"edsr", "resnet", "vgg", "lenet", "mlp"}
    decays = {"resnet": 1e-4, "vgg": 5e-4}  # L2 of He et al., of Simonyan and Zisserman
    for recipe, words in commands:
        with _recipe(recipe, words.split()) as names:
            command_line.check_flags()
            if recipe in decays:
                options = (128,) if recipe == "resnet" else ()
                optimizer = names["build_optimizer"](*options, 100)
                # [T] and He et al. add the decay to the gradient, inside of the momentum.
                expected = decays[recipe] / (1 - optimizer.momentum)
                assert optimizer.weight_decay == pytest.approx(expected)


def test_exchanges_and_compressions_are_named_with_their_options():
    exchange, compression = training.parse_exchange, training.parse_compression
    assert type(exchange("allreduce")) is tfscale.Allreduce
    chunked = exchange("chunked:replicated_dense=2, chunks=per_layer,overlap=False")
    assert type(chunked) is tfscale.Chunked
    options = {"replicated_dense": 2, "chunks": "per_layer", "overlap": False}
    assert vars(chunked).items() >= options.items()
    assert compression("int8") is tfscale.Compression.int8
    low_rank = tfscale.Compression.low_rank(rank=2, start_step=7)
    assert compression("low_rank:rank=2, start_step=7") == low_rank
    for text in ("int9", "__doc__", ""):
        with pytest.raises(SystemExit, match=f"Received: {text}"):
            compression(text)


def test_intervals_and_outer_optimizers_are_named_with_their_options():
    assert training.parse_interval("8") == 8
    assert training.parse_interval("growing:initial=4,growth=0.5") == tfscale.GrowingInterval(
        4, 0.5
    )
    assert training.parse_interval("distance:limit=1.5") == tfscale.DistanceGuard(1.5)
    for text in ("0", "cubic:alpha=1"):
        with pytest.raises(SystemExit, match=f"Received: {text}"):
            training.parse_interval(text)
    outer = training.parse_outer("SGD:learning_rate=0.7,momentum=0.9,nesterov=True")
    assert outer.nesterov and float(outer.learning_rate) == pytest.approx(0.7)
    with pytest.raises(SystemExit, match="Received: schedules"):
        training.parse_outer("schedules")


def test_lars_takes_the_place_of_sgd_and_decays_as_much():
    decay = {"weight_decay": 5e-3, "undecayed": ("bias",)}
    with _recipe("vgg", ["--data", "generated"]):
        assert momentum.optimizer(0.1, **decay).weight_decay == 5e-3
    with _recipe("vgg", ["--data", "generated", "--optimizer", "lars"]):
        lars = momentum.optimizer(0.1, **decay)
    assert isinstance(lars, tfscale.LARS) and lars.decay == pytest.approx(5e-4)


THESIS_CHUNK = ["logits", "conv5_2", "conv5_1", "conv4_2", "conv4_1"]  # [T]: k = 9, f = 2


def chunks_of_vgg_a(strategy):
    """Return the layers of each chunk of VGG-A, whose first dense layers send no gradients."""
    model = vgg(VGG_A, (32, 32, 3), (8, 8), 10)
    names = [v.path for v in model.trainable_variables]
    replicated = [f"fc{i + 1}" for i in range(strategy.replicated_dense)]
    forms = ["replicated" if owner_of(name) in replicated else "weights" for name in names]
    specs = [GradientSpec(name, (1,), "float32") for name in names]
    table = Table(tuple(Parameter(s, "float32", f) for s, f in zip(specs, forms, strict=True)))
    parts = strategy.plan(table, Group(0, (0, 1), 1)).parts
    chunks = [[owner_of(names[i]) for i in p.indices] for p in parts if isinstance(p, Sum)]
    return [list(dict.fromkeys(chunk)) for chunk in chunks]


def test_documented_commands_form_the_chunks_that_they_promise():
    root = RECIPES.parent
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("recipes/**/*.[mp][dy]")]
    found = {text for page in pages for text in re.findall(r"chunked:[\w=,]+", page.read_text())}
    cut = [training.parse_exchange(text) for text in found if "first_chunk" in text]
    assert cut
    for strategy in cut:
        chunks = chunks_of_vgg_a(strategy)
        assert chunks == [THESIS_CHUNK, ["conv3_2", "conv3_1", "conv2_1", "conv1_1"]], strategy


def test_boundaries_that_leave_a_chunk_empty_are_refused():
    for options, text in (
        ("first_chunk_layers=9,replicated_dense=2", "first_chunk_layers=9 of the 9 layers that"),
        ("first_chunk_from=conv1_1,replicated_dense=2", "must leave a layer"),
        ("first_chunk_from=fc1,replicated_dense=2", "The layers are conv1_1, conv2_1"),
        ("first_chunk_from=conv4", "must name a layer that sends gradients"),
    ):
        with pytest.raises(PlanError, match=text):
            chunks_of_vgg_a(training.parse_exchange(f"chunked:{options}"))


def test_the_rate_follows_the_batch():
    FLAGS.learning_rate, FLAGS.batch_size, FLAGS.epochs = 0.1, 512, 10
    for FLAGS.scaling, peak in (("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)):
        FLAGS.schedule = "constant"
        assert training.learning_rate(128, 20) == pytest.approx(peak)
        FLAGS.schedule = "cosine"
        cosine = training.learning_rate(128, 20)
        rates = [float(cosine(step)) for step in (0, 10, 105, 200)]
        np.testing.assert_allclose(rates, [peak / 10, peak, peak / 2, 0], rtol=1e-5, atol=1e-8)


def _callbacks(folder, reference_batch=8):
    data = GlobalBatches(np.zeros((64, 1)), batch_size=8)
    return batch_growth.callbacks(data, reference_batch, folder)


def test_methods_that_change_the_batch_take_the_place_of_schedules(tmp_path):
    assert _callbacks(tmp_path) == [] and not batch_growth.is_used()
    FLAGS.batch_schedule = ["3:16", "6:32"]
    (schedule,) = _callbacks(tmp_path)
    assert schedule.sizes == {3: 16, 6: 32}
    assert isinstance(training.learning_rate(8, 8), float)  # though --schedule is cosine
    FLAGS.batch_schedule, FLAGS.adaptive_batch, FLAGS.decay_epochs = [], 32, ["5", "7"]
    (adaptive,) = _callbacks(tmp_path)
    assert isinstance(adaptive, tfscale.callbacks.AdaptiveBatchSize)
    assert adaptive._settings.decay_epochs == (5, 7)  # whatever the schedule would be


def test_ranks_that_train_on_their_own_have_the_rate_of_their_own_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_growth.hvd, "size", lambda: 4)
    FLAGS.batch_size, FLAGS.learning_rate, FLAGS.schedule = 512, 0.1, "constant"
    FLAGS.warmup_epochs, FLAGS.decay_epochs = 2, ["6"]
    for FLAGS.average_every, rate in ((0, 0.4), (2, 0.1)):
        (scaled,) = _callbacks(tmp_path, 128)
        assert isinstance(scaled, tfscale.callbacks.LearningRateScaling)
        rates = [scaled.initial_lr * scaled.multiplier(epoch) for epoch in (1, 5.9, 6)]
        assert rates == pytest.approx([(0.1 + rate) / 2, rate, rate / 10])
        assert training.learning_rate(128, 20) == pytest.approx(rate)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_mixed_precision_ends_in_float32_and_scales_the_loss_inside(precision):
    tfscale.init()
    FLAGS.mixed_precision = precision
    keras.config.set_dtype_policy(f"mixed_{precision}")
    model = training.with_float_outputs(lenet5())
    assert model.outputs[0].dtype == "float32"
    assert model.get_layer("conv1").compute_dtype == precision
    optimizer = training.distributed(keras.optimizers.SGD(0.1))
    assert isinstance(optimizer, tfscale.DistributedOptimizer)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_scaled == (precision == "float16")
    tfscale.shutdown()


def test_what_a_finished_run_would_resume_from_stays_until_its_model_is_saved(tmp_path):
    FLAGS.run_dir, FLAGS.run_name, FLAGS.resume, FLAGS.epochs = str(tmp_path), "mine", True, 2
    tfscale.init()
    x, found = np.ones((16, 2), "float32"), []
    for _ in range(2):  # as after an interruption between the end of training and the file
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(training.distributed(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
        data = GlobalBatches(x, x[:, :1], batch_size=8)
        found.append(training.fit(model, data, data, 8))
        assert (tmp_path / "mine" / "backup").exists()
    assert found[0]["epoch"] == 2 and found[0] == found[1]
    training.save(model)
    assert (tmp_path / "mine" / "model.keras").exists()
    assert not (tmp_path / "mine" / "backup").exists()
    tfscale.shutdown()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data div2k --images 9", "DIV2K is used as a whole. Received: --images 9"),
        ("--data phantom --scale 3", "Phantom is restored, not enlarged. Received: --scale 3"),
    ],
)
def test_flags_of_other_pictures_are_refused(words, told):
    with _recipe("edsr", words.split()) as names, pytest.raises(SystemExit, match=told):
        names["load_phantom" if "phantom" in words else "load_div2k"]()
