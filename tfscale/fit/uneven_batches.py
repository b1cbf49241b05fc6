"""Uneven batches: if one rank ends its epoch, stops or runs out of data, all ranks end together.

`data/slices.py` avoids this for `GlobalBatches`, which give each rank as many batches. For all
other data the numbers of steps are compared when a `fit` begins (`agreement.begin`). If they
are not known then, or a rank stops, the others learn of it in their next step (`Progress`,
`GuardedStep`), or where they next exchange anything (`StopTogether`).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from tfscale.comm import objects, runtime
from tfscale.comm.backends.base import MarkKind
from tfscale.comm.eager import Header, engine_text, exchange_headers, has_stopped, is_exchange_error
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange import batch_shares as shares
from tfscale.fit.steps import computes_rows
from tfscale.internals.datasets import in_own_memory
from tfscale.internals.keras import stop_training
from tfscale.internals.optimizers import iterations_of, optimizer_of, optimizers_of, scaled_by
from tfscale.internals.traits import Phase, Traits
from tfscale.measure.auto import after_step
from tfscale.optimizer.distributed import (
    DistributedOptimizer,
    accumulators,
    distributed_of,
    distributed_optimizers,
)

logger = logging.getLogger("tfscale")

Answer = Literal["run", "end", "stop"]
_ASKED = "step of fit"


class Progress:
    """The steps of a `fit` on this rank, and its agreement with the other ranks about their end.

    A rank that ends an epoch, stops or runs out of data sets a mark (custom_ops/comm/marks.h). A
    rank that has begun one step more sees the mark, gives this step up before any variable has
    changed, and stops too, or fails with the reason. No step waits for marks. If a step cannot be
    given up (under run_eagerly, or without marks), the ranks ask each other before it, see `ask`.

    Groups of local SGD exchange nothing in most steps, so they ask at the beginning and the end of
    epochs; in between they stop after an average, see `StopTogether`. Ranks that average their
    parameters also ask there, and stop at the end of an epoch. Ranks that add up gradients of
    several batches do the same if they stop in the middle of a cycle.

    Attributes:
        trains_apart: Whether the ranks exchange no gradients, but average parameters.
        has_begun: Whether a callback has called `begin`.
        is_over: Whether the ranks have agreed to run no further step.
        asks_each_step: Whether ranks ask each other before each step: all run it or none.
        wants_to_stop: Whether this rank waits for a step or epoch end at which all can stop.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.trains_apart = self.has_begun = self.is_over = False
        self.asks_each_step = self.wants_to_stop = False
        self._steps: Any = None
        self._n_epochs = self._epoch = 0
        self._marked_epoch = -1
        self._n_steps = self._n_given_up = 0
        self._is_apart = False
        self._is_running = False  # an epoch has begun since training began
        self._is_new_epoch = True

    def begin(self, steps: Any, n_epochs: int, trains_apart: bool) -> None:
        """Store the steps per epoch, None if unknown, and the number of epochs."""
        self.has_begun, self.trains_apart = True, trains_apart
        self._steps, self._n_epochs = steps, n_epochs
        self.asks_each_step = self._must_ask()
        self._is_apart = self.has_groups or trains_apart or bool(accumulators(self.model))

    def _must_ask(self) -> bool:
        if runtime.backend().has_marks:
            return self.model.run_eagerly or tf.config.functions_run_eagerly()
        if self._steps is None and self.model.steps_per_execution > 1:
            raise ExchangeError(
                "steps_per_execution needs a known number of batches with the backend "
                f"{runtime.backend().name}. Received: "
                f"steps_per_execution={self.model.steps_per_execution}. Pass steps_per_epoch to "
                "fit."
            )
        return True

    @property
    def has_groups(self) -> bool:
        """True if groups of ranks train apart."""
        return self._optimizer is not None and self._optimizer.strategy.trains_apart

    @property
    def group_average(self) -> Any:
        """The average of the groups' models; None without groups, or before they train apart."""
        return None if self._optimizer is None else self._optimizer.bound.average

    @property
    def _optimizer(self) -> DistributedOptimizer | None:
        return distributed_of(optimizer_of(self.model))

    # Epochs.

    @property
    def is_running(self) -> bool:
        """True from the first epoch of training to its end."""
        return self._is_running

    @property
    def asks_before_epochs(self) -> bool:
        """True if ranks ask each other before each epoch, so that all begin it or none."""
        return self._is_apart and not runtime.is_single()

    @property
    def is_given_up(self) -> bool:
        """True if a step of this epoch was given up."""
        return runtime.num_given_up() > self._n_given_up

    @property
    def is_void(self) -> bool:
        """Whether this epoch does not count, because its first step was given up.

        A rank that stops between two epochs leaves `fit` at once. The others notice in the first
        step of the next epoch and give it up; Keras then ends this epoch like any other. They must
        send nothing there, because the rank that left does not answer.
        """
        return self._is_running and self._n_steps <= 1 and self.is_given_up

    def begin_epoch(self, epoch: int = 0) -> None:
        """Count steps from 0. Collective if `asks_before_epochs`, in the first call of an epoch."""
        self._n_steps, self._n_given_up, self._epoch = 0, runtime.num_given_up(), epoch
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
            self._ask_at_end(self.model.stop_training)
        # All ranks must set equally many marks: collectives after `fit` are matched by their
        # number. An epoch whose first step was given up never began on the rank that stopped.
        if not is_void:
            self._mark()
        if self._asks_epochs and not self.is_over:  # after the mark: others may wait in a step
            average = self.group_average
            wants_to = average is not None and bool(average.report.wants_to_stop.numpy())
            self._ask_at_end(self.model.stop_training or self.wants_to_stop or wants_to)
            cycles = self.cycles()
            if self.is_over and cycles:
                self.drop_cycles(objects.allgather_object(cycles, name="end of training"))

    def end_steps(self) -> None:
        """Notify the others that this rank runs no more steps of the running epoch."""
        if self._is_running:
            self.end_epoch(self._epoch)

    def end_training(self) -> None:
        """Notify the others that this rank's `fit` is over; later calls do nothing."""
        self._is_running = False
        if runtime.is_single() or self._marked_epoch == -1:
            return
        is_early = self._marked_epoch + 1 < self._n_epochs
        is_early = is_early and not self.is_over and self.model.stop_training
        self._marked_epoch = -1
        if self.asks_each_step and is_early:
            ask("stop", 0)
        self._mark()
        runtime.note_end_of_fit()
        if self._asks_epochs and is_early:
            ask("stop", 0)
        self.asks_each_step = self.is_over = False

    def note_wish_to_stop(self) -> None:
        """Record that this rank waits for a step or epoch end at which all can stop."""
        self.wants_to_stop = True

    def _ask_at_end(self, wants_to_stop: bool) -> None:
        if "stop" in ask("stop" if wants_to_stop else "end", self._n_steps):
            self.is_over = True
            stop_training(self.model)

    def _mark(self) -> None:
        runtime.backend().mark(MarkKind.STOP if self.model.stop_training else MarkKind.EPOCH_END)

    @property
    def _asks_epochs(self) -> bool:
        return not self.asks_each_step and self.asks_before_epochs

    # Steps.

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
            f"rank {runtime.rank()} ran out of data. Received: none for step {self._n_steps} of "
            f"{steps}. Pass a smaller steps_per_epoch."
        )

    # Cycles of `backward_passes_per_step` that are cut short by a stop.

    def cycles(self) -> list[int]:
        """Return numbers that differ between ranks at different batches of a cycle."""
        counts = [accumulator.n_waiting for accumulator in accumulators(self.model)]
        # If all ranks begin each batch or none, no batch was given up.
        return [0 if self.asks_each_step else runtime.num_given_up(), *counts] if counts else []

    def drop_cycles(self, cycles_by_rank: list[list[int]]) -> None:
        """Drop the batches since the last exchange if `cycles` differ between ranks."""
        if any(own != cycles_by_rank[0] for own in cycles_by_rank):
            for optimizer in distributed_optimizers(self.model):
                if optimizer.accumulator is not None:
                    optimizer.accumulator.drop_cycle(iterations_of(optimizer))
            logger.info(
                "Gradients of batches since the last exchange are dropped: ranks have stopped."
            )


