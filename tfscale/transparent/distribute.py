"""`tfscale.distribute`: from then on, Keras's models train on all ranks as they do on one process.

Each patch calls public parts of tfscale, which a script may use itself instead:

* `fit` gets `callbacks.Synchronize` and wraps optimizers in `DistributedOptimizer`;
* every rank reads the same global batches, and a step computes the rank's rows (`fit/steps.py`);
  the maps of a dataset run on these rows alone, where its steps allow (`fit/batches.py`);
* `evaluate`, `train_on_batch` and `test_on_batch` return metrics of all rows, `predict` all rows;
* callbacks that write run on rank 0 (`files.WrittenOnce`, a `RankZero`), and so does `model.save`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfscale.callbacks import BackupAndRestore, Callback, MetricAverageCallback, Synchronize
from tfscale.callbacks.batch_size_schedule import ChangingBatchSize
from tfscale.callbacks.metric_average import metrics_of_all_ranks
from tfscale.comm import objects, runtime
from tfscale.comm.eager import raise_own_errors
from tfscale.config import ConfigError, read_size, replace_environment, require
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.base import resolve
from tfscale.fit import monitoring, steps
from tfscale.fit.batches import BatchComparison, OrderedPipelines, RowPipelines
from tfscale.fit.metric_updates import forget, watch
from tfscale.fit.preparation import prepare
from tfscale.fit.session import running_session
from tfscale.internals.classes import Patches, arguments_of, metrics_in_order
from tfscale.internals.keras import (
    drop_functions,
    layers_of,
    replace_methods,
    replace_optimizer,
    restore_methods,
)
from tfscale.internals.optimizers import (
    inner_optimizers,
    is_wrapped,
    optimizers_of,
    update_rule,
)
from tfscale.optimizer.distributed import DistributedOptimizer
from tfscale.optimizer.saving import is_alone, make_saves_safe, on_first_rank, write_on_first_rank
from tfscale.start import init
from tfscale.transparent import files
from tfscale.transparent.files import WrittenOnce, share_logs
from tfscale.transparent.tables import Tables, load_own_rows
from tfscale.transparent.verify import Verifier, Verify, require_verify

BatchNorm = Literal["global", "local"]
Decode = Literal["rows", "batches"]

_WRITING = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
# Packages whose callbacks write or send, and leave the model as it is.
_WRITING_PACKAGES = ("wandb", "mlflow", "tqdm", "comet_ml", "neptune", "clearml", "dvclive", "aim")
# Of ranks other than 0: `wandb.init` in a script starts no run there.
_OTHER_RANKS = {"WANDB_MODE": "disabled"}
_DIGEST_BYTES = 1 << 26  # of one array; of larger ones, rows at equal distances
_STEPS = {
    "train_step": steps.on_share,
    "test_step": steps.on_share,
    "predict_step": steps.on_all_rows,
}
# CLOCK_REALTIME_COARSE of Linux, some milliseconds late; Python has no name for it.
_CLOCK_OF_FILES = 5
_running: Distributed | None = None


def distribute(
    *,
    exchange: Any = "allreduce",
    batch_norm: BatchNorm = "global",
    seed: int | None = None,
    all_output: bool = False,
    verify: Verify = "first",
    decode: Decode = "rows",
    shard_embeddings: int | str | None = None,
) -> Distributed:
    """Let this script's Keras models train on all ranks as they would in one process.

    Call it before models are compiled, or start the script by `tfscale run --distribute`. It joins
    the job. `fit`, `evaluate`, `predict`, `train_on_batch`, `test_on_batch` and `predict_on_batch`
    then mean on all ranks together what they mean in one process: `batch_size` counts the samples
    of all ranks, metrics are those of all samples, and files are written once. Every rank must run
    the same script on the same data. Repeated calls do nothing. In one process only the seed is
    set.

    Collective: all ranks must call this.

    Args:
        exchange: As for `DistributedOptimizer`.
        batch_norm: "global" normalises with the statistics of the whole batch, as one process
            does; "local" with those of each rank's rows, which saves a message per layer and gives
            other results.
        seed: Seed of Python, NumPy, TensorFlow and Keras on all ranks; None draws one.
        all_output: Whether ranks other than 0 print, too. Standard error is never touched.
        verify: Which steps are also computed as one process does, and compared, before they run:
            "first", that of each function of a model in `fit`, `evaluate` and `predict`; a number
            N, that and every N-th; "off", none. With batch_norm="local" none is.
        decode: What each rank makes of a `tf.data.Dataset`: "rows", its own rows of each batch
            where the steps allow, that is, `map` without state before `batch`; "batches", whole
            batches, of which it then takes its rows.
        shard_embeddings: Size of a table, such as "100MB" or a number of bytes, from which on an
            Embedding becomes a `tfscale.layers.ShardedEmbedding`. Subclasses, layers with arguments
            that it does not support, and tables that the script reads whole stay, with a log line.
            Steps of models with sharded tables are not verified. None: no Embedding is sharded.

    Returns:
        An object whose `undo()` restores Keras, except for optimizers that were wrapped.

    Raises:
        ConfigError: An argument is invalid.
        ExchangeError: The ranks cannot communicate.

    Examples:
        >>> job = tfscale.distribute(seed=1)  # after it, an ordinary Keras script
        >>> dense = keras.layers.Dense(1, kernel_initializer="zeros")
        >>> model = keras.Sequential([keras.Input((1,)), dense])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> history = model.fit(np.ones((4, 1)), np.ones((4, 1)), epochs=3, verbose=0)
        >>> [round(loss, 2) for loss in history.history["loss"]]  # on any number of ranks
        [1.0, 0.36, 0.13]
        >>> job.undo()
    """
    global _running
    allowed = get_args(BatchNorm)
    require(batch_norm in allowed, "batch_norm", "'global' or 'local'", batch_norm)
    require_verify(verify)
    require(decode in get_args(Decode), "decode", "'rows' or 'batches'", decode)
    resolve(exchange)
    least_bytes = 0 if shard_embeddings is None else read_size(shard_embeddings, "shard_embeddings")
    began_s = time.clock_gettime(_CLOCK_OF_FILES)
    init()
    if seed is None:  # sent only then: TensorFlow's threads and devices cannot be set afterwards
        drawn = int.from_bytes(os.urandom(4), "little")
        seed = objects.broadcast_object(drawn, 0, name="seed")
    keras.utils.set_random_seed(seed)
    if _running is None:
        _running = Distributed(
            exchange, batch_norm, all_output, verify, decode, began_s, least_bytes
        )
    return _running


class Distributed:
    """The patches of `tfscale.distribute`, which `undo` takes back."""

    def __init__(
        self,
        exchange: Any,
        batch_norm: BatchNorm,
        all_output: bool,
        verify: Verify,
        decode: Decode,
        began_s: float,
        least_bytes: int = 0,
    ) -> None:
        self._exchange, self._patches = exchange, Patches()
        self._tables = Tables(least_bytes)
        # Of each model, the batches of each kind of step.
        self._models: weakref.WeakKeyDictionary[keras.Model, dict[str, BatchComparison]]
        self._models = weakref.WeakKeyDictionary()
        self._own_steps: weakref.WeakKeyDictionary[keras.Model, dict[str, Any]]
        self._own_steps = weakref.WeakKeyDictionary()
        self._updated_by: weakref.WeakSet[Any] = weakref.WeakSet()  # rules inside of wrappers
        self._stdout: int | None = None
        self._environment: dict[str, str | None] = {}  # what was there before
        self._pipelines = RowPipelines()
        # From now on, not from the first `fit`: a reader sees that the job has begun.
        has_metrics = monitoring.watch() is not None
        if runtime.size() == 1:
            if has_metrics:
                self._patches.wrap_model(fit=_watched)
            return
        # Statistics of each rank's rows give other results on purpose.
        verify = "off" if batch_norm == "local" else verify
        self._verifier = Verifier(
            verify, lambda model, step, batch: self._prepare(model)[step].require_same(batch)
        )
        self._verifier.patch(self._patches)
        steps.patch(self._patches, batch_norm)  # last: draws are repeated for the whole batch
        self._patches.wrap_model(
            fit=self._fit,
            evaluate=self._evaluate,
            predict=self._predict,
            train_on_batch=self._on_batch,
            test_on_batch=self._on_batch,
            predict_on_batch=self._predict_on_batch,
            save=_saving_once,
            save_weights=_saving_once,
            export=_exporting_once,
        )
        self._patches.wrap_saves(save_model=_saving_by_method, save_weights=_saving_by_method)
        self._patches.wrap(keras.export.ExportArchive, "write_out", _exporting_once)
        self._patches.wrap(keras.optimizers.Optimizer, "apply", self._apply)
        self._patches.wrap_strategies(_without_replicas, _without_workers)
        self._patches.wrap(tf.data.Dataset, "__iter__", OrderedPipelines().iterate)
        if decode == "rows":
            self._patches.wrap_datasets(self._pipelines.serve)
        if least_bytes:
            self._patches.wrap(keras.layers.Embedding, "__new__", self._tables.new)
            self._patches.wrap(keras.optimizers.Optimizer, "load_own_variables", load_own_rows)
        strategy = resolve(exchange).within_group()
        files.patch(self._patches, began_s, strategy.is_sharding or strategy.may_shard_later)
        shares.use(True)
        write_on_first_rank(True)
        if runtime.rank() > 0:
            self._environment = replace_environment(_OTHER_RANKS)
        if runtime.rank() > 0 and not all_output:
            self._drop_output()

    def undo(self) -> None:
        """Restore Keras, and the standard output of this rank. Compile models again afterwards."""
        global _running
        _running = None
        self._patches.undo()
        shares.use(False)
        write_on_first_rank(False)
        replace_environment(self._environment)
        for model in self._models:
            forget(model)  # first: it puts back the steps that were there before it
            # The last one may lead to a patched method.
            restore_methods(model, *_STEPS, "save", "save_weights", "make_train_function")
            replace_methods(model, **self._own_steps[model])
            drop_functions(model)
        if self._stdout is not None:
            sys.stdout.flush()
            os.dup2(self._stdout, 1)
            os.close(self._stdout)
            self._stdout = None

    def _drop_output(self) -> None:
        sys.stdout.flush()
        self._stdout = os.dup(1)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)

    # Models.

    def _prepare(self, model: keras.Model) -> dict[str, BatchComparison]:
        """Let a model's steps compute this rank's rows; return the comparisons of its batches."""
        if is_alone():
            raise ConfigError(
                "model.predict and the like must be called on all ranks under "
                "tfscale.distribute. Received: a call in a callback that writes or logs, which "
                "runs on rank 0 only. Make the call in a keras.callbacks.Callback of its own."
            )
        if model not in self._models:
            _refuse_stateful(model)
            forget(model)
            comparisons = {name: BatchComparison() for name in _STEPS}
            self._models[model] = comparisons
            # A script may have given the model a step of its own: `model.train_step = step`.
            self._own_steps[model] = {n: s for n, s in vars(model).items() if n in _STEPS}
            steps_on_rows = {
                name: wrap(getattr(model, name), look=self._look(comparisons[name]))
                for name, wrap in _STEPS.items()
            }
            replace_methods(model, **steps_on_rows)
            watch(model)
            drop_functions(model)
        return self._models[model]

    def _look(self, comparison: BatchComparison) -> Callable[[Any], Any]:
        """Return a look at the batches of a step, but for those of a step that is only tried."""
        return lambda batch: None if self._verifier.is_trying else comparison(batch)

    def _prepare_training(self, model: keras.Model) -> BatchComparison:
        """Prepare a model, and wrap its optimizers."""
        batches = self._prepare(model)["train_step"]
        self._tables.warn_if_unused()
        attributes = {
            n: v for n, v in vars(model).items() if isinstance(v, keras.optimizers.Optimizer)
        }
        # One for each, also of two attributes, or of a model that was compiled again.
        wrapped = {id(o.__wrapped__): o for o in attributes.values() if is_wrapped(o)}
        for name, value in attributes.items():
            if is_wrapped(value):
                continue
            if id(value) not in wrapped:
                wrapped[id(value)] = DistributedOptimizer(
                    value, exchange=self._exchange, repeated_indices="keras"
                )
            replace_optimizer(model, wrapped[id(value)], name)
        rules = (update_rule(o.__wrapped__) for o in optimizers_of(model) if is_wrapped(o))
        self._updated_by.update(rules)  # not the wrappers, which end when a model is compiled again
        return batches

    def _apply(self, apply: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        rule = update_rule(optimizer)
        inner = (each for outer in self._updated_by for each in inner_optimizers(outer))
        if rule not in self._updated_by and all(each is not rule for each in inner):
            raise ConfigError(
                "optimizer must be of a compiled model, or its attribute, and used in fit or "
                "train_on_batch, under tfscale.distribute. Received: "
                f"{type(rule).__name__}.apply elsewhere, such as in a loop with GradientTape. "
                "Use tfscale.DistributedOptimizer and tfscale.data.GlobalBatches, or "
                "train_step, instead of tfscale.distribute: see 'An unchanged script' in the "
                "documentation."
            )
        return self._verifier.apply_or_record(apply, optimizer, *args, **kwargs)

    # Keras's methods.

    def _fit(self, fit: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(fit, model, *args, **kwargs)
        batches = self._prepare_training(model)
        _require_equal_arguments(arguments, "fit")
        arguments["callbacks"] = for_ranks(arguments["callbacks"], batches)
        batches.expect(arguments["x"], "fit")
        # Growing batches are made of whole ones.
        sizes = (isinstance(c, ChangingBatchSize) for c in arguments["callbacks"])
        with self._pipelines.switched_off(any(sizes)):
            history = fit(model, **arguments)
        # Groups exchange nothing in most steps.
        batches.require_equal(has_stopped=model.stop_training)
        return history

    def _evaluate(self, evaluate: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(evaluate, model, *args, **kwargs)
        batches = self._prepare(model)["test_step"]
        if not isinstance(arguments["callbacks"], keras.callbacks.CallbackList):  # else of `fit`
            _require_equal_arguments(arguments, "evaluate")
            callbacks = map(_written_once, _listed(arguments["callbacks"]))
            arguments["callbacks"] = [MetricAverageCallback(), *callbacks]
        return _compared(batches, arguments["x"], "evaluate", lambda: evaluate(model, **arguments))

    def _predict(self, predict: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(predict, model, *args, **kwargs)
        batches = self._prepare(model)["predict_step"]
        _require_equal_arguments(arguments, "predict")
        return _compared(batches, arguments["x"], "predict", lambda: predict(model, **arguments))

    def _on_batch(self, on_batch: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(on_batch, model, *args, **kwargs)
        as_dict, arguments["return_dict"] = arguments["return_dict"], True
        if "class_weight" in arguments:
            self._prepare_training(model).expect_one("train_on_batch")
            prepare(model)
        else:
            self._prepare(model)["test_step"].expect_one("test_on_batch")
        step = "train_step" if "class_weight" in arguments else "test_step"
        logs = raise_own_errors(lambda: on_batch(model, **arguments))
        results = metrics_of_all_ranks(model, logs, step, is_direct=True)
        return results if as_dict else metrics_in_order(model, results)

    def _predict_on_batch(
        self, predict_on_batch: Any, model: keras.Model, *args: Any, **kwargs: Any
    ) -> Any:
        self._prepare(model)["predict_step"].expect_one("predict_on_batch")
        return raise_own_errors(lambda: predict_on_batch(model, *args, **kwargs))


# Saves.


def _saving_once(save: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    name = save.__name__
    if name in vars(model):  # the safe save calls this one
        return save(model, *args, **kwargs)
    make_saves_safe(model)
    return getattr(model, name)(*args, **kwargs)


def _saving_by_method(save: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    method = save.__name__.removesuffix("_model")  # of keras.saving.save_model: `save`
    return getattr(model, method)(*args, **kwargs)


def _exporting_once(export: Any, exported: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
    what = f"{type(exported).__name__}.{export.__name__}"
    on_first_rank(lambda: export(exported, filepath, *args, **kwargs), what, filepath)


# Callbacks.


def _watched(fit: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Train in one process with a callback that lets the page of metrics follow."""
    arguments = arguments_of(fit, model, *args, **kwargs)
    arguments["callbacks"] = [Callback(), *_listed(arguments["callbacks"])]
    return fit(model, **arguments)


