"""Where a `fit` saves: what ranks must know of each other's callbacks to gather state in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras

from tfscale.comm import objects, runtime
from tfscale.config import ConfigError
from tfscale.fit.session import FitSession
from tfscale.internals.keras import batches_of, saves_after
from tfscale.optimizer.distributed import distributed_optimizers, sharded_states

_KEY = "_tfscale_save_points"  # attribute of callbacks that save: the point, and who writes
_Checkpoint = keras.callbacks.ModelCheckpoint


class SavePoints(keras.callbacks.Callback):
    """Gathers the complete state of sharded optimizers where a callback of any rank will save.

    `agree` puts it in front of the callbacks of each rank. Ranks that write keep the state until
    the next step.
    """

    def __init__(self, session: FitSession, points: list[dict[str, Any]], is_keeper: bool) -> None:
        """Take over what the ranks agreed on.

        Args:
            session: That of the `fit`.
            points: One for each rhythm in which some callback saves; see `_point`.
            is_keeper: Whether a callback of this rank writes.
        """
        super().__init__()
        self._session = session
        self._points = [SimpleNamespace(**point) for point in points]
        self._is_keeper = is_keeper
        self._n_given_up = 0
        self._n_steps = 0
        self._is_void = False  # nobody else takes part in what is left of this epoch
        self.is_given_up = False  # the last step was

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect an epoch that counts."""
        self._n_given_up, self._n_steps = runtime.num_given_up(), 0
        self._is_void = self.is_given_up = False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Drop what the step makes outdated."""
        for kept in sharded_states(self.model):
            kept.forget()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Gather, if a callback saves after this batch; not after a step that was given up."""
        self._n_steps += 1
        self.is_given_up = runtime.num_given_up() > self._n_given_up
        self._is_void = self.is_given_up and self._n_steps == 1
        due = [saves_after(point, batch) for point in self._points]
        if any(due) and not self.is_given_up:
            self._gather()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Gather, if a callback saves at the end of epochs."""
        self._session.end_epoch(epoch)  # Ranks that wait in a step must learn of it.
        is_due = any(point.save_freq == "epoch" for point in self._points)
        if is_due and not self._is_void:
            self.is_given_up = False
            self._gather()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Let saves outside of `fit` be agreed on one by one."""
        _forget(self._session)

    def _gather(self) -> None:
        for kept in sharded_states(self.model):
            kept.gather(is_kept=self._is_keeper)


def agree(session: FitSession) -> None:
    """Tell the ranks of each other's callbacks that save, if they share optimizer state.

    Collective: all ranks, when a `fit` begins.

    Args:
        session: That of the `fit`.

    Raises:
        ConfigError: A callback needs the state on each rank.
    """
    _forget(session)
    _require_averages_saved(session)
    optimizers = distributed_optimizers(session.model)
    sharing = [o for o in optimizers if o.shares_state]
    later = [o for o in optimizers if o.may_share_state]
    if not sharing and not later:
        return
    callbacks = _callbacks(session)
    saving = [c for c in callbacks if isinstance(c, _Checkpoint)]
    swaps = any(isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks)
    own = [_point(callback) for callback in saving]
    process_set = (sharing or later)[0].sharing_set
    every = objects.allgather_object((swaps, own), "callbacks that save", process_set)
    if sharing and any(rank_swaps for rank_swaps, _ in every):
        raise ConfigError(
            "Averages of sharded parameters are held in parts. Received: SwapEMAWeights. Use "
            "ema_overwrite_frequency, or exchange='allreduce'."
        )
    points = [point for _, rank_points in every for point in rank_points]
    if points:
        writers: dict[str, int] = {}
        for place, (_, rank_points) in enumerate(every):
            for point in rank_points:
                writers.setdefault(point["path"], place)
        place = process_set.rank()
        save_points = SavePoints(session, points, place in writers.values())
        for callback, point in zip(saving, own, strict=True):
            callback.__dict__[_KEY] = save_points, writers[point["path"]] != place
        save_points.set_model(session.model)
        session.put_first(save_points)


def _require_averages_saved(session: FitSession) -> None:
    """Refuse callbacks that would show or save one group's model as that of all."""
    if not session.has_groups:
        return
    callbacks = _callbacks(session)
    text = ""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            text = "SwapEMAWeights, which knows one group's averages over time. Leave it out."
        elif isinstance(callback, _Checkpoint) and callback.save_freq != "epoch":
            text = (
                f"{type(callback).__name__}(save_freq={callback.save_freq}). Use "
                "save_freq='epoch', or tfscale.callbacks.Checkpoint, which keeps all models."
            )
    every = objects.allgather_object(text, "callbacks that see groups")
    if any(every):
        raise ConfigError(
            "Groups that train apart have a common model where epochs end. Received: "
            f"{next(filter(None, every))}"
        )


def _callbacks(session: FitSession) -> list[Any]:
    return [getattr(c, "callback", c) for c in session.callbacks]  # those inside of RankZero


def _forget(session: FitSession) -> None:
    for callback in _callbacks(session):
        callback.__dict__.pop(_KEY, None)


def is_given_up(callback: Any) -> bool:
    """Return whether the last step of a `fit` was given up, so that nothing may be saved."""
    save_points, _ = callback.__dict__.get(_KEY, (None, False))
    return save_points is not None and bool(save_points.is_given_up)


def is_silent(callback: Any) -> bool:
    """Return whether another rank writes what a callback saves."""
    return bool(callback.__dict__.get(_KEY, (None, False))[1])


def _point(callback: Any) -> dict[str, Any]:
    """Describe when a callback saves, and where; it may have counted batches before."""
    return {
        "save_freq": callback.save_freq,
        "path": callback.filepath,
        **batches_of(callback),
    }
