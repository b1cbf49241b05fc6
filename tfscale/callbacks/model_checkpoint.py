"""Model files of `ModelCheckpoint` and its subclasses, each written by one rank.

Ranks must know each other's callbacks that save, to gather sharded state in time:
`agree_on_saves` exchanges them when a `fit` begins.
"""

from __future__ import annotations

import contextlib
import functools
import os
from types import SimpleNamespace
from typing import Any

import keras

from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.fit.session import FitSession, session_of
from tfscale.internals.keras import batches_of, saves_after, wrap_saves, writing_nothing
from tfscale.internals.traits import Phase, Traits
from tfscale.optimizer.distributed import distributed_optimizers, sharded_states
from tfscale.optimizer.saving import alone, is_written_once


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """`keras.callbacks.ModelCheckpoint` that writes on rank 0 only.

    The arguments are those of Keras. It may be passed to `fit` on all ranks or on rank 0 only.
    Ranks that have it make equal decisions, and have an equal `best`, if their logs are equal
    (`MetricAverageCallback`).

    Examples:
        >>> import os
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> checkpoint = tfscale.callbacks.ModelCheckpoint("epoch-{epoch}.keras")
        >>> callbacks = [tfscale.callbacks.Synchronize(), checkpoint]
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
        >>> os.listdir()
        ['epoch-1.keras']
    """

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        is_first = runtime.rank() == 0
        with alone() if is_first else writing_nothing(self):
            super()._save_model(epoch, batch, logs)


class BestModelCheckpoint(ModelCheckpoint):
    """Write the model whenever the monitored quantity improves; rank 0 writes.

    All ranks make equal decisions if their logs are equal (`MetricAverageCallback`).

    Args:
        monitor: Key of the logs to watch.
        verbose: 1 prints a line for each decision.
        mode: `"min"`, `"max"` or `"auto"`, which infers the direction from the metric.
        save_freq: `"epoch"` or a number of batches.
        filepath: Path ending in `.keras`; may contain `{epoch}` and keys of the logs.
        initial_value_threshold: The model is saved only for values better than this one.

    Examples:
        >>> import os
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> best = tfscale.callbacks.BestModelCheckpoint(monitor="loss", filepath="best.keras")
        >>> callbacks = [tfscale.callbacks.Synchronize(), best]
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
        >>> os.listdir()
        ['best.keras']
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best_model.keras",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )


# Agreement of the ranks when a `fit` begins.


class SavePoints(Traits):
    """Gathers the complete state of sharded optimizers before a callback of any rank saves.

    Every rank has one, see `agree_on_saves`. Ranks that write keep the state until the next step.
    """

    phase = Phase.GATHER

    def __init__(
        self, session: FitSession, points: list[dict[str, Any]], silent: list[Any], is_keeper: bool
    ) -> None:
        super().__init__()
        self._session = session
        self._points = [SimpleNamespace(**point) for point in points]  # one per saving callback
        self._is_keeper = is_keeper  # a callback of this rank writes
        self.silent = silent  # callbacks of this rank whose file another rank writes
        self.is_given_up = False  # the last step or epoch was given up: nothing may be saved

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Drop the gathered state, which the step makes outdated."""
        for kept in sharded_states(self.model):
            kept.forget()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Gather if a callback saves after this batch, but not after a step that was given up."""
        self.is_given_up = self._session.is_given_up
        due = [saves_after(point, batch) for point in self._points]
        if any(due) and not self.is_given_up:
            self._gather()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gather if a callback saves at the end of epochs."""
        self._session.end_epoch(epoch)  # Ranks that wait in a step must learn of it.
        self.is_given_up = self._session.is_void  # if not, all ranks have completed steps of it
        if not self.is_given_up and any(point.save_freq == "epoch" for point in self._points):
            self._gather()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the agreement: saves outside of `fit` are agreed on one by one."""
        self._session.agree_on_saves(None)

    def _gather(self) -> None:
        for kept in sharded_states(self.model):
            kept.gather(is_kept=self._is_keeper)


def agree_on_saves(session: FitSession) -> None:
    """Exchange the callbacks that save, if ranks share optimizer state. Collective."""
    callbacks = [getattr(c, "callback", c) for c in session.callbacks]  # those inside of RankZero
    saving = [c for c in callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
    swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks)
    if session.has_groups:
        _require_averages_saved(saving, swaps)
    optimizers = distributed_optimizers(session.model)
    sharing = [o for o in optimizers if o.shares_state]
    later = [o for o in optimizers if o.may_share_state]
    if not sharing and not later:
        return
    # Time and path of each callback's saves; a callback may have counted batches before.
    points_of_rank = [
        {"save_freq": c.save_freq, "path": c.filepath, **batches_of(c)} for c in saving
    ]
    process_set = (sharing or later)[0].bound.executor.process_set
    saves_by_rank = objects.allgather_object(
        (swaps, points_of_rank), "callbacks that save", process_set
    )
    if sharing and any(rank_swaps for rank_swaps, _ in saves_by_rank):
        raise ConfigError(
            "SwapEMAWeights cannot swap sharded parameters. Received: SwapEMAWeights. Use "
            "ema_overwrite_frequency, or exchange='allreduce'."
        )
    points = [point for _, rank_points in saves_by_rank for point in rank_points]
    if points:
        writers: dict[str, int] = {}
        for set_rank, (_, rank_points) in enumerate(saves_by_rank):
            for point in rank_points:
                writers.setdefault(point["path"], set_rank)
        set_rank = process_set.rank()
        silent = [c for c in saving if writers[c.filepath] != set_rank]
        saves = SavePoints(session, points, silent, set_rank in writers.values())
        session.agree_on_saves(saves)
        session.add(saves)


def _require_averages_saved(saving: list[Any], swaps: bool) -> None:
    """Refuse callbacks that would show or save one group's model as that of all. Collective."""
    text = ""
    if swaps:
        text = "SwapEMAWeights, which knows one group's averages over time. Leave it out."
    for callback in saving:
        if callback.save_freq != "epoch":
            text = (
                f"{type(callback).__name__}(save_freq={callback.save_freq}). Use "
                "save_freq='epoch', or tfscale.callbacks.Checkpoint, which keeps all models."
            )
    texts = objects.allgather_object(text, "callbacks that see groups")
    if any(texts):
        raise ConfigError(
            f"callbacks must save the groups' common model. Received: {next(filter(None, texts))}"
        )


def make_checkpoints_safe() -> None:
    """Let each file of Keras's own `ModelCheckpoint` be written by one rank: `agree_on_saves`."""
    wrap_saves(_agreed)


def _agreed(save_model: Any) -> Any:
    @functools.wraps(save_model)
    def save_as_agreed(self: Any, epoch: int, batch: int | None, logs: Any) -> None:
        session = session_of(self.model)
        saves = None if session is None else session.saves
        if saves is not None and saves.is_given_up:
            return
        # The numbers of a batch are each rank's own: rank 0 decides, and none waits for it.
        decides_alone = batch is not None and is_written_once() and not sharded_states(self.model)
        if decides_alone and session is not None and session.is_given_up:
            return
        is_silent = saves is not None and any(callback is self for callback in saves.silent)
        if is_silent or (decides_alone and runtime.rank() > 0):
            with writing_nothing(self):
                save_model(self, epoch, batch, logs)
            return
        folder = os.path.dirname(self.filepath)
        if folder and "{" not in folder and "://" not in folder:
            os.makedirs(folder, exist_ok=True)
        with alone() if decides_alone or saves is not None else contextlib.nullcontext():
            save_model(self, epoch, batch, logs)

    return save_as_agreed
