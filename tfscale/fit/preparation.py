"""Prepare a compiled model for several ranks, and act on it once its variables exist."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.comm.eager import raise_own_errors
from tfscale.config import ConfigError, check_integer
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import batch_shares, dense
from tfscale.exchange.sync_batch_norm import SyncBatchNormalization, synchronize
from tfscale.fit import monitoring
from tfscale.fit.batches import serve_weighed
from tfscale.fit.session import session_for, session_of
from tfscale.fit.steps import share_batches
from tfscale.fit.uneven_batches import GuardedStep
from tfscale.internals import keras as internals
from tfscale.internals.optimizers import optimizer_of, optimizers_of, strategies_of
from tfscale.layers.sharded_embedding import ShardedEmbedding, sharded_embeddings
from tfscale.optimizer.distributed import DistributedOptimizer, distributed_of
from tfscale.optimizer.saving import make_saves_safe

logger = logging.getLogger("tfscale")


def prepare(
    model: keras.Model, sample_batch: Any = None, *, batch_size: int | None = None
) -> keras.Model:
    """Prepare a compiled model for several ranks, as tfscale callbacks but model checkpoints do.

    Repeated calls cost nothing. Builds the model if a batch is given, switches XLA off where "auto"
    switched it on, puts compile()'s automatic loss scaling inside of the distributed optimizer,
    lets the exchange change layers, drops functions traced before, so that they are traced again,
    and lets several ranks save to one path.

    Args:
        model: A compiled Keras model.
        sample_batch: A batch of inputs; needed only by models that are not built and do not know
            their shapes.
        batch_size: Samples of one step over all ranks, from which "auto" chooses what dense layers
            exchange. Needed only where `fit` gets no `GlobalBatches`, as in a custom loop.

    Returns:
        The same model.

    Raises:
        ConfigError: `batch_size` is less than 1; XLA was asked for; or, on several ranks, the model
            is not compiled or was made for replicas of tf.distribute.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.layers.Dense(1)])  # has no weights yet
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> tfscale.prepare(model, sample_batch=np.zeros((4, 3))).count_params()
        4
    """
    if batch_size is not None:
        check_integer("batch_size", batch_size, 1)
    if sample_batch is not None and not model.built:
        model(sample_batch)
    watch = monitoring.watch()
    if runtime.is_single():
        if type(optimizer_of(model)) is DistributedOptimizer:
            model.optimizer.bound.refuse_tables(model.trainable_variables)
        if watch is not None:
            watch.count_samples(model)
            _guard(model)
        return model
    _refuse_replicas(model)
    if not hasattr(model, "optimizer"):
        raise ConfigError(
            f"model must be compiled before it is prepared. Received: model={model.name!r} "
            "without an optimizer. Call model.compile first."
        )
    has_changed = _switch_off_xla(model)
    has_changed = _repair_loss_scale(model) or has_changed
    if type(model.optimizer) is DistributedOptimizer:
        has_changed = _wire(model.optimizer, model, batch_size) or has_changed
    else:
        has_changed = _restore_layers(model) or has_changed
    has_changed = _share_statistics(model) or has_changed
    if has_changed:
        internals.drop_functions(model)
    session = session_for(model)
    data = session.whole_batches
    if isinstance(data, GlobalBatches):
        serve_weighed(session.call.epochs, data)
    share_batches(model, data)
    if watch is not None:
        watch.count_samples(model)
    _guard(model)
    make_saves_safe(model)
    join_passes(model)
    return model


def prepare_again(model: keras.Model) -> None:
    """Prepare a model in a `fit` that has begun, whose train function may change."""
    prepare(model)
    if model.train_function is None:
        model.make_train_function(force=True)


def _guard(model: keras.Model) -> None:
    internals.wrap_train_function(
        model, lambda step: GuardedStep(model, step, session_of), GuardedStep
    )


def _wire(
    optimizer: DistributedOptimizer, model: keras.Model, batch_size: int | None = None
) -> bool:
    """Let the exchange change the model's layers; return whether to trace functions again."""
    data = session_for(model).data
    return optimizer.wire(model, data.batch_size if isinstance(data, GlobalBatches) else batch_size)


def _refuse_replicas(model: keras.Model) -> None:
    """Raise a ConfigError for a model that a strategy of tf.distribute was given to train."""
    for strategy in strategies_of(model):
        raise ConfigError(
            "model must not be in the scope of a strategy: tfscale divides the work between "
            f"processes. Received: model={model.name!r}, made or compiled in the scope of a "
            f"{type(strategy).__name__}. Leave strategy.scope() out, and start one rank for each "
            "replica."
        )


def _switch_off_xla(model: keras.Model) -> bool:
    if not getattr(model, "compiled", False) or not model.jit_compile:
        return False
    if not internals.is_xla_automatic(model):
        raise ConfigError(
            "jit_compile must be False to exchange gradients. Received: jit_compile=True. "
            "Compile the model with jit_compile=False."
        )
    logger.info("XLA is switched off: it cannot compile a step that exchanges gradients.")
    internals.switch_off_xla(model)
    return True


