"""Common parts of all recipes: their flags, the optimizer's rate, the callbacks of a run."""

import ast
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
from absl import flags

import batch_growth
import command_line
import tfscale
import tfscale.keras as hvd
from rivals import with_horovod
from run_folder import RunFolder

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(batch_growth)
flags.DEFINE_integer("epochs", 10, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Samples of a step, all ranks together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.1, "Peak rate for the recipe's batch.", lower_bound=0.0)
flags.DEFINE_enum(
    "schedule", "cosine", ["cosine", "constant"],
    "cosine: warm-up of 5 %, then half a cosine to 0. constant: apart from --warmup-epochs and "
    "--decay-epochs; always so with --adaptive-batch and --batch-schedule.",
)  # fmt: skip
flags.DEFINE_enum(
    "scaling", "linear", ["linear", "sqrt", "none"],
    "How the rate follows --batch-size where that is not the recipe's batch.",
)  # fmt: skip
flags.DEFINE_integer("seed", 1, "Of data, initial weights and order.", lower_bound=0)
flags.DEFINE_string(
    "exchange", "allreduce",
    "What the ranks exchange: allreduce, chunked, ..., with options as in "
    "chunked:replicated_dense=2,first_chunk_from=conv4_1 (docs/exchanges.md); or horovod, which "
    "is Horovod's allreduce of each gradient, to compare with.",
)  # fmt: skip
flags.DEFINE_integer(
    "average_every", 0,
    "Train the ranks on their own, without --exchange or --groups, and average parameters every n "
    "epochs; 0: exchange gradients.", lower_bound=0,
)  # fmt: skip
flags.DEFINE_float(
    "distance_weights", 0.0,
    "With --average-every: lambda, by which ranks that moved far count less; 0: all alike.",
    lower_bound=0.0,
)  # fmt: skip
flags.DEFINE_integer(
    "groups", 1, "Local SGD: groups of ranks; inside, they exchange as --exchange says.",
    lower_bound=1,
)  # fmt: skip
flags.DEFINE_string(
    "interval", "8",
    "Local SGD: steps between two averages, or a rule with its options (adaptive, growing, "
    "quadratic, distance), as in quadratic:alpha=0.2,minimum=4 (docs/local-sgd.md).",
)  # fmt: skip
flags.DEFINE_integer(
    "overlap",
    0,
    "Local SGD: steps that an average may take while training continues.",
    lower_bound=0,
)
flags.DEFINE_enum(
    "local_average", "parameters", ["parameters", "gradients"],
    "Local SGD: what groups average; gradients: the sums of their gradients (SASGD).",
)  # fmt: skip
flags.DEFINE_string(
    "outer", "",
    "Local SGD: Keras's optimizer that takes the change of the average as its gradient, as in "
    "SGD:learning_rate=0.7,momentum=0.9,nesterov=True (DiLoCo); empty: none.",
)  # fmt: skip
flags.DEFINE_string(
    "local_start", "immediately",
    "Local SGD: when groups begin to train apart: immediately, after_first_decay of the rate "
    "(post-local), or the number of an epoch.",
)  # fmt: skip
flags.DEFINE_string(
    "compression", "none",
    "Format of values between ranks: none, fp16, bf16, int8, ..., with options as in "
    "int4:start_step=100 (docs/compression.md).",
)  # fmt: skip
flags.DEFINE_enum(
    "mixed_precision", "none", ["none", "float16", "bfloat16"], "Type of activations."
)
flags.DEFINE_integer(
    "patience", 0, "Stop after so many epochs without improvement; 0: never.", lower_bound=0
)
flags.DEFINE_bool("resume", False, "Keep a backup, and resume from one that an earlier run left.")
flags.DEFINE_bool("report", False, "Write where the time of a step goes (docs/overlap.md).")
flags.DEFINE_string("data_dir", ".cache/data", "Where data sets are looked for first, or kept.")
flags.DEFINE_string("run_name", "", "Name of the folder of results; empty: the recipe's.")
flags.DEFINE_string("run_dir", "runs", "Folder in which that folder is made.")
flags.DEFINE_bool("smoke", False, "Shrink everything: under a minute on two cores.")

_RULES = {
    "adaptive": tfscale.AdaptiveInterval,
    "growing": tfscale.GrowingInterval,
    "quadratic": tfscale.QuadraticInterval,
    "distance": tfscale.DistanceGuard,
}


