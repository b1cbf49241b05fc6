"""The base of all callbacks of tfscale, and the one that runs another on rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.callbacks.model_checkpoint import agree_on_saves, make_checkpoints_safe
from tfscale.checkpoints.resumable import State
from tfscale.checkpoints.variables import non_trainable_state
from tfscale.comm import runtime
from tfscale.comm.eager import has_exchanged_gradients
from tfscale.comm.warnings import warn_if_unsynchronised, warn_of_deciders
from tfscale.config import ConfigError
from tfscale.data.slices import StepCount
from tfscale.fit import agreement
from tfscale.fit.preparation import prepare, prepare_again
from tfscale.fit.session import FitSession, join_list, session_for
from tfscale.fit.steps import share_batches
from tfscale.internals.keras import replace_step, steps_until
from tfscale.internals.trace import run_either
from tfscale.internals.traits import Traits
from tfscale.optimizer.distributed import accumulators, distributed_optimizers
from tfscale.optimizer.saving import alone


class Callback(Traits):
    """Base class: prepare the model, order the callbacks, and coordinate the ranks of a `fit`.

    A subclass that overrides a hook calls the base hook first. With several tfscale callbacks in a
    list the base hooks act once, so ranks may have different numbers of them; but every rank must
    have at least one.

    Examples:
        >>> class EpochCount(tfscale.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         super().on_epoch_end(epoch, logs)
        ...         print(f"rank {tfscale.rank()} has trained {epoch + 1} epochs")
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> callbacks = [EpochCount()]
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=callbacks, verbose=0)
        rank 0 has trained 1 epochs
    """

    epoch = 0  # that runs or ran last, counted from 0
    _session: FitSession | None = None
    _backup: State | None = None  # until training begins

    @property
    def session(self) -> FitSession:
        """The session of the running `fit`, shared by all of its callbacks."""
        if self._session is None or self._session.model is not self.model:
            self._session = session_for(self.model)
        return self._session

    @property
    def is_void(self) -> bool:
        """Whether the first step of this epoch was given up, so that no collective is allowed."""
        return self.session.is_void

    def set_model(self, model: keras.Model) -> None:
        """Order the callbacks, and prepare the model as `tfscale.prepare` does.

        Raises:
            ConfigError: A callback that brings others along is in no list of callbacks.
        """
        super().set_model(model)
        self._arrange()
        prepare(model)
        keep_finite(model)
        if not runtime.is_single():
            make_checkpoints_safe()
        for companion in self.companions:
            companion.set_model(model)

    def _arrange(self) -> None:
        if not join_list(self) and self.companions:
            raise ConfigError(
                f"{type(self).__name__} must be in a list of callbacks, which it adds to. Received:"
                " a call of its set_model. Give it to fit, or to "
                "keras.callbacks.CallbackList(callbacks, model=model) and call the hooks of that."
            )

    def restore_state(self, state: State, epoch: int) -> None:
        """Keep a state of `backup_state`, of a run that resumes with `epoch`, for the `fit`."""
        self._backup = {**state, "epoch": epoch}

    def take_backup(self) -> State:
        """Return the state to resume from and forget it; empty if there is none."""
        backup, self._backup = self._backup or {}, None
        return backup

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Agree on the number of steps and epochs, and on when to save. Collective.

        Raises:
            ConfigError: There are several ranks and Keras's own BackupAndRestore, or a callback is
                incompatible with sharded parameters.
            ExchangeError: Steps, epochs or callbacks differ between ranks.
        """
        self._arrange()  # also if it was added to the list since
        self._session = session = session_for(self.model, joining=self)
        plain = keras.callbacks.BackupAndRestore
        if not runtime.is_single() and any(type(c) is plain for c in session.callbacks):
            raise ConfigError(
                "BackupAndRestore must be tfscale's. Received: "
                "keras.callbacks.BackupAndRestore. Use tfscale.callbacks.BackupAndRestore on "
                "every rank, with the same arguments."
            )
        if session.whole_batches is not None and not session.has_begun:
            prepare_again(self.model)  # as `set_model` has, unless that was before the `fit`
        warn_if_unsynchronised(self.model, session.callbacks)
        if agreement.begin(session, self.params or {}):
            agree_on_saves(session)
            if accumulators(self.model):
                session.stop_together()
            warn_of_deciders(session.callbacks)
        if session.watch is not None:
            session.watch.begin(self.params or {})

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record that an epoch begins."""
        self.epoch = epoch
        self.session.begin_epoch(epoch)
        self.session.watch_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notify the other ranks that this one's epoch is over."""
        self.session.end_epoch(epoch)
        if self.session.watch is not None:
            self.session.watch.note_logs(logs)
        warn_if_unsynchronised(self.model, self.session.callbacks, has_exchanged_gradients())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notify the other ranks that this one's `fit` is over."""
        self.session.end_training()
        share_batches(self.model, None)
        steps = (self.params or {}).get("steps")
        if isinstance(steps, StepCount):  # `History` shares this dict, and users write it as JSON
            self.params["steps"] = int(steps)


