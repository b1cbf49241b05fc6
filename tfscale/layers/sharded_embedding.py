"""ShardedEmbedding: an Embedding whose rows are spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.eager import raise_own_errors
from tfscale.comm.runtime import ProcessSet, global_process_set
from tfscale.config import ConfigError, ExchangeError, check_integer, require
from tfscale.exchange.tables import Calls, Table, TableRows, gathered, look_up, whole, write_rows
from tfscale.internals.keras import is_recording, layers_of, making_variables, raw_variable

WHOLE_BYTES = 256 << 20  # of tables that are drawn at once, as Keras draws them
_BLOCK_BYTES = 16 << 20  # of larger ones
# Initializers that draw a block of rows as they draw a whole table.
_BY_ROWS = (
    *(keras.initializers.RandomUniform, keras.initializers.RandomNormal),
    *(keras.initializers.TruncatedNormal, keras.initializers.Constant),
    *(keras.initializers.Zeros, keras.initializers.Ones),
)
# Arguments of Keras's layer that must be None, and what to use instead.
UNSUPPORTED = {
    "embeddings_regularizer": "the optimizer's weight_decay",
    "embeddings_constraint": "clipvalue, or a constraint of a later layer",
    "weights": "layer.set_rows(table)",
    "lora_rank": "keras.layers.Embedding",
    "quantization_config": "keras.layers.Embedding",
}


class ShardedEmbedding(keras.layers.Layer):
    """An Embedding whose rows are spread over the ranks, with the optimizer's state for them.

    Each rank holds about 1/size of the rows. A lookup sends each id of a batch once to the rank
    that holds its row, and receives the row; gradients of rows go the same way. Training with
    `DistributedOptimizer` equals training of a keras.layers.Embedding with dense gradients in one
    process.

    All ranks must look up together, in `evaluate`, `predict` and calls of the model, too.
    `evaluate` and `predict` of a prepared model may have other numbers of batches on each rank.

    For Keras the layer is an Embedding: `model.save` writes one, which loads where tfscale is not
    installed. `model.get_weights`, `count_params` and `summary` see this rank's rows.

    Examples:
        >>> tfscale.init()
        >>> table = tfscale.layers.ShardedEmbedding(1000, 2, embeddings_initializer="ones")
        >>> model = keras.Sequential([keras.Input((3,), dtype="int64"), table])
        >>> model(np.array([[0, 7, 999]])).numpy().tolist()
        [[[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]]
        >>> table.get_rows(0, 2).tolist()
        [[1.0, 1.0], [1.0, 1.0]]
    """

    built: bool

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        lora_rank: Any = None,
        *,
        combiner: str | None = None,
        lazy: bool = False,
        spread: bool = True,
        process_set: ProcessSet = global_process_set,
        **options: Any,
    ) -> None:
        """Create the layer.

        Args:
            input_dim: Number of rows; ids are 0 to input_dim - 1.
            output_dim: Number of values in a row.
            embeddings_initializer: Up to 256 MB, a table is the one that Keras draws. A larger one
                is drawn in blocks from the seed and the block's number, equal on any number of
                ranks: "uniform", "normal", "truncated_normal" or constants.
            embeddings_regularizer: Must be None.
            embeddings_constraint: Must be None.
            mask_zero: Whether id 0 is masked, as in Keras.
            weights: Must be None; see `set_rows`.
            lora_rank: Must be None.
            combiner: "sum" or "mean" of the rows along the last axis of the ids, without masked
                ids; None keeps them apart. A mean of no rows is 0.
            lazy: Whether an update changes only rows that this step looked up. It differs from
                Keras for all rules but SGD without momentum and Adagrad.
            spread: Whether neighbouring ids lie on different ranks. False gives each rank a block
                of ids, which is slower where some blocks are looked up more often.
            process_set: The ranks that share the rows: those of the model's DistributedOptimizer.
            **options: As for keras.layers.Embedding.

        Raises:
            ConfigError: An argument is invalid or not supported.
        """
        refused = {
            "embeddings_regularizer": embeddings_regularizer,
            "embeddings_constraint": embeddings_constraint,
            "weights": weights,
            "lora_rank": lora_rank,
            "quantization_config": options.pop("quantization_config", None),
        }
        for name, value in refused.items():
            hint = f"Use {UNSUPPORTED[name]}."
            received = f"an array of shape {np.shape(value)}" if name == "weights" else value
            require(value is None, name, "None in ShardedEmbedding", received, hint)
        fits = combiner in (None, "sum", "mean")
        require(fits, "combiner", "None, 'sum' or 'mean'", combiner)
        options.pop("lora_alpha", None)
        super().__init__(**options)
        self.input_dim = check_integer("input_dim", input_dim, 1)
        self.output_dim = check_integer("output_dim", output_dim, 1)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.mask_zero, self.combiner, self.lazy = mask_zero, combiner, lazy
        self.supports_masking = mask_zero
        self.autocast = False
        self._table = Table(self.input_dim, self.output_dim, process_set, spread)
        self._whole: np.ndarray | None = None  # while it is saved

    # Keras serialises a layer by its class.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return keras.layers.Embedding

    def build(self, input_shape: Any = None) -> None:
        """Create this rank's rows. All ranks of the process set must build together."""
        if self.built:
            return
        if self._table.group.rank < 0:
            raise ConfigError(
                "process_set must have every rank that builds the layer. Received: "
                f"{self._table.process_set!r} on rank {runtime.rank()}. Leave the layer out there."
            )
        with making_variables():
            is_small = self.n_bytes <= WHOLE_BYTES
            self._embeddings = TableRows(
                self._table,
                self._drawn_as_by_keras if is_small else _zeros,
                self.lazy,
                dtype=self.variable_dtype,
                autocast=False,
                name="embeddings",
            )
            if not is_small:
                self._draw_blocks()
            order = tf.Variable(0.0, trainable=False, name="order")
            self._calls = _Untracked(order, self._embeddings.path)
            self._together = _Untracked(self._trace_together())
        self.built = True

    def _drawn_as_by_keras(self, shape: Any, dtype: Any) -> tf.Tensor:
        drawn = self.embeddings_initializer((self.input_dim, self.output_dim), dtype=dtype)
        begin, end = self._table.own
        return tf.gather(drawn, self._table.ids(np.arange(begin, end)))

    def _draw_blocks(self) -> None:
        """Draw this rank's rows of a large table, a block of positions at a time."""
        initializer = self.embeddings_initializer
        if type(initializer) not in _BY_ROWS:
            raise ConfigError(
                f"embeddings_initializer must be 'uniform', 'normal', 'truncated_normal' or a "
                f"constant for a table of more than {WHOLE_BYTES >> 20} MB. Received: "
                f"{type(initializer).__name__}. Use one of these, then layer.set_rows(table)."
            )
        raw = raw_variable(self._embeddings)
        begin, end = self._table.own
        length = max(1, _BLOCK_BYTES // (self.output_dim * raw.dtype.size))
        for block in range(begin // length, -(-end // length)):
            first, last = max(begin, block * length), min(end, (block + 1) * length)
            drawn = _of_block(initializer, block)((length, self.output_dim), dtype=raw.dtype.name)
            values = drawn[first - block * length : last - block * length]
            write_rows(raw, tf.range(first - begin, last - begin), values)

    # Lookups

    def call(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        """Look up rows. All ranks must call this together, with any numbers of ids.

        Args:
            inputs: Ids of any dense shape.
            mask: For a `combiner`: False for ids that do not count; the shape of the ids.
            training: True in a training step.

        Returns:
            Rows, of shape [*inputs.shape, output_dim], without the last axis of the ids if they are
            combined.
        """
        ids = tf.convert_to_tensor(inputs)
        if not ids.dtype.is_integer:
            ids = tf.cast(ids, tf.int32)
        flat = tf.reshape(ids, [-1])
        if tf.executing_eagerly():
            rows = self._raise_own_errors(lambda: self._looked_up(flat, training))
        else:
            rows = self._looked_up(flat, training)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [self.output_dim]], 0))
        rows = tf.cast(tf.ensure_shape(rows, [*ids.shape, self.output_dim]), self.compute_dtype)
        return rows if self.combiner is None else self._combined(rows, ids, mask)

    def _looked_up(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        # Keras tells layers of a model whose `call` has no such argument nothing of training.
        if training or is_recording() or self._table.group.size == 1:
            return look_up(self._embeddings, ids, self._calls.named())[0]
        return self._together.value(tf.cast(ids, tf.int64), tf.constant(1, tf.int64))[0]

    def _raise_own_errors(self, look_up: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Run an eager lookup; errors of its collectives name the table, and have no cause."""
        try:
            return raise_own_errors(look_up)
        except ExchangeError as error:
            text = str(error)
        if text.startswith("ids must be"):  # of some rank: it names the table
            raise ExchangeError(text)
        raise ExchangeError(
            f"{self._embeddings.path} must be looked up by all ranks together, which share its "
            f"rows, also in a call of the model. Received: a call on rank {runtime.rank()}, and "
            f"{text}"
        )

    def _combined(self, rows: tf.Tensor, ids: tf.Tensor, mask: Any) -> tf.Tensor:
        counts = mask if mask is not None else self._counts(ids)
        if counts is not None:
            rows = tf.where(tf.cast(counts, tf.bool)[..., tf.newaxis], rows, tf.zeros_like(rows))
        total = tf.reduce_sum(rows, axis=-2)
        if self.combiner == "sum":
            return total
        ones = tf.ones_like(ids) if counts is None else counts
        n = tf.reduce_sum(tf.cast(ones, total.dtype), axis=-1, keepdims=True)
        return tf.math.divide_no_nan(total, n)

    def _counts(self, ids: tf.Tensor) -> tf.Tensor | None:
        return tf.not_equal(ids, 0) if self.mask_zero else None

    def _trace_together(self) -> Any:
        """Trace lookups that have the same slots in whatever function calls them.

        So a rank that has no batch left can answer the others.
        """
        if self._table.group.size == 1:
            return None
        specs = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)]

        def look_up_together(ids: tf.Tensor, state: tf.Tensor) -> Any:
            return look_up(self._embeddings, ids, self._calls.named("shared "), state)

        function = tf.function(look_up_together, input_signature=specs, autograph=False)
        function.get_concrete_function()
        return function

    def answer(self) -> bool:
        """Answer one lookup of the other ranks, without ids; return whether any rank looks up.

        Collective: all ranks of the process set must look up, or answer.
        """
        _, are_asked = self._together.value(tf.zeros([0], tf.int64), tf.constant(0, tf.int64))
        return bool(are_asked)

    # What Keras asks

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """The mask of ids other than 0 with `mask_zero`; None for combined rows."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(inputs, 0)

    def compute_output_shape(self, input_shape: Any, **options: Any) -> tuple[Any, ...]:
        """The shape of the rows for the shape of the ids."""
        kept = input_shape if self.combiner is None else input_shape[:-1]
        return (*kept, self.output_dim)

    def compute_output_spec(self, inputs: Any, **options: Any) -> Any:
        """The shape and dtype of the rows."""
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the keras.layers.Embedding that is saved in place of this layer."""
        if self.combiner is not None:
            raise ConfigError(
                "combiner must be None in a model that is saved or cloned: keras.layers.Embedding "
                f"has none. Received: combiner={self.combiner!r}. Use model.save_weights, or "
                "reduce the rows by a layer of Keras."
            )
        config = {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": None,
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "embeddings_constraint": None,
            "mask_zero": self.mask_zero,
        }
        return {**super().get_config(), **config}

    @property
    def embeddings(self) -> Any:
        """Refused: no rank has the whole table."""
        raise ConfigError(
            f"embeddings must be read by ids, as no rank has all rows. Received: {self.name}."
            "embeddings of a ShardedEmbedding. Call the layer, or layer.get_rows(). For tied "
            "output weights use keras.layers.Embedding; under --shard-embeddings read it before "
            "the first step, or use a subclass of keras.layers.Embedding, which stays whole."
        )

    def get_weights(self) -> list[np.ndarray]:
        """The whole table, as of keras.layers.Embedding. Collective: see `get_rows`."""
        return [self.get_rows()] if self.built else []

    def set_weights(self, weights: Any) -> None:
        """Take this rank's rows of the whole table, as `set_rows` does."""
        require(len(weights) == 1, "weights", "a list of one table", f"{len(weights)} arrays")
        self.set_rows(weights[0])

    def enable_lora(self, *args: Any, **options: Any) -> None:
        """Refused."""
        raise ConfigError(
            f"enable_lora needs a keras.layers.Embedding. Received: {self.name}, a "
            "ShardedEmbedding. Load the saved model, which has one."
        )

    def quantize(self, *args: Any, **options: Any) -> None:
        """Refused."""
        raise ConfigError(
            f"quantize needs a keras.layers.Embedding. Received: {self.name}, a "
            "ShardedEmbedding. Load the saved model, which has one."
        )

    # Rows of the whole table

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole table."""
        return self.input_dim * self.output_dim * int(tf.as_dtype(self.variable_dtype).size)

    def get_rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return rows `start` to `stop` of the table, on all ranks.

        Collective: all ranks of the process set must call this.

        Args:
            start: The first id.
            stop: The id after the last one; None for the number of rows.

        Returns:
            An array of shape [stop - start, output_dim].

        Raises:
            ConfigError: These are no ids in this order, or the layer is not built.
            ExchangeError: Not all ranks joined within TFSCALE_SAVE_TIMEOUT_S.
        """
        stop = self.input_dim if stop is None else stop
        fits = 0 <= start <= stop <= self.input_dim
        ids_of_table = f"ids with 0 <= start <= stop <= {self.input_dim}"
        require(fits, "start and stop", ids_of_table, f"{start} and {stop}")
        require(self.built, self.name, "built", "a layer without rows", "Call the model first.")
        self._embeddings.meet("get_rows")
        dtype = tf.as_dtype(self.variable_dtype)
        result = np.empty((stop - start, self.output_dim), dtype.as_numpy_dtype)
        for ids in self._table.slices(dtype.size, start, stop):
            rows = gathered(self._table, self._embeddings, ids)
            result[ids.start - start : ids.stop - start] = rows
        return result

    def set_rows(self, table: Any) -> None:
        """Take this rank's rows of a whole table. Every rank must call this, with equal tables.

        Args:
            table: Of shape [input_dim, output_dim]: an array, or what returns one for a slice of
                ids, such as a NumPy memory map or a dataset of h5py. It is read in slices.

        Raises:
            ConfigError: The shape is another.
        """
        shape = tuple(np.shape(table) if not hasattr(table, "shape") else table.shape)
        expected = (self.input_dim, self.output_dim)
        hint = "Pass an array, such as np.load(path, mmap_mode='r')."
        require(shape == expected, "table", f"of shape {expected}", shape, hint)
        if not self.built:
            self.build()
        self._embeddings.load(table)

    # Saving

    @property
    def is_sharded(self) -> bool:
        """True if the layer is built, and each rank holds some of its rows."""
        return self.built and isinstance(self._embeddings, TableRows)

    @property
    def rows(self) -> TableRows:
        """This rank's rows, in the order of their positions."""
        return self._embeddings

    def keep_whole(self, table: np.ndarray | None) -> None:
        """Keep the whole table, to be saved by this rank; None drops it."""
        self._whole = table

    def save_own_variables(self, store: Any) -> None:
        """Write the whole table, as keras.layers.Embedding does."""
        table = self._whole
        if table is None and self._table.group.size == 1:
            table = whole(self._table, self._embeddings)
        if table is None:
            raise ConfigError(
                f"{self.name} can be saved on all ranks only, which share its rows. Received: a "
                "call on one rank, or a model whose optimizer is not wrapped. Compile it with "
                "tfscale.DistributedOptimizer, and call model.save or save_weights on every rank."
            )
        store["0"] = table

    def load_own_variables(self, store: Any) -> None:
        """Read this rank's rows of a saved table, in slices."""
        self.set_rows(store["0"])


def sharded_embeddings(model: keras.Model) -> list[ShardedEmbedding]:
    """The built layers of a model whose rows the ranks share, each once."""
    return [x for x in layers_of(model) if issubclass(type(x), ShardedEmbedding) and x.is_sharded]


def named(tables: Sequence[ShardedEmbedding]) -> str:
    """The names and sizes of up to three tables, for messages, and the number of the others."""
    shown = [f"{table.name} ({table.n_bytes / (1 << 20):.4g} MB)" for table in tables[:3]]
    more = len(tables) - len(shown)
    return ", ".join(shown) + (f" and {more} more tables" if more else "")


class _Untracked:
    """Objects that are no part of a layer's state, for Keras and tf.train.Checkpoint."""

    def __init__(self, value: Any, name: str = "") -> None:
        self.value, self.name = value, name

    def named(self, kind: str = "") -> Calls:
        return Calls(self.name, self.value.handle, kind)


def _zeros(shape: Any, dtype: Any) -> tf.Tensor:
    return tf.zeros(shape, dtype)


def _of_block(initializer: Any, block: int) -> Any:
    """An initializer that draws a block from its seed and the block's number."""
    seed = getattr(initializer, "seed", None)
    if seed is None:
        return initializer
    number = int(getattr(seed, "initial_seed", seed))
    words = np.random.SeedSequence([abs(number), block]).generate_state(1)
    config = initializer.get_config() | {"seed": int(words[0] >> 1)}
    return type(initializer).from_config(config)
