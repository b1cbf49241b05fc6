"""Run a callback on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfscale.callbacks.base import Callback
from tfscale.checkpoints.resumable import OnRankZero, Resumable
from tfscale.comm import runtime
from tfscale.config import ConfigError

_CHANGES_MODEL = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class RankZero(Callback):
    """Run any Keras callback on rank 0 only: `RankZero(keras.callbacks.TensorBoard("logs"))`.

    Give it to `fit` on every rank. On the other ranks the callback learns of nothing, not even
    of the model. Where it sets `model.stop_training`, all ranks stop together.

    Args:
        callback: A Keras callback that does not communicate.

    Raises:
        ConfigError: `callback` is no callback, one of tfscale's that needs all ranks, a
            BackupAndRestore, which decides in which epoch the ranks begin, or one that changes
            weights or the learning rate.
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

    def resumables(self) -> list[Resumable]:
        """Return the callback inside if checkpoints keep its state, which is rank 0's."""
        return [OnRankZero(self.callback)] if isinstance(self.callback, Resumable) else []

    def set_params(self, params: dict[str, Any]) -> None:
        """Forward the parameters on rank 0."""
        super().set_params(params)
        self._forward("set_params", params)

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model everywhere, forward it on rank 0."""
        super().set_model(model)
        self._forward("set_model", model)

    def _forward(self, name: str, *args: Any) -> None:
        if runtime.rank() == 0:
            getattr(self.callback, name)(*args)


def _forwarding(name: str) -> Callable[..., None]:
    def hook(self: RankZero, *args: Any, **kwargs: Any) -> None:
        getattr(super(RankZero, self), name)(*args, **kwargs)
        self._forward(name, *args, *kwargs.values())

    hook.__name__ = name
    hook.__doc__ = f"Forward `{name}` on rank 0."
    return hook


for _name in (
    *("on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end"),
    *("on_train_batch_begin", "on_train_batch_end", "on_test_begin", "on_test_end"),
    *("on_test_batch_begin", "on_test_batch_end", "on_predict_begin", "on_predict_end"),
    *("on_predict_batch_begin", "on_predict_batch_end"),
):
    setattr(RankZero, _name, _forwarding(_name))
