"""Tables of unchanged scripts whose rows are spread over the ranks."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.eager import raise_own_errors
from tfscale.exchange.tables import whole
from tfscale.fit.session import running_session
from tfscale.internals.keras import in_symbolic_scope, making_variables, put_in_place
from tfscale.internals.optimizers import trained_by, update_rule
from tfscale.layers.sharded_embedding import UNSUPPORTED, ShardedEmbedding
from tfscale.optimizer.saving import is_alone
from tfscale.optimizer.table_rules import tables_of
from tfscale.optimizer.table_state import KeptTables

logger = logging.getLogger("tfscale")


class ScriptEmbedding(ShardedEmbedding):
    """A ShardedEmbedding that becomes plain if the script reads its table, as for tied weights.

    The first read, of `embeddings`, gathers the table on every rank. From then on a variable of
    Keras has the place of this rank's rows, and the layer does what keras.layers.Embedding does.
    Steps that look up rows would continue with those that were there before, so a read after the
    first of them is an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_steps = False

    def __dir__(self) -> list[str]:
        """The names but `embeddings`: Keras reads all of them in its search for layers."""
        return [name for name in super().__dir__() if name != "embeddings"]

    @property
    def embeddings(self) -> Any:
        """The whole table, a variable. Collective at the first read."""
        if not self.built:
            raise AttributeError(f"embeddings of {self.name} exist after the layer is built.")
        if self.is_sharded:
            if self._is_in_steps or is_alone():
                return super().embeddings
            with making_variables():
                table = raise_own_errors(lambda: whole(self._table, self._embeddings))
                self._embeddings = put_in_place(self, self._embeddings, table)
            del self._together, self._calls  # they hold this rank's rows
            tell_whole(
                f"{self.name} ({self.input_dim}, {self.output_dim})",
                self.n_bytes,
                "the script reads its table",
            )
        return self._embeddings

    def call(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        """The rows of ids. While the table is sharded, all ranks must call this together."""
        if not self.is_sharded:
            return keras.layers.Embedding.call(self, inputs)
        in_step = not tf.executing_eagerly() or running_session() is not None
        self._is_in_steps = self._is_in_steps or (in_step and not in_symbolic_scope())
        return super().call(inputs, mask, training)

    def get_rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` of the table. Collective while it is sharded."""
        if not self.built or self.is_sharded:
            return super().get_rows(start, stop)
        return np.asarray(self._embeddings[start:stop])

    def set_rows(self, table: Any) -> None:
        """Take a whole table, of which this rank keeps its rows while it is sharded."""
        if not self.built or self.is_sharded:
            super().set_rows(table)
        else:
            self._embeddings.assign(np.asarray(table))

    def save_own_variables(self, store: Any) -> None:
        """Write the whole table, as keras.layers.Embedding does."""
        if not self.built or self.is_sharded:
            super().save_own_variables(store)
        else:
            store["0"] = self._embeddings


def tell_whole(name: str, n_bytes: int, why: str) -> None:
    """Log, as a warning of rank 0, that every rank has a whole table."""
    level = logging.WARNING if runtime.rank() == 0 else logging.INFO
    n_mb = n_bytes / (1 << 20)
    logger.log(level, "%s has %.4g MB, and stays whole on every rank: %s.", name, n_mb, why)


class Tables:
    """New Embedding layers, of which those with a table of `least_bytes` or more are sharded."""

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._are_any = False
        self._largest = (0, "")

    def new(self, new: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a new Embedding, or a layer whose rows are spread over the ranks."""
        plain = keras.layers.Embedding
        if not issubclass(cls, plain):
            return new(cls, *args, **kwargs)
        arguments = inspect.signature(plain.__init__).bind_partial(None, *args, **kwargs).arguments
        n_values = math.prod(arguments.get(n, 0) for n in ("input_dim", "output_dim"))
        n_bytes = n_values * tf.as_dtype(keras.config.floatx()).size
        name = f"{cls.__name__}({arguments.get('input_dim')}, {arguments.get('output_dim')})"
        self._largest = max(self._largest, (n_bytes, name))
        if n_bytes < self._least_bytes:
            return new(cls, *args, **kwargs)
        self._are_any = True
        refused = [n for n in UNSUPPORTED if arguments.get(n) is not None]
        if cls is plain and not refused:
            level, n_mb = (
                logging.INFO if runtime.rank() == 0 else logging.DEBUG,
                n_bytes / (1 << 20),
            )
            logger.log(level, "%s has %.4g MB: its rows are spread over the ranks.", name, n_mb)
            return ScriptEmbedding(*args, **kwargs)
        why = f"it has {refused[0]}" if refused else "it is a subclass"
        tell_whole(name, n_bytes, why)
        return new(cls, *args, **kwargs)

    def warn_if_unused(self) -> None:
        """Warn, once and on one rank, if no table was large enough."""
        n_bytes, name = self._largest
        if self._least_bytes and not self._are_any and runtime.rank() == 0:
            largest = f"the largest, {name}, has {n_bytes / (1 << 20):.4g} MB" if name else "none"
            logger.warning(
                "No Embedding was as large as shard_embeddings, %.4g MB: %s.",
                *(self._least_bytes / (1 << 20), largest),
            )
        self._are_any = True  # said


def load_own_rows(load: Any, optimizer: Any, store: Any) -> None:
    """Load the state of an optimizer, of which slots for tables have this rank's rows."""
    tables = tables_of(trained_by(update_rule(optimizer)))
    if tables and len(store) == len(optimizer.variables):
        kept = KeptTables([], tables, update_rule(optimizer))
        store = kept.cut(optimizer.variables, store)
    load(optimizer, store)
