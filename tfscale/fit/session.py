"""One running `fit`: its arguments, this rank's progress, and stopping on all ranks together."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Literal

import keras
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.backends.base import MarkKind
from tfscale.comm.eager import Header, exchange_headers
from tfscale.config import ExchangeError
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.internals import stack
from tfscale.internals.keras import set_callbacks
from tfscale.internals.optimizers import optimizer_of, optimizers_of
from tfscale.internals.traits import train_apart
from tfscale.optimizer.distributed import DistributedOptimizer, accumulating, distributed_of

logger = logging.getLogger("tfscale")

Answer = Literal["run", "end", "stop"]
_ASKED = "step of fit"


class FitSession:
    """A `fit` on this rank, and its agreement with the other ranks. See `session_for`.

    A rank that ends an epoch, stops or runs out of data sets a mark (custom_ops/comm/marks.h). A
    rank that has begun one step more sees the mark, gives this step up before any variable has
    changed, and stops too, or fails with the reason. No step waits for marks. If a step cannot be
    given up (under run_eagerly, or without marks), the ranks ask each other before it, see `ask`.

    Groups of local SGD exchange nothing in most steps, so they ask at the beginning and the end of
    epochs; in between they stop after an average, see `StopTogether`. Ranks that average their
    parameters also ask there, and stop at the end of an epoch. Ranks that add up gradients of
    several batches do the same if they stop in the middle of a cycle.

    Attributes:
        call: The arguments of `fit`; empty outside of a `fit`, where hooks are called by hand.
        has_begun: Whether a callback has called `begin`.
        saves: The `SavePoints` of this `fit`, if there are any.
        is_over: Whether the ranks have agreed to run no further step.
        asks_each_step: Whether ranks ask each other before each step: all run it or none.
        wants_to_stop: Whether this rank waits for a step or epoch end at which all can stop.
    """

    def __init__(self, model: keras.Model, call: stack.FitCall) -> None:
        self.model = model
        self.call = call
        self.is_over = False
        self.asks_each_step = False
        self.wants_to_stop = False
        self.has_begun = False
        self.saves: Any = None
        self._joined: list[Any] = []
        self._stops_together = False
        self._steps: Any = None
        self._n_epochs = 0
        self._marked_epoch = -1
        self._n_steps = self._n_given_up = 0
        self._is_apart = False
        self._is_running = False  # an epoch has begun since training began
        self._is_new_epoch = True

    @property
    def callbacks(self) -> list[keras.callbacks.Callback]:
        """All callbacks of the `fit`, in call order."""
        return self.call.callbacks

    @property
    def data(self) -> Any:
        """The `x` of the `fit`."""
        return self.call.data

    @property
    def trains_apart(self) -> bool:
        """Whether the ranks exchange no gradients, but average parameters."""
        return train_apart(self.callbacks)

    @property
    def has_groups(self) -> bool:
        """Whether groups of ranks train apart."""
        return self._optimizer is not None and isinstance(self._optimizer.strategy, LocalSGD)

    @property
    def group_average(self) -> Any:
        """The average of the groups' models; None without groups, or before they train apart."""
        return None if self._optimizer is None else self._optimizer.group_average

    @property
    def _optimizer(self) -> DistributedOptimizer | None:
        return distributed_of(optimizer_of(self.model))

    def put_first(self, callback: keras.callbacks.Callback) -> None:
        """Put or move a callback before all others, from the next hook on."""
        others = [other for other in self.callbacks if other is not callback]
        set_callbacks(self.call.callback_list, [callback, *others])

    def stop_together(self) -> None:
        """Put a `StopTogether` after all callbacks, once."""
        if not self._stops_together and self.call.callback_list is not None:
            self._stops_together = True
            stop = StopTogether(self)
            stop.set_model(self.model)
            set_callbacks(self.call.callback_list, [*self.callbacks, stop])

    # Progress of the ranks.

    def begin(self, steps: Any, n_epochs: int) -> None:
        """Store the steps per epoch, None if unknown, and the number of epochs.

        Raises:
            ExchangeError: The number of steps must be known, but is not.
        """
        self.has_begun = True
        self._steps, self._n_epochs = steps, n_epochs
        self.asks_each_step = self._must_ask()
        self._is_apart = self.has_groups or self.trains_apart or bool(accumulating(self.model))

    @property
    def asks_before_epochs(self) -> bool:
        """Whether ranks ask each other before each epoch, so that all begin it or none."""
        return self._is_apart and not runtime.is_single()

    @property
    def is_given_up(self) -> bool:
        """Whether a step of this epoch was given up."""
        return runtime.num_given_up() > self._n_given_up

    @property
    def is_void(self) -> bool:
        """Whether this epoch does not count, because its first step was given up.

        A rank that stops between two epochs leaves `fit` at once. The others notice in the first
        step of the next epoch and give it up; Keras then ends this epoch like any other. They must
        send nothing there, because the rank that left does not answer.
        """
        return self._is_running and self._n_steps <= 1 and self.is_given_up

    def begin_epoch(self) -> None:
        """Count steps from 0. Collective if `asks_before_epochs`, in the first call of an epoch."""
        self._n_steps, self._n_given_up = 0, runtime.num_given_up()
        self._is_running, is_first, self._is_new_epoch = True, self._is_new_epoch, False
        # Before groups resume their own models: averaging needs all groups.
        if is_first and self.asks_before_epochs and "stop" in ask("run", 0):
            self.is_over = True

    def end_epoch(self, epoch: int) -> None:
        """Notify the others that this rank's epoch is over; later calls in an epoch do nothing."""
        if runtime.is_single() or epoch == self._marked_epoch:
            return
        self._marked_epoch, self._is_new_epoch, is_void = epoch, True, self.is_void
        if self.asks_each_step and not self.is_over:
            own: Answer = "stop" if self.model.stop_training else "end"
            if "stop" in ask(own, self._n_steps):
                self.is_over = self.model.stop_training = True
        # All ranks must set equally many marks: collectives after `fit` are matched by their
        # number. An epoch whose first step was given up never began on the rank that stopped.
        if not is_void:
            self._mark()
        if self._asks_epochs and not self.is_over:  # after the mark: others may wait in a step
            average = self.group_average
            wants_to = self.wants_to_stop or (
                average is not None and bool(average.wants_to_stop.numpy())
            )
            own = "stop" if self.model.stop_training or wants_to else "end"
            if "stop" in ask(own, self._n_steps):
                self.is_over = self.model.stop_training = True
                cycles = self.cycles()
                if cycles:
                    self.drop_cycles(objects.allgather_object(cycles, name="end of training"))

    def end_training(self) -> None:
        """Notify the others that this rank's `fit` is over; later calls do nothing."""
        self._is_running = False
        if runtime.is_single() or self._marked_epoch == -1:
            return
        is_early = self._marked_epoch + 1 < self._n_epochs
        self._marked_epoch = -1
        is_early = is_early and not self.is_over and self.model.stop_training
        if self.asks_each_step and is_early:
            ask("stop", 0)
        self._mark()
        if self._asks_epochs and is_early:
            ask("stop", 0)
        self.asks_each_step = self.is_over = False

    def _mark(self) -> None:
        runtime.backend().mark(MarkKind.STOP if self.model.stop_training else MarkKind.EPOCH_END)

    @property
    def _asks_epochs(self) -> bool:
        return not (self.asks_each_step or runtime.is_single()) and self._is_apart

    def _must_ask(self) -> bool:
        if runtime.backend().has_marks:
            return self.model.run_eagerly or tf.config.functions_run_eagerly()
        if self._steps is None and self.model.steps_per_execution > 1:
            raise ExchangeError(
                "The number of batches must be known where steps are executed together and the "
                f"backend is {runtime.backend().name}. Received: steps_per_execution="
                f"{self.model.steps_per_execution}. Pass steps_per_epoch to fit."
            )
        return True

    # Called by the guarded step.

    def may_run_step(self) -> bool:
        """Return whether all ranks run the next step; asks them if a step cannot be given up."""
        self._n_steps += 1
        if not self.is_over:
            if not self.asks_each_step or "stop" not in ask("run", self._n_steps):
                return True
            self.is_over = True
        runtime.count_given_up()
        return False

    @property
    def has_unknown_steps(self) -> bool:
        """Whether to fetch the next batch before telling other ranks that a step begins."""
        return self.asks_each_step and not runtime.backend().has_marks and self._steps is None

    def end_of_data(self) -> None:
        """Do not count a step without data; raise if the other ranks cannot notice an early end."""
        steps, has_marks = self._steps, runtime.backend().has_marks
        if not self.asks_each_step or has_marks or steps is None or self._n_steps > steps:
            self._n_steps -= 1  # the step that was begun has no data
            return
        runtime.backend().mark(MarkKind.LEFT)
        raise ExchangeError(
            f"All ranks must have data for all steps. Received: rank {runtime.rank()} has none for "
            f"step {self._n_steps} of {steps}. Pass a smaller steps_per_epoch."
        )

    # Cycles of `backward_passes_per_step` that are cut short by a stop.

    def cycles(self) -> list[int]:
        """Return numbers that differ between ranks at different batches of a cycle."""
        counts = [optimizer.n_accumulated for optimizer in accumulating(self.model)]
        # If all ranks begin each batch or none, no batch was given up.
        return [0 if self.asks_each_step else runtime.num_given_up(), *counts] if counts else []

    def drop_cycles(self, every: list[list[int]]) -> None:
        """Drop the batches since the last exchange if `cycles` differ between ranks."""
        if any(own != every[0] for own in every):
            for optimizer in accumulating(self.model):
                optimizer.drop_cycle()
            logger.info(
                "Gradients of batches since the last exchange are dropped: ranks have stopped."
            )