def ask(answer: Answer, step: int) -> set[Answer]:
    """Send the next action of this rank to all ranks, and return those of all. Collective.

    Ranks ask before steps that cannot be given up once begun, and around epochs of local SGD, see
    `Progress`. `answer` is "run" before a step, "end" at the end of an epoch, "stop" if
    training ends early; `step` counts the steps of the epoch, with the one to begin. The result
    may hold "run" with "stop" (then no rank runs), never with "end". Every rank raises
    ExchangeError if epochs have unequal numbers of steps, or if a rank calls another collective.
    """
    headers = exchange_headers(Header(_ASKED, [answer, step], [], [], "fit"), runtime.world())
    for rank, other in enumerate(headers):
        if other.kind != _ASKED:
            raise ExchangeError(
                f"ranks called different collectives. Received: rank {rank} calls "
                f"{other.describe()} while rank {runtime.rank()} is in fit, step {step}. Give "
                "fit the same callbacks on all ranks."
            )
    answers: set[Answer] = {header.options[0] for header in headers}
    ended = {r: h.options[1] for r, h in enumerate(headers) if h.options[0] == "end"}
    # If steps may exchange nothing, ranks learn of unequal epochs when all have ended theirs.
    is_uneven = answers == {"end"} and len(set(ended.values())) > 1
    if is_uneven or {"run", "end"} <= answers:
        rank = min(ended, key=lambda r: ended[r])
        raise ExchangeError(
            f"ranks have unequal numbers of steps. Received: rank {rank} ended its epoch after "
            f"step {ended[rank]}, and others have more. Give every rank as many batches, for "
            "example with tfscale.data.GlobalBatches."
        )
    return answers


