"""Keeping the ranks of one `fit` together: equal steps, and stopping at the same one."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.backends.base import MarkKind
from tfscale.config import ExchangeError
from tfscale.data import probe
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.fit import adapted_layers, agreement, cycles
from tfscale.fit.lockstep import Answer, ask
from tfscale.fit.unsynchronised import trains_apart


class Progress:
    """Where a model's `fit` stands on this rank, and what the other ranks are told of it.

    A rank that ends an epoch, stops or runs out of data sets a mark (custom_ops/comm/marks.h). A
    rank that has begun one step more sees it, gives this step up before any variable changed, and
    stops too, or fails with the reason. Nothing is sent per step. Where a step cannot be given up
    (under run_eagerly, or without marks) the ranks ask each other before it, see `lockstep`.

    Groups of local SGD exchange nothing in most steps, so they ask where epochs begin and end; in
    between they stop behind an average, see `callbacks.stop_of_groups`. Ranks that average their
    parameters ask there, too, and stop where an epoch ends.
    """

    def __init__(self, model: keras.Model) -> None:
        """Belong to a model; see `progress_of`."""
        self._model = weakref.ref(model)
        self._is_new = False
        self._params: dict[str, Any] = {}
        self._marked_epoch = -1
        self._n_steps = self._n_given_up = 0
        self._asks = self._is_apart = False
        self._is_over = False
        self._is_begun = False  # this epoch
        self.wants_to_stop = False

    def expect_training(self) -> None:
        """A callback list was made: the next `begin` is the first of a `fit`."""
        self._is_new = True

    def begin(self, params: dict[str, Any]) -> bool:
        """Agree on what will be run; return whether this is the first call of a `fit`. Collective.

        Args:
            params: Keras's: "steps" per epoch (None if unknown) and "epochs".

        Raises:
            ConfigError: A rank cannot use its data; on every rank.
            ExchangeError: Steps, epochs, global batches or something else that `agreement`
                compares differs between ranks; on every rank, with the values.
        """
        if not self._is_new or runtime.is_single():
            return False
        self._is_new, self._params = False, params
        runtime.backend().drain()  # then no rank waits any more for what an earlier `fit` left
        own = {
            "steps": params.get("steps"),
            "epochs": params.get("epochs"),
            "given_up": runtime.num_given_up(),
            "data": probe.describe(),
            "training": agreement.describe(self._model()),
            "has_adapted": adapted_layers.refresh(self._model()),
        }
        self._marked_epoch, self._n_steps, self._is_over, self._is_begun = -1, 0, False, False
        self._asks = self._must_ask()
        own["cycles"] = cycles.state(self._model(), self._asks)
        self.wants_to_stop = False
        self._is_apart = (
            _has_groups(self._model()) or trains_apart() or cycles.may_end_early(self._model())
        )
        every = objects.allgather_object(own, name="beginning of fit")
        probe.require_usable([rank["data"] for rank in every])
        for key in ("steps", "epochs"):
            values = [rank[key] for rank in every]
            if any(v != values[0] for v in values):
                raise ExchangeError(
                    f"All ranks must run the same number of {key}. Received: {key}={values}, in "
                    "rank order. Give every rank as many batches, for example with "
                    "tfscale.data.GlobalBatches, and the same arguments to fit."
                )
        probe.agree([rank["data"] for rank in every])
        agreement.require_equal([rank["training"] for rank in every])
        adapted_layers.trace_anew_together(self._model(), [rank["has_adapted"] for rank in every])
        if any(rank["given_up"] for rank in every):
            runtime.start_incarnation()
        cycles.settle(self._model(), [rank["cycles"] for rank in every])
        return True

    @property
    def asks_before_epochs(self) -> bool:
        """Whether ranks ask each other before each epoch, so that all begin it or none."""
        return self._is_apart and not runtime.is_single()

    @property
    def is_over(self) -> bool:
        """Whether the ranks have agreed to run no further step."""
        return self._is_over

    @property
    def asks_each_step(self) -> bool:
        """Whether all ranks run a step or none."""
        return self._asks

    def begin_epoch(self) -> None:
        """Count steps anew. Collective under local SGD: the first call of an epoch asks."""
        self._n_steps, self._n_given_up = 0, runtime.num_given_up()
        if self._is_begun:
            return
        self._is_begun = True
        # Before groups take up their own models again: an average of all would need all.
        if self.asks_before_epochs and "stop" in ask("run", 0):
            self._is_over = True

    def end_epoch(self, epoch: int) -> None:
        """Tell the others that this rank's epoch is over; the first call of an epoch counts."""
        if runtime.is_single() or epoch == self._marked_epoch:
            return
        self._marked_epoch, self._is_begun = epoch, False
        if self._asks and not self._is_over:
            own: Answer = "stop" if self._is_stopping() else "end"
            if "stop" in ask(own, self._n_steps):
                self._is_over = True
                self._stop()
        # An epoch whose first step was given up has not begun on the rank that stopped before it,
        # and all ranks set as many marks: what comes behind `fit` goes by their number.
        is_void = self._n_steps <= 1 and runtime.num_given_up() > self._n_given_up
        if not is_void:
            runtime.mark(MarkKind.STOP if self._is_stopping() else MarkKind.EPOCH_END)
        if self._asks_epochs and not self._is_over:  # after the mark: others may wait in a step
            wants_to = self.wants_to_stop or _wants_to_stop(self._model())
            own = "stop" if self._is_stopping() or wants_to else "end"
            if "stop" in ask(own, self._n_steps):
                self._is_over = True
                self._stop()
                cycles.end(self._model())

    def end_training(self) -> None:
        """Tell the others that this rank's `fit` is over; the first call counts."""
        if runtime.is_single() or self._marked_epoch == -1:
            return
        is_early = self._marked_epoch + 1 < (self._params.get("epochs") or 0)
        self._marked_epoch = -1
        is_early = is_early and not self._is_over and self._is_stopping()
        if self._asks and is_early:
            ask("stop", 0)
        runtime.mark(MarkKind.STOP if self._is_stopping() else MarkKind.EPOCH_END)
        if self._asks_epochs and is_early:
            ask("stop", 0)
        self._asks = self._is_over = False

    @property
    def _asks_epochs(self) -> bool:
        return not (self._asks or runtime.is_single()) and self._is_apart

    def _must_ask(self) -> bool:
        model = self._model()
        if runtime.backend().has_marks:
            is_eager = tf.config.functions_run_eagerly()
            return model is not None and (model.run_eagerly or is_eager)
        if self._params.get("steps") is None and model and model.steps_per_execution > 1:
            raise ExchangeError(
                "The number of batches must be known where steps are executed together and the "
                f"backend is {runtime.backend().name}. Received: steps_per_execution="
                f"{model.steps_per_execution}. Pass steps_per_epoch to fit."
            )
        return True

    def _stop(self) -> None:
        model = self._model()
        if model is not None:
            model.stop_training = True

    def _is_stopping(self) -> bool:
        model = self._model()
        return model is not None and bool(model.stop_training)

    def may_run_step(self) -> bool:
        """Return whether all ranks run the next step; asks them where it cannot be given up.

        Raises:
            ExchangeError: Another rank has no data for this step.
        """
        self._n_steps += 1
        if self._is_over:
            runtime.count_given_up()
            return False
        if not self._asks:
            return True
        if "stop" not in ask("run", self._n_steps):
            return True
        self._is_over = True
        runtime.count_given_up()
        return False

    @property
    def has_unknown_steps(self) -> bool:
        """Whether this rank must look for data before it tells the others that it runs a step."""
        has_marks = runtime.backend().has_marks
        return self._asks and not has_marks and self._params.get("steps") is None

    def end_of_data(self) -> None:
        """Count no step without data; raise where the others cannot learn that it ends too early.

        Raises:
            ExchangeError: The steps per epoch were known and are not over.
        """
        steps = self._params.get("steps")
        if not self._asks or runtime.backend().has_marks or steps is None or self._n_steps > steps:
            self._n_steps -= 1  # the one that was begun has no data
            return
        runtime.mark(MarkKind.LEFT)
        raise ExchangeError(
            f"All ranks must have data for all steps. Received: rank {runtime.rank()} has none for "
            f"step {self._n_steps} of {steps}. Pass a smaller steps_per_epoch."
        )


def _has_groups(model: keras.Model | None) -> bool:
    optimizer = getattr(model, "optimizer", None)
    return isinstance(getattr(optimizer, "strategy", None), LocalSGD)


def _wants_to_stop(model: keras.Model | None) -> bool:
    """Whether training should stop here behind the next average."""
    average = getattr(getattr(model, "optimizer", None), "group_average", None)
    return average is not None and bool(average.wants_to_stop.numpy())


_progress: weakref.WeakKeyDictionary[keras.Model, Progress] = weakref.WeakKeyDictionary()


def progress_of(model: keras.Model) -> Progress:
    """Return the progress of a model; there is one per model."""
    if model not in _progress:
        _progress[model] = Progress(model)
    return _progress[model]