def _repair_loss_scale(model: keras.Model) -> bool:
    """Turn LossScaleOptimizer(DistributedOptimizer(inner)) inside out."""
    scaler: Any = optimizer_of(model)
    if type(scaler) is not keras.optimizers.LossScaleOptimizer:
        return False
    distributed = scaler.inner_optimizer
    if type(distributed) is not DistributedOptimizer:
        return False
    distributed.insert_scaler(scaler)
    internals.replace_optimizer(model, distributed)
    logger.info("Loss scaling is moved inside of the distributed optimizer.")
    return True


def _restore_layers(model: keras.Model) -> bool:
    """Restore the `call` of layers that an earlier distributed optimizer replaced."""
    optimizers = optimizers_of(model)
    if not optimizers or any(map(distributed_of, optimizers)):
        return False
    return any([dense.restore(layer) for layer in internals.layers_of(model)])


def _share_statistics(model: keras.Model) -> bool:
    """Let SyncBatchNormalization use the samples of all ranks that exchange gradients.

    So does Keras's own layer with `synchronized=True`, which knows replicas of tf.distribute only.
    """
    distributed = distributed_of(optimizer_of(model))
    everyone = runtime.global_process_set
    process_set = everyone if distributed is None else distributed.bound.executor.process_set
    layers = internals.layers_of(model)
    synced = [layer for layer in layers if isinstance(layer, SyncBatchNormalization)]
    has_changed = any([layer.follow(process_set) for layer in synced])
    if batch_shares.are_used():  # `tfscale.distribute` sees to the statistics of every layer
        return has_changed
    normalizations = [i for i in layers if isinstance(i, keras.layers.BatchNormalization)]
    normalizations = [i for i in normalizations if i.synchronized and i not in synced]
    return any([synchronize(layer, process_set) for layer in normalizations]) or has_changed


def build(model: keras.Model) -> None:
    """Make all variables of a compiled model and its optimizer, before its first update.

    A model that does not know its shapes yet gets them from the data of the running `fit`.
    """
    build_model(model)
    build_optimizer(model)


def build_model(model: keras.Model) -> None:
    """Make the variables of a compiled model, and shards of its one optimizer if it has any."""
    if not internals.is_built(model):
        build_from_data(model)
    optimizer = optimizer_of(model)
    if type(optimizer) is DistributedOptimizer and internals.is_built(model):
        _wire(optimizer, model)  # the layers may not have existed when the model was prepared
        _share_statistics(model)
        if not runtime.is_single():
            join_passes(model)


def build_optimizer(model: keras.Model) -> None:
    """Build the compiled optimizer on all variables that the model trains, unless it is built."""
    optimizer = optimizer_of(model)
    distributed = distributed_of(optimizer)
    is_shared = bool(distributed and distributed.shares_state) and len(optimizers_of(model)) > 1
    if optimizer is not None and not optimizer.built and not is_shared:
        optimizer.build(model.trainable_variables)


def build_from_data(model: keras.Model) -> None:
    """Build model, losses and metrics from the element spec of the data of the running `fit`."""

    def spec_of_batch() -> Any:
        spec = internals.batch_spec_of(session_for(model).call.epochs)
        return spec.rows if isinstance(spec, batch_shares.RowsOfBatch) else spec

    internals.build_from_spec(model, spec_of_batch)


# Passes of models with tables.


def join_passes(model: keras.Model) -> None:
    """Let `evaluate` and `predict` of a model with tables run on all ranks together.

    Elsewhere these send nothing. With tables they begin together, within a time limit, and a rank
    that has no batch left answers the lookups of the others until the last one has ended.
    """
    if sharded_embeddings(model):
        internals.wrap_once(model, "evaluate", lambda run: _joined(model, run, "model.evaluate"))
        internals.wrap_once(model, "predict", lambda run: _joined(model, run, "model.predict"))
        internals.replace_methods(model, export=_refuse_export)


def _refuse_export(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "model.export needs whole tables. Received: a model with a ShardedEmbedding on "
        f"{runtime.size()} ranks. Save it on all ranks, load the file in one process, and export "
        "that model."
    )


def _joined(model: keras.Model, run: Callable[..., Any], what: str) -> Callable[..., Any]:
    def run_together(*args: Any, **kwargs: Any) -> Any:
        layers, session = sharded_embeddings(model), session_of(model)
        if not layers:  # a script reads the table, which is whole by now
            return run(*args, **kwargs)
        if session is not None and internals.is_validation(kwargs):
            if session.is_void:  # other ranks may have left `fit`
                return {}
            session.end_steps()  # ranks that wait in a step must learn of it
        layers[0].rows.meet(what)
        result = run(*args, **kwargs)
        _answer_all(layers)
        return result

    return run_together


def _answer_all(layers: Sequence[ShardedEmbedding]) -> None:
    """Answer lookups until no rank looks up. Collective.

    A thread for each table, since it is not known in which order, and how often, other ranks look
    up in each.
    """
    errors: list[Exception] = []

    def answer(layer: ShardedEmbedding) -> None:
        try:
            while raise_own_errors(layer.answer):
                pass
        except Exception as error:  # raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=answer, args=(layer,), daemon=True) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