def separate_steps() -> None:
    """Separate a step outside of `fit`, or in one without callbacks, from those given up before.

    Collective, in the first such step after a `fit` with callbacks, which does this when it begins.
    """
    if runtime.is_single() or not runtime.has_ended_fit():
        return
    runtime.backend().drain()
    if any(objects.allgather_object(runtime.num_given_up(), name="steps given up")):
        runtime.start_incarnation()
    runtime.note_end_of_fit(False)


class GuardedStep:
    """A model's train function that ends training without an error if another rank has stopped."""

    def __init__(
        self, model: keras.Model, train_function: Any, session_of: Callable[[Any], Any]
    ) -> None:
        self._model = weakref.ref(model)
        self._train_function = train_function
        self._session_of = session_of
        self._last_logs: Any = None
        self._lookahead: Lookahead | None = None

    def __call__(self, iterator: Any) -> Any:
        """Run a step; return its logs, or those of the last step if another rank has stopped."""
        model = self._model()
        assert model is not None
        session = self._session_of(model)
        if session is None or not session.is_running:
            separate_steps()
        if session is not None:
            if session.has_unknown_steps and isinstance(iterator, tf.data.Iterator):
                iterator = self._look_ahead(iterator)
            if not session.may_run_step():
                return self._stop(model, "another rank stopped")
        try:
            self._last_logs = self._train_function(iterator)
        except (tf.errors.OutOfRangeError, StopIteration) as end:
            if session is not None:
                session.end_of_data()
            # With `tfscale.distribute` alone: there, Keras's own optimizer would have counted the
            # traced step that was begun. Where StopIteration tells the end, none was: Keras 3.16.
            is_begun = isinstance(end, tf.errors.OutOfRangeError) and not model.run_eagerly
            if shares.are_used() and is_begun:
                _count_missing_batch(model)
            raise
        except tf.errors.OpError as error:
            if has_stopped(error):
                return self._stop(model, engine_text(error.message))
            if not is_exchange_error(error):
                is_of_rows = isinstance(error, tf.errors.InvalidArgumentError)
                if is_of_rows and computes_rows(model, "train_step"):
                    raise ConfigError(shares.explanation(error)) from error
                raise
            raise ExchangeError(engine_text(error.message)) from error
        if session is not None:
            session.note_step()
        distributed = distributed_of(model.optimizer)
        around = () if session is None else (session.data, session.callbacks)
        if distributed is not None and after_step(distributed, *around):
            model.make_train_function(force=True)
        return self._last_logs

    def _look_ahead(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        """Return an iterator that has a next batch, or raise OutOfRangeError at the end."""
        if self._lookahead is None or self._lookahead.source is not iterator:
            self._lookahead = Lookahead(iterator)
        if not self._lookahead.has_next():
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return self._lookahead.iterator

    def _stop(self, model: keras.Model, why: str) -> Any:
        logger.info("Training stops on rank %d: %s.", runtime.rank(), why)
        stop_training(model)
        return model.get_metrics_result() if self._last_logs is None else self._last_logs


def _count_missing_batch(model: keras.Model) -> None:
    """Count a step that found no data, as Keras's own does where nothing is exchanged.

    No data feeds the update of `iterations` there, so it happens although the step fails.
    """
    for optimizer in optimizers_of(model):
        if scaled_by(optimizer) is None:
            iterations_of(optimizer).assign_add(1)


class Lookahead:
    """An iterator over the batches of `source` that reports whether there is a next batch."""

    def __init__(self, source: tf.data.Iterator) -> None:
        self.source = source  # no batches are taken from it elsewhere from now on
        self._pending: deque[Any] = deque()
        options = tf.data.Options()
        # tf.data must not fetch a batch before it is requested.
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        batches = tf.data.Dataset.from_generator(
            self._batches, output_signature=source.element_spec
        )
        # Replaces the source; of the same type, so nothing is traced again.
        self.iterator = iter(batches.with_options(options))

    def _batches(self) -> Iterator[Any]:
        while True:
            yield in_own_memory(self._pending.popleft())

    def has_next(self) -> bool:
        """Fetch a batch; return whether there was one. Call once before each use of `iterator`."""
        batch = self.source.get_next_as_optional()
        if not batch.has_value():
            return False
        self._pending.append(batch.get_value())
        return True


class StopTogether(Traits):
    """Delay a stop that one rank decided on until all ranks know of it.

    Groups exchange nothing between two averages, so a rank that stopped at once would leave the
    others some steps ahead. Its request is sent with the next average, after which all stop; if the
    epoch ends before that, they stop there. In cycles of `backward_passes_per_step` a rank stops
    before the batch that exchanges, which the others then give up.
    """

    phase = Phase.STOP

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Delay a stop, or stop if the ranks have agreed on it."""
        progress, average = self._progress, self._progress.group_average
        if progress.asks_each_step or progress.is_over:
            return
        if average is None:  # all ranks still train together, or average at the end of epochs
            self._wait_for_exchange()
        elif bool(average.report.must_stop.numpy()):
            stop_training(self.model)
        elif self.model.stop_training:
            logger.info("Training stops after the next average of the groups.")
            stop_training(self.model, False)
            average.report.wants_to_stop.assign(True)

    def _wait_for_exchange(self) -> None:
        progress, waiting = self._progress, accumulators(self.model)
        exchanges = len(waiting) < len(optimizers_of(self.model))  # some optimizer does next
        exchanges = exchanges or any(sums.is_before_exchange for sums in waiting)
        if (exchanges and not progress.trains_apart) or runtime.num_given_up():
            # The others learn of the stop in the next exchange, or know of it already.
            if progress.wants_to_stop:
                stop_training(self.model)
        elif self.model.stop_training:
            if progress.trains_apart and not progress.wants_to_stop:
                logger.info("Training stops where the epoch ends.")
            stop_training(self.model, False)
            progress.note_wish_to_stop()