def for_ranks(callbacks: Any, batches: BatchComparison) -> list[keras.callbacks.Callback]:
    """Return the callbacks of a script as several ranks need them.

    `Synchronize` is added, which tells the comparison of batches when epochs begin, and callbacks
    that write run on rank 0.
    """
    listed = _listed(callbacks)
    loggers = [c for c in listed if isinstance(c, keras.callbacks.CSVLogger)]
    everywhere = [c for c, differs in zip(loggers, share_logs(loggers), strict=True) if differs]
    changed: list[Any] = []
    for callback in listed:
        if type(callback) is keras.callbacks.BackupAndRestore:
            options = (callback.save_freq, callback.double_checkpoint, callback.delete_checkpoint)
            changed.append(BackupAndRestore(callback.backup_dir, *options))
        else:
            is_of_all = any(callback is c for c in everywhere)
            changed.append(callback if is_of_all else _written_once(callback))
    has_one = any(isinstance(callback, Synchronize) for callback in changed)
    return changed if has_one else [_SynchronizeScript(batches), *changed]


class _SynchronizeScript(Synchronize):
    """`Synchronize` for a script: its model may be built later, and validation has all rows."""

    requires_built = False

    def __init__(self, batches: BatchComparison) -> None:
        super().__init__()
        self._batches = batches
        others = [c for c in self.companions if not isinstance(c, MetricAverageCallback)]
        self.companions = [*others, _MetricsOfAllRows()]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """As for all callbacks; count the batches of the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._batches.begin_epoch(epoch, self.session.first_step_of(epoch))


class _MetricsOfAllRows(MetricAverageCallback):
    averages_validation = True


def _written_once(callback: Any) -> Any:
    package = type(callback).__module__.partition(".")[0]
    only_writes = isinstance(callback, _WRITING) or package in _WRITING_PACKAGES
    return WrittenOnce(callback) if only_writes else callback


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]


def _refuse_stateful(model: keras.Model) -> None:
    stateful = [layer.name for layer in layers_of(model) if getattr(layer, "stateful", False)]
    if stateful:
        raise ConfigError(
            "stateful=True needs a state for every row of the whole batch, which "
            f"tfscale.distribute cuts into rows for the ranks. Received: layer {stateful[0]!r} "
            "with stateful=True. Use stateful=False, or train without tfscale.distribute, with "
            "sequences of its own for each rank: see 'Data' in the documentation."
        )


# Strategies of tf.distribute.


def _without_replicas(scope: Any, strategy: Any) -> Any:
    n_replicas, name = strategy.num_replicas_in_sync, type(strategy).__name__
    if n_replicas > 1 or "ParameterServer" in name:
        raise ConfigError(
            "strategy.scope() must not be used with tfscale.distribute, which divides each "
            f"batch itself. Received: the scope of a {name} with {n_replicas} replicas. Start "
            "one rank for each device, and show it that device alone (CUDA_VISIBLE_DEVICES), or "
            "leave strategy.scope() out."
        )
    return contextlib.nullcontext(strategy)  # of one device, where a rank computes anyway


def _without_workers(
    init: Any, strategy: Any, cluster_resolver: Any = None, *args: Any, **options: Any
) -> Any:
    resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = [task for job in resolver.cluster_spec().as_dict().values() for task in job]
    if len(tasks) > 1:
        raise ConfigError(
            "TF_CONFIG must be unset under tfscale.distribute: TensorFlow's workers would wait "
            f"for each other. Received: {type(strategy).__name__} with a cluster of {len(tasks)} "
            "tasks. Unset TF_CONFIG, and name the hosts to `tfscale run -H`."
        )
    init(strategy, cluster_resolver, *args, **options)


# Data of the ranks.


def _compared(batches: BatchComparison, data: Any, method: str, call: Callable[[], Any]) -> Any:
    """Return what a call returns if it has read the same batches on all ranks. Collective."""
    batches.expect(data, method)
    result = raise_own_errors(call)
    session = running_session()
    if session is None or not session.is_void:  # no rank would answer there
        batches.require_equal()
    return result


def _require_equal_arguments(arguments: dict[str, Any], method: str) -> None:
    """Compare arrays and plain settings over ranks. Collective."""
    if isinstance(arguments.get("x"), GlobalBatches):
        raise ConfigError(
            f"x must be arrays or a dataset. Received: x=GlobalBatches in {method}. Pass the "
            "arrays or the dataset, with batch_size for all ranks together."
        )
    described = {name: _describe(value) for name, value in arguments.items() if name != "callbacks"}
    hint = "Read or generate the same data on every rank; tfscale.distribute gives each its part."
    objects.require_equal(described, f"Arguments of {method}", hint)


def _describe(value: Any) -> str:
    """Return a text that is equal for equal arrays and settings, without reading other data."""
    if isinstance(value, tf.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return f"{value.shape} {zlib.crc32(str(value.ravel()[:1000].tolist()).encode())}"
        stride = max(1, value.nbytes // _DIGEST_BYTES) if value.ndim else 1
        part = np.ascontiguousarray(value[::stride] if value.ndim else value)
        return f"{value.shape} {value.dtype} {zlib.crc32(part.view(np.uint8))}"
    if isinstance(value, list | tuple):
        return str([_describe(item) for item in value[:1000]])
    if isinstance(value, dict):
        return str([(str(key), _describe(item)) for key, item in value.items()])
    plain = isinstance(value, str | int | float | bool | type(None))
    return repr(value) if plain else type(value).__name__
