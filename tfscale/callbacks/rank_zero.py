"""Run a callback on one rank."""

from __future__ import annotations

import keras

from tfscale.callbacks.base import Callback, Container
from tfscale.checkpoints.resumable import OnRankZero, Resumable
from tfscale.comm import runtime
from tfscale.config import ConfigError

_CHANGES_MODEL = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class RankZero(Container):
    """Run any Keras callback on rank 0 only: `RankZero(keras.callbacks.TensorBoard("logs"))`.

    Pass it to `fit` on every rank. On the other ranks no hook of the callback is called, not even
    `set_model`. If it sets `model.stop_training`, all ranks stop together.

    Args:
        callback: A Keras callback that does not communicate.

    Raises:
        ConfigError: `callback` is not a Keras callback, is one of tfscale's that needs all ranks,
            is a BackupAndRestore, which sets the epoch in which the ranks begin, or changes weights
            or the learning rate.
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        is_ours = isinstance(callback, Callback | keras.callbacks.BackupAndRestore)
        if not isinstance(callback, keras.callbacks.Callback) or is_ours:
            raise ConfigError(
                "RankZero takes a Keras callback that does not communicate. Received: "
                f"callback={callback!r}. Give callbacks of tfscale to fit() as they are, "
                "tfscale.callbacks.BackupAndRestore among them."
            )
        if isinstance(callback, _CHANGES_MODEL) or getattr(callback, "restore_best_weights", False):
            raise ConfigError(
                "RankZero takes a callback that leaves the model as it is, or ranks would differ. "
                f"Received: {type(callback).__name__}, which sets weights or the learning rate. "
                "Give it to fit() on all ranks, behind MetricAverageCallback."
            )
        self.callback = callback

    def parts(self) -> list[keras.callbacks.Callback]:
        """Return the callback, on rank 0."""
        return [self.callback] if runtime.rank() == 0 else []

    def resumables(self) -> list[Resumable]:
        """Return the callback if checkpoints keep its state, which is that of rank 0."""
        return [OnRankZero(self.callback)] if isinstance(self.callback, Resumable) else []
