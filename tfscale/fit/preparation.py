"""Prepare a compiled model for several ranks; repeated calls cost nothing."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfscale.comm import runtime
from tfscale.comm.runtime import global_process_set
from tfscale.config import ConfigError
from tfscale.data.global_batches import GlobalBatches
from tfscale.exchange import dense
from tfscale.exchange.sync_batch_norm import SyncBatchNormalization
from tfscale.fit.guarded_step import GuardedStep
from tfscale.internals.keras import (
    is_xla_automatic,
    layers_of,
    trained_by,
    wrap_train_function,
)
from tfscale.internals.optimizers import optimizers_of
from tfscale.internals.stack import data_of_fit
from tfscale.optimizer.distributed import DistributedOptimizer, distributed_of, is_distributed
from tfscale.optimizer.saving import make_saves_safe

logger = logging.getLogger("tfscale")


def prepare(model: keras.Model, sample_batch: Any = None) -> keras.Model:
    """Make a compiled model ready. All tfscale callbacks but model checkpoints call this.

    Builds the model if a batch is given, switches XLA off where "auto" switched it on, puts
    compile()'s automatic loss scaling inside of the distributed optimizer, lets the exchange change
    layers, drops functions traced before, so that they are traced again, and lets several ranks
    save to one path.

    Args:
        model: A compiled Keras model.
        sample_batch: A batch of inputs; needed only by models that are not built and do not know
            their shapes.

    Returns:
        The same model.

    Raises:
        ConfigError: XLA was asked for, or, on several ranks, the model is not compiled.
    """
    if sample_batch is not None and not model.built:
        model(sample_batch)
    if runtime.is_single():
        return model
    if not hasattr(model, "optimizer"):
        raise ConfigError(
            "A model must be compiled before it is prepared. Received: "
            f"model={model.name!r} without an optimizer. Call model.compile first."
        )
    has_changed = _switch_off_xla(model)
    has_changed = _repair_loss_scale(model) or has_changed
    if type(model.optimizer) is DistributedOptimizer:
        has_changed = wire(model.optimizer, model) or has_changed
    else:
        has_changed = _restore_layers(model) or has_changed
    has_changed = share_statistics(model) or has_changed
    if has_changed:
        model.train_function = model.test_function = model.predict_function = None
    wrap_train_function(model, lambda step: GuardedStep(model, step), GuardedStep)
    make_saves_safe(model)
    return model


def wire(optimizer: DistributedOptimizer, model: keras.Model) -> bool:
    """Let the exchange change the model's layers, given the batch size of the running `fit`.

    Returns:
        Whether functions of the model must be traced again.
    """
    data = data_of_fit()
    batch = data.batch_size if isinstance(data, GlobalBatches) else None
    return optimizer.wire(model, batch)


def _switch_off_xla(model: keras.Model) -> bool:
    if not getattr(model, "compiled", False) or not model.jit_compile:
        return False
    if not is_xla_automatic(model):
        raise ConfigError(
            "XLA cannot compile a step that exchanges gradients. Received: jit_compile=True. "
            "Compile the model with jit_compile=False."
        )
    logger.info("XLA is switched off: it cannot compile a step that exchanges gradients.")
    model.jit_compile = False
    return True


def _repair_loss_scale(model: keras.Model) -> bool:
    """Turn LossScaleOptimizer(DistributedOptimizer(inner)) inside out."""
    scaler: Any = getattr(model, "optimizer", None)
    if type(scaler) is not keras.optimizers.LossScaleOptimizer:
        return False
    distributed = scaler.inner_optimizer
    if type(distributed) is not DistributedOptimizer:
        return False
    distributed.undo_shards()  # they know nothing of a scale
    scaler.inner_optimizer = inner = distributed.__wrapped__
    if inner.built and not scaler.built:
        scaler.build(trained_by(inner))
    distributed.__wrapped__ = scaler
    model.optimizer = distributed
    logger.info("Loss scaling is moved inside of the distributed optimizer.")
    return True


def _restore_layers(model: keras.Model) -> bool:
    """Give layers that an earlier optimizer changed their own calls back."""
    optimizers = optimizers_of(model)
    if not optimizers or any(is_distributed(optimizer) for optimizer in optimizers):
        return False
    return any([dense.restore(layer) for layer in layers_of(model)])


def share_statistics(model: keras.Model) -> bool:
    """Let SyncBatchNormalization take the samples of the ranks that exchange gradients."""
    distributed = distributed_of(getattr(model, "optimizer", None))
    process_set = global_process_set if distributed is None else distributed.sharing_set
    layers = [i for i in layers_of(model) if isinstance(i, SyncBatchNormalization)]
    return any([layer.follow(process_set) for layer in layers])