def set_defaults(**defaults: Any) -> None:
    """Give some of the flags above the defaults of a recipe."""
    for name, value in defaults.items():
        FLAGS.set_default(name, value)


def start() -> bool:
    """Begin a run: ranks, seeds, precision. Call it first.

    Returns:
        Whether this is rank 0.

    Raises:
        SystemExit: The command line has flags without effect, see `command_line.check_flags`.
    """
    command_line.check_flags()
    hvd.init()
    keras.utils.set_random_seed(FLAGS.seed)
    if FLAGS.mixed_precision != "none":
        keras.mixed_precision.set_global_policy(f"mixed_{FLAGS.mixed_precision}")
    return hvd.rank() == 0


def run_folder() -> Path:
    """Return the folder of results."""
    return Path(FLAGS.run_dir) / (FLAGS.run_name or Path(sys.argv[0]).stem)


def learning_rate(batch: int, steps_per_epoch: int) -> Any:
    """Return what the flags say: a rate, or a schedule over all steps.

    The rate depends on the global batch, not on the number of ranks: the same flags train the
    same model on any number of them. Large batches need the warm-up, because no scaling rule
    holds while weights change fast; small ones lose nothing by it.

    Args:
        batch: The batch for which --learning-rate is meant.
        steps_per_epoch: Steps of an epoch, all ranks in step.

    Source: linear rule and warm-up: Goyal et al., "Accurate, large minibatch SGD", 2017.
    """
    exponent = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[FLAGS.scaling]
    peak = FLAGS.learning_rate * (batch_growth.own_batch() / batch) ** exponent
    steps = steps_per_epoch * FLAGS.epochs
    if FLAGS.schedule == "constant" or batch_growth.is_used():
        return peak
    warmup = max(1, steps // 20)
    return keras.optimizers.schedules.CosineDecay(
        peak / 10, max(1, steps - warmup), warmup_target=peak, warmup_steps=warmup
    )


def distributed(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer that exchanges as --exchange, --groups and --compression say.

    Under float16 the loss scale stays inside, so that all ranks see the same gradients and skip
    the same steps. With --average-every ranks exchange none, and the optimizer stays as it is.
    """
    if FLAGS.mixed_precision == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if FLAGS.average_every:
        return optimizer
    if FLAGS.exchange == "horovod":
        return with_horovod(optimizer)
    exchange = parse_exchange(FLAGS.exchange)
    if FLAGS.groups > 1:
        start = FLAGS.local_start
        exchange = tfscale.LocalSGD(
            FLAGS.groups,
            parse_interval(FLAGS.interval),
            within=exchange,
            average=FLAGS.local_average,
            start=int(start) if start.isdecimal() else start,
            outer=parse_outer(FLAGS.outer) if FLAGS.outer else None,
            overlap=FLAGS.overlap,
        )
    compression = parse_compression(FLAGS.compression)
    return hvd.DistributedOptimizer(optimizer, exchange=exchange, compression=compression)


def parse_exchange(text: str) -> Any:
    """Return the strategy that a flag names, such as `chunked:replicated_dense=2,chunks=2`.

    A name is that of a class of tfscale in small letters; options are its arguments.
    """
    name, _, options = text.partition(":")
    strategies = {n.lower(): n for n in dir(tfscale) if n[0].isupper()}
    strategy: Any = getattr(tfscale, strategies.get(name.lower(), ""), None)
    if not hasattr(strategy, "plan"):
        sys.exit(f"--exchange must name a strategy of docs/exchanges.md. Received: {text}.")
    return strategy(**_arguments(options))


def parse_interval(text: str) -> Any:
    """Return the number of steps, or the rule that a flag names, such as `growing:growth=0.5`."""
    if text.isdecimal() and int(text):
        return int(text)
    name, _, options = text.partition(":")
    rule = _RULES.get(name)
    if rule is None:
        sys.exit(f"--interval must be 1 or more, or of {', '.join(_RULES)}. Received: {text}.")
    return rule(**_arguments(options))


def parse_outer(text: str) -> keras.optimizers.Optimizer:
    """Return the optimizer of Keras, with its options, that a flag names."""
    name, _, options = text.partition(":")
    optimizer = vars(keras.optimizers).get(name)
    if not (isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer)):
        sys.exit(f"--outer must name a class of keras.optimizers. Received: {text}.")
    return optimizer(**_arguments(options))


def parse_compression(text: str) -> Any:
    """Return the compression, with its options, that a flag names."""
    name, _, options = text.partition(":")
    compression = vars(tfscale.Compression).get(name)
    if compression is None or name.startswith("_"):
        sys.exit(f"--compression must be one of docs/compression.md. Received: {text}.")
    return compression(**_arguments(options)) if options else compression


def _arguments(options: str) -> dict[str, Any]:
    pairs = (option.partition("=") for option in options.split(",") if option)
    return {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def save(model: keras.Model) -> None:
    """Write `model.keras` into the run's folder; every rank must call it.

    Rank 0 writes. Where the ranks hold parts of the optimizer's state all of them must save. The
    run is over then: what --resume would have needed is removed.
    """
    is_split = getattr(model.optimizer, "shares_state", False)  # "auto" may shard, and tables are
    if hvd.rank() == 0 or is_split:
        run_folder().mkdir(parents=True, exist_ok=True)
        model.save(run_folder() / "model.keras")
    if FLAGS.resume and hvd.rank() == 0:
        shutil.rmtree(run_folder() / "backup", ignore_errors=True)


def with_float_outputs(model: keras.Model) -> keras.Model:
    """Return the model, under mixed precision with outputs of the variables' type for the loss."""
    if FLAGS.mixed_precision == "none":
        return model
    outputs = keras.layers.Activation("linear", dtype="float32", name="outputs")(model.output)
    return keras.Model(model.input, outputs, name=model.name)


def fit(
    model: keras.Model,
    train: tfscale.data.GlobalBatches,
    valid: Any,
    batch: int,
    *,
    baselines: Mapping[str, float] | None = None,
    stop: Callable[[], keras.callbacks.Callback] | None = None,
    watch: keras.callbacks.Callback | None = None,
) -> dict[str, float]:
    """Train, and leave `run.json`, `metrics.jsonl` and `learning_curve.png` in the run's folder.

    Args:
        model: Compiled and built.
        train: Training data.
        valid: Validation data.
        batch: As for `learning_rate`.
        baselines: What to compare metrics with, see `RunFolder`.
        stop: Makes the callback that ends training early, where --patience is given.
        watch: A further callback.

    Returns:
        On rank 0 the metrics after the last epoch, even if an earlier run trained it; else none.
    """
    folder, is_first = run_folder(), hvd.rank() == 0
    last = [RunFolder(folder, _settings(model), baselines, train)] if is_first else []
    stopping = [stop()] if stop and FLAGS.patience else []
    stopping += [] if watch is None else [watch]
    model.fit(
        train,
        validation_data=valid,
        epochs=FLAGS.epochs,
        callbacks=[*_callbacks(folder, train, batch), *stopping, *last],
        verbose=command_line.verbosity() if is_first else 0,
    )
    return last[0].last if last else {}


def _settings(model: keras.Model) -> dict[str, Any]:
    """Return what is noted in `run.json`: flags, and what became of them."""
    settings = {"ranks": hvd.size(), "parameters": model.count_params()}
    settings |= {"recipe": Path(sys.argv[0]).stem, **command_line.recipe_settings()}
    # Such methods take the place of a schedule, that of the defaults included.
    return {**settings, **({"schedule": "constant"} if batch_growth.is_used() else {})}


def _callbacks(
    folder: Path, train: tfscale.data.GlobalBatches, reference_batch: int
) -> Sequence[Any]:
    """Return tfscale's callbacks."""
    callbacks: list[Any] = []
    if FLAGS.resume:
        callbacks.append(tfscale.callbacks.Checkpoint(folder / "backup", keep=1, shared=False))
    if FLAGS.average_every:
        consistent: dict[str, Any] = {"consistency_check": False, "non_trainable": "local"}
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0, **consistent))
        lam = FLAGS.distance_weights
        weights: Any = tfscale.DistanceWeights(lam) if lam else "uniform"
        callbacks.append(tfscale.callbacks.ParameterAveraging(FLAGS.average_every, weights=weights))
    else:
        callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    callbacks.append(hvd.callbacks.MetricAverageCallback())
    if FLAGS.groups > 1:
        callbacks.append(tfscale.callbacks.ModelDistance(folder))
    callbacks += batch_growth.callbacks(train, reference_batch, folder)
    if FLAGS.theta_every:
        every, has_norms = FLAGS.theta_every, FLAGS.theta_norms
        callbacks.append(tfscale.callbacks.ThetaMonitor(folder, every, has_norms))
    if FLAGS.report:
        callbacks.append(tfscale.callbacks.CommunicationReport(folder))
    return callbacks
