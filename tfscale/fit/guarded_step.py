"""The training step of a `fit` whose ranks stop together."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.eager import engine_text, has_stopped, is_exchange_error
from tfscale.config import ExchangeError
from tfscale.fit.session import session_of
from tfscale.optimizer.distributed import distributed_of

logger = logging.getLogger("tfscale")


class GuardedStep:
    """A model's train function that ends training without an error if another rank has stopped."""

    def __init__(self, model: keras.Model, train_function: Any) -> None:
        self._model = weakref.ref(model)
        self._train_function = train_function
        self._last_logs: Any = None
        self._source: tf.data.Iterator | None = None
        self._lookahead: Lookahead | None = None

    def __call__(self, iterator: Any) -> Any:
        """Run a step; return its logs, or those of the last step if another rank has stopped."""
        model = self._model()
        assert model is not None
        session = session_of(model)
        if session is not None:
            if session.has_unknown_steps and isinstance(iterator, tf.data.Iterator):
                iterator = self._look_ahead(iterator)
            if not session.may_run_step():
                return self._stop(model, "another rank stopped")
        try:
            self._last_logs = self._train_function(iterator)
        except tf.errors.OutOfRangeError:
            if session is not None:
                session.end_of_data()
            raise
        except tf.errors.OpError as error:
            if has_stopped(error.message):
                return self._stop(model, engine_text(error.message))
            if not is_exchange_error(error):
                raise
            raise ExchangeError(engine_text(error.message)) from error
        distributed = distributed_of(model.optimizer)
        around = () if session is None else (session.data, session.callbacks)
        if distributed is not None and distributed.after_step(*around):
            model.make_train_function(force=True)
        return self._last_logs

    def _look_ahead(self, iterator: tf.data.Iterator) -> tf.data.Iterator:
        """Return an iterator that has a next batch, or raise OutOfRangeError at the end."""
        if self._source is not iterator:
            self._source, self._lookahead = iterator, Lookahead(iterator)
        assert self._lookahead is not None
        if not self._lookahead.has_next():
            raise tf.errors.OutOfRangeError(None, None, "End of sequence")
        return self._lookahead.iterator

    def _stop(self, model: keras.Model, why: str) -> Any:
        logger.info("Training stops on rank %d: %s.", runtime.rank(), why)
        model.stop_training = True
        return model.get_metrics_result() if self._last_logs is None else self._last_logs


class Lookahead:
    """An iterator over the batches of `source` that reports whether there is a next batch."""

    def __init__(self, source: tf.data.Iterator) -> None:
        self._source = source  # not used elsewhere from now on
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
            yield self._pending.popleft()

    def has_next(self) -> bool:
        """Fetch a batch; return whether there was one. Call once before each use of `iterator`."""
        batch = self._source.get_next_as_optional()
        if not batch.has_value():
            return False
        self._pending.append(batch.get_value())
        return True