class StopTogether(keras.callbacks.Callback):
    """Delay a stop that one rank decided on until all ranks know of it; the last callback.

    Groups exchange nothing between two averages, so a rank that stopped at once would leave the
    others some steps ahead. Its request is sent with the next average, after which all stop; if the
    epoch ends before that, they stop there. In cycles of `backward_passes_per_step` a rank stops
    before the batch that exchanges, which the others then give up.
    """

    def __init__(self, session: FitSession) -> None:
        super().__init__()
        self._session = session

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Delay a stop, or stop if the ranks have agreed on it."""
        session, average = self._session, self._session.group_average
        if session.asks_each_step or session.is_over:
            return
        if average is None:  # all ranks still train together, or average at the end of epochs
            self._wait_for_exchange()
        elif bool(average.must_stop.numpy()):
            self.model.stop_training = True
        elif self.model.stop_training:
            logger.info("Training stops after the next average of the groups.")
            self.model.stop_training = False
            average.wants_to_stop.assign(True)

    def _wait_for_exchange(self) -> None:
        session = self._session
        if (not session.trains_apart and self._is_before_exchange()) or runtime.num_given_up():
            # The others learn of the stop in the next exchange, or know of it already.
            self.model.stop_training = self.model.stop_training or session.wants_to_stop
        elif self.model.stop_training:
            if session.trains_apart and not session.wants_to_stop:
                logger.info("Training stops where the epoch ends.")
            self.model.stop_training = False
            session.wants_to_stop = True

    def _is_before_exchange(self) -> bool:
        waiting = accumulating(self.model)
        some_exchange = len(waiting) < len(optimizers_of(self.model))
        return some_exchange or any(o.is_before_exchange for o in waiting)


def ask(own: Answer, step: int) -> set[Answer]:
    """Send the next action of this rank to all ranks, and return those of all.

    Collective. A step cannot be given up once it has begun if it is not traced, or if its backend
    has no marks; so all ranks begin it or none.

    Args:
        own: "run" before a step, "end" at the end of an epoch, "stop" if training ends early.
        step: Number of steps of this epoch, including the one to begin.

    Returns:
        The answers of all ranks. "run" may come with "stop" (then no rank runs), never with "end".

    Raises:
        ExchangeError: Some ranks begin a step and others have no data for it, all have ended
            their epoch after unequal steps, or a rank calls another collective; on every rank.
    """
    headers = exchange_headers(Header(_ASKED, [own, step], [], [], "fit"), runtime.world())
    for rank, other in enumerate(headers):
        if other.kind != _ASKED:
            raise ExchangeError(
                "All ranks must call the same collectives in the same order. Received: rank "
                f"{rank} calls {other.describe()} while rank {runtime.rank()} is in fit, step "
                f"{step}. Give fit the same callbacks on all ranks."
            )
    answers: set[Answer] = {header.options[0] for header in headers}
    ended = {r: h.options[1] for r, h in enumerate(headers) if h.options[0] == "end"}
    # If steps may exchange nothing, ranks learn of unequal epochs when all have ended theirs.
    is_uneven = answers == {"end"} and len(set(ended.values())) > 1
    if is_uneven or {"run", "end"} <= answers:
        rank = min(ended, key=lambda r: ended[r])
        raise ExchangeError(
            f"All ranks must have as many batches. Received: rank {rank} ended its epoch after "
            f"step {ended[rank]}, and others have more. Give every rank as many batches, for "
            "example with tfscale.data.GlobalBatches."
        )
    return answers


# The sessions of models, by their ids; held by callbacks only. A session keeps its model alive.
_sessions: weakref.WeakValueDictionary[int, FitSession] = weakref.WeakValueDictionary()


def session_for(model: keras.Model, joining: Any = None) -> FitSession:
    """Return the session of the model's `fit` that is on the caller's stack.

    Outside of a `fit`, callbacks of one model whose hooks are called by hand share a session.
    `joining` is a callback whose training begins; it joins each session once.
    """
    call, session = stack.running_fit(), _sessions.get(id(model))
    if call.model is not model:
        call = stack.FitCall()
    is_same = session is not None and session.call.callback_list is call.callback_list
    if session is None or not is_same or (joining is not None and joining in session._joined):
        session = FitSession(model, call)
        _sessions[id(model)] = session
    if joining is not None:
        session._joined.append(joining)
    return session


def session_of(model: Any) -> FitSession | None:
    """Return the last session of a model, if any, without reading the stack."""
    return _sessions.get(id(model))


def running_session() -> FitSession | None:
    """Return the session of the innermost `fit` on the caller's stack, of any model."""
    call = stack.running_fit()
    session = _sessions.get(id(call.model))
    is_its = session is not None and session.call.callback_list is call.callback_list
    return session if is_its else None