class BeforeValidation(Callback):
    """Acts once per epoch on all ranks: after the last batch, before `fit` validates.

    If `fit` does not know the number of steps, or the epoch was cut short, it acts when validation
    begins or, without validation, at the end of the epoch, before later callbacks save the model.
    """

    _is_due = False  # in this epoch

    def act(self) -> None:
        """Run the action. Collective: all ranks must call this, in the same order."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect one action in this epoch."""
        super().on_epoch_begin(epoch, logs)
        self._is_due = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Act after the last batch."""
        super().on_train_batch_end(batch, logs)
        steps = (self.params or {}).get("steps")
        is_last = steps is not None and steps_until(self.model, batch) >= int(steps)
        # After a step that was given up, the ranks that stopped act at the end of the epoch.
        if is_last and not self.session.is_given_up and may_communicate():
            self._act_once()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Act before `fit` validates, if that has not happened in this epoch."""
        super().on_test_begin(logs)
        if self._is_due:
            # Ranks that wait in a step must first learn that this rank runs no more steps.
            self.session.end_epoch(self.epoch)
            self._act_once()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Act, if that has not happened in this epoch."""
        super().on_epoch_end(epoch, logs)
        self._act_once()
        self._is_due = False

    def _act_once(self) -> None:
        if self._is_due and not self.is_void:
            self._is_due = False
            self.act()


_CHANGES_MODEL = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)


class RankZero(Callback):
    """Run any Keras callback on rank 0 only: `RankZero(keras.callbacks.TensorBoard("logs"))`.

    Pass it to `fit` on every rank. On the other ranks no hook of the callback is called, not even
    `set_model`. If it sets `model.stop_training`, all ranks stop together.

    Args:
        callback: A Keras callback that does not communicate.

    Raises:
        ConfigError: `callback` is not a Keras callback, is one of tfscale's that needs all ranks,
            is a BackupAndRestore, which sets the epoch in which the ranks begin, or changes weights
            or the learning rate.

    Examples:
        >>> import os
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> log = tfscale.callbacks.RankZero(keras.callbacks.CSVLogger("log.csv"))
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), callbacks=[log], verbose=0)
        >>> os.listdir()  # rank 0 alone has written
        ['log.csv']
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
                "Give it to fit() on all ranks."
            )
        self.callback = callback


def _forwarding(name: str) -> Callable[..., None]:
    def hook(self: RankZero, *args: Any, **kwargs: Any) -> None:
        getattr(super(RankZero, self), name)(*args, **kwargs)
        if runtime.rank() == 0:
            with alone():  # its saves wait for no other rank
                # Its parameters may have other names.
                getattr(self.callback, name)(*args, *kwargs.values())

    hook.__name__ = name
    hook.__doc__ = f"Call `{name}` of the callback, on rank 0."
    return hook


# Those of batches call `on_batch_begin` and `on_batch_end` of the callback.
_HOOKS = ("on_epoch_", "on_train_", "on_test_", "on_predict_")
for _name in vars(keras.callbacks.Callback):
    if _name.startswith(("set_", *_HOOKS)):
        setattr(RankZero, _name, _forwarding(_name))


def may_communicate() -> bool:
    """Return whether this is the main thread; hooks of batches may run on other threads."""
    return threading.current_thread() is threading.main_thread()


def keep_finite(model: keras.Model) -> None:
    """Let training steps restore moving statistics that they have made infinite or NaN.

    Needed with `nonfinite="skip"` only: a forward pass updates the statistics before its gradients
    are known, and an average with NaN stays NaN. On a rank where that happens all statistics become
    what they were before the step. The check costs two small ops per variable, and no copies. The
    step of the compiled model is wrapped once, and traced again.
    """
    if _skips(model) and not getattr(model.train_step, "keeps_finite", False):
        replace_step(model, "train_step", _FiniteStep(model))


class _FiniteStep:
    """A model's `train_step` as `keep_finite` makes it."""

    def __init__(self, model: keras.Model) -> None:
        self._model, self._step = model, model.train_step
        self.keeps_finite = True  # functions that wrap this one have the attribute, too

    def __call__(self, data: Any) -> Any:
        if not _skips(self._model):  # it was compiled with another optimizer since
            return self._step(data)
        before = [(v, tf.identity(v.value)) for v in non_trainable_state(self._model)]
        logs = self._step(data)
        # Values that were infinite before, as an initial minimum, stay.
        spoiled = [_is_finite(old) & ~_is_finite(variable.value) for variable, old in before]
        if before:
            run_either(tf.reduce_any(spoiled), lambda: _put_back(before), lambda: None)
        return logs


def _skips(model: keras.Model) -> bool:
    return any(o.bound.nonfinite.policy == "skip" for o in distributed_optimizers(model))


def _put_back(before: Sequence[tuple[keras.Variable, tf.Tensor]]) -> None:
    for variable, old in before:
        variable.assign(old)


def _is_finite(value: Any) -> tf.Tensor:
    return tf.reduce_all(tf.math.is_finite(value))
