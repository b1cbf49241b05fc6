"""Whether there is a next batch, asked before a step takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class Lookahead:
    """An iterator over the same batches that knows whether there is another one.

    Attributes:
        iterator: To be used instead of the source; of the same type, so nothing is traced anew.
    """

    def __init__(self, source: tf.data.Iterator) -> None:
        """Take over an iterator.

        Args:
            source: Iterator of a tf.data.Dataset; nobody else may use it from now on.
        """
        self._source = source
        self._pending: deque[Any] = deque()
        options = tf.data.Options()
        # Nothing may fetch a batch before it is asked for.
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        batches = tf.data.Dataset.from_generator(
            self._batches, output_signature=source.element_spec
        )
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
