"""Steps of a tf.data.Dataset: what they are made of, what they draw, and the order of it.

Private names used here, checked with TensorFlow 2.18 and 2.21: `Dataset._inputs`, `_functions`,
`_seed`, `_seed2`, `_reshuffle_each_iteration`, `_rerandomize`, `_deterministic`, `_batch_size`,
`_count`, `_as_serialized_graph`; `function.graph` of what `_functions` returns; the names of op
types and of datasets' classes; `disable_op_determinism` and `is_op_determinism_enabled` of
`tensorflow.python.framework.config`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config as framework_config

# Legacy random ops keep a state in the op, those of generators in a variable.
_DRAWS = re.compile(
    r"(?:Random(?!Dataset|IndexShuffle|ShuffleQueue)|TruncatedNormal|ParameterizedTruncatedNormal"
    r"|Multinomial|SampleDistorted|StatefulUniform|StatefulStandardNormal|StatefulTruncated"
    r"|StatefulRandom|NonDeterministicInts|Rng)"
)
_WRITES = re.compile(
    r"(?:Assign\w*VariableOp|Resource(?:Scatter|Apply)\w+|Rng|Stateful(?!PartitionedCall))"
)
_PYTHON = re.compile(r"(?:Eager)?PyFunc$")
_FUNCTION_NAME = re.compile(r"Dataset_(flat_map|[a-z]+)_(.+)_\d+$")
GENERATOR = "flat_map (flat_map_fn)"  # the function of Dataset.from_generator
_METHODS = {"TensorSlice": "from_tensor_slices", "Tensor": "from_tensors"}


@dataclass(frozen=True)
class Step:
    """A step of a dataset that calls a function of TensorFlow.

    Attributes:
        name: The method of `tf.data.Dataset` and the function, as far as they are known.
        is_parallel: Whether several calls run at a time.
        is_unordered: Whether it was made with `deterministic=False`.
        draws: Types of the ops that draw random numbers, from a state of their own.
        writes: Types of the ops that change variables, such as the state of a Keras layer.
        calls_python: Whether it calls a Python function.
    """

    name: str
    is_parallel: bool
    is_unordered: bool
    draws: tuple[str, ...]
    writes: tuple[str, ...]
    calls_python: bool

    @property
    def depends_on_time(self) -> bool:
        """Whether the results of a run depend on which thread comes first.

        Several calls at a time take numbers of one state in any order. A variable is changed for
        the elements that are prefetched, too, and how many these are depends on time where an
        iterator is left before its end.
        """
        is_raced = self.is_parallel and bool(self.draws)
        return is_raced or bool(self.writes) or self.is_unordered


def steps_of(dataset: tf.data.Dataset) -> list[Step]:
    """Return the steps of a dataset that call functions, or have no order, the last one first."""
    steps, waiting = [], [dataset]
    while waiting:
        each = waiting.pop(0)
        waiting.extend(inputs_of(each))
        functions = each._functions() if hasattr(each, "_functions") else []
        is_loose = each.options().deterministic is False
        with contextlib.suppress(tf.errors.OpError):  # a pipeline that cannot be serialized
            is_loose = is_loose or is_unordered(each)
        if not functions and not is_loose:
            continue
        kind = kind_of(each)
        ops = set()
        for function in functions:
            concrete = getattr(function, "function", None)
            if concrete is not None:
                ops |= set(op_types(concrete.graph.as_graph_def()))
        steps.append(
            Step(
                name=name_of(each),
                is_parallel="Parallel" in kind
                or "MapAndBatch" in kind
                or any(re.match(r"Parallel\w+Dataset", op) for op in ops),
                is_unordered=is_loose,
                draws=tuple(sorted(filter(_DRAWS.match, ops))),
                writes=tuple(sorted(filter(_WRITES.match, ops))),
                calls_python=any(map(_PYTHON.match, ops)),
            )
        )
    return steps


def name_of(dataset: Any) -> str:
    """Return the method that made a step of a dataset, and its function if it is known."""
    for function in dataset._functions() if hasattr(dataset, "_functions") else []:
        concrete = getattr(function, "function", None)
        name = None if concrete is None else _FUNCTION_NAME.search(_text(concrete.name))
        if name:
            return f"{name[1]} ({name[2]})"
    kind = kind_of(dataset).removeprefix("Parallel")
    return _METHODS.get(kind, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower())


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def op_types(graph: Any) -> Iterator[str]:
    """Yield the type of each op of a graph, and of the functions that it calls."""
    yield from (node.op for node in graph.node)
    for function in graph.library.function:
        yield from (node.op for node in function.node_def)


def iterate_in_order(make: Callable[[Any], Any], dataset: tf.data.Dataset) -> Any:
    """Return an iterator whose elements do not depend on time, as with TensorFlow's determinism.

    TensorFlow rewrites the pipeline of an iterator when it is made: what depends on the order of
    calls is computed one after another, and the rest stays parallel.
    """
    if framework_config.is_op_determinism_enabled():
        return make(dataset)
    tf.config.experimental.enable_op_determinism()
    try:
        return make(dataset)
    finally:
        framework_config.disable_op_determinism()


def inputs_of(dataset: tf.data.Dataset) -> list[Any]:
    """Return the datasets that a dataset is made of."""
    return list(dataset._inputs())


def drawn_with(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Return the seeds with which this step of a dataset shuffles or draws; None if it does not.

    One of the pair is TensorFlow's global seed; (0, 0) if each pass, or each rank, draws again.
    """
    name = type(dataset).__name__
    if not any(word in name for word in ("Shuffle", "Random")) or not hasattr(dataset, "_seed"):
        return None
    is_renewed = getattr(dataset, "_reshuffle_each_iteration", "Shuffle" in name) is not False
    if is_renewed or getattr(dataset, "_rerandomize", False):
        return 0, 0
    return int(dataset._seed), int(dataset._seed2)


def is_unordered(dataset: tf.data.Dataset) -> bool:
    """Return whether this step of a dataset was made with `deterministic=False`."""
    told = getattr(dataset, "_deterministic", "")
    if "ParallelInterleave" not in type(dataset).__name__:
        return told == "false"
    # Such a step keeps the argument in its graph alone.
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    text = dataset._as_serialized_graph(external_state_policy=policy).numpy()
    nodes = tf.compat.v1.GraphDef.FromString(text).node
    return any(node.attr["deterministic"].s == b"false" for node in nodes)


# Batches: their rows, and whether these can be put into other batches.

INFINITE, UNKNOWN = -1, -2  # numbers of rows, as those of `Dataset.cardinality`
_SAME_ROWS = ("Prefetch", "Map", "ParallelMap", "Options", "Shuffle", "Cache", "Model")
_SAME_BATCHES = (*_SAME_ROWS, "Repeat", "Take", "Skip", "Shard", "Filter", "AssertCardinality")
_BATCHES = ("Batch", "ParallelBatch", "PaddedBatch", "MapAndBatch")


def batch_rows_of(dataset: tf.data.Dataset) -> int | None:
    """Return the number of rows of a full batch of a dataset of batches; None if it is not known.

    A `map` after `batch` is taken to keep the rows.
    """
    static = {spec.shape[0] for spec in _specs_of(dataset) if spec.shape.rank} - {None}
    if len(static) == 1:
        return int(static.pop())
    kind, inputs = kind_of(dataset), inputs_of(dataset)
    if kind in _BATCHES:
        size = tf.get_static_value(dataset._batch_size)
        return None if size is None else int(size)
    if kind in (*_SAME_BATCHES, "Zip") and inputs:
        sizes = {batch_rows_of(each) for each in inputs}
        return sizes.pop() if len(sizes) == 1 else None
    return None


def rows_of(dataset: tf.data.Dataset) -> int:
    """Return the number of rows of all batches of a dataset; or `INFINITE`, or `UNKNOWN`.

    Nothing is read: the steps of the dataset tell, or batches with a static number of rows.
    """
    n_batches = int(dataset.cardinality())
    size = batch_rows_of(dataset)
    if n_batches < 0 or size is None:
        return INFINITE if n_batches == INFINITE else UNKNOWN
    if has_full_batches(dataset):
        return n_batches * size
    kind, inputs = kind_of(dataset), inputs_of(dataset)
    if kind in _BATCHES:
        return max(int(inputs[0].cardinality()), UNKNOWN)
    if kind in _SAME_ROWS:
        return rows_of(inputs[0])
    if kind == "Repeat":
        of_one, count = rows_of(inputs[0]), int(dataset._count)
        return of_one * count if of_one > 0 else UNKNOWN
    return UNKNOWN


def has_full_batches(dataset: tf.data.Dataset) -> bool:
    """Return whether all batches have one static number of rows, as with `drop_remainder=True`."""
    return all(spec.shape.rank and spec.shape[0] is not None for spec in _specs_of(dataset))


def why_not_rebatched(dataset: tf.data.Dataset) -> str:
    """Return why rows of a dataset of batches cannot be put into other batches; "" if they can."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec):
            return f"elements with a {type(spec).__name__}"
        if spec.shape.rank == 0:
            return f"elements with a number, {spec.dtype.name} of shape (), which has no rows"
    lengths = {s.shape[0] for s in _specs_of(dataset) if s.shape.rank} - {None}
    if len(lengths) > 1:
        return f"parts of a batch with {', '.join(map(str, sorted(lengths)))} rows"
    is_open = any(None in (spec.shape or [None])[1:] for spec in _specs_of(dataset, tf.TensorSpec))
    for kind in _kinds_after_rows(dataset):
        if kind == "PaddedBatch" and is_open:
            return "padded_batch with lengths that differ between batches"
        if kind == "GroupByWindow":
            return "group_by_window, or bucket_by_sequence_length, which keeps its batch sizes"
    return ""


def in_own_memory(batch: Any) -> Any:
    """A copy of a batch, to be given to `from_generator`.

    That hands a tensor's memory on without a copy, as if nothing else used it: an op that computes
    in place would change the batch that a `cache` keeps.
    """

    def copied(leaf: Any) -> Any:
        is_plain = isinstance(leaf, tf.Tensor) and leaf.dtype not in (tf.variant, tf.resource)
        return tf.raw_ops.DeepCopy(x=leaf) if is_plain else leaf

    return tf.nest.map_structure(copied, batch, expand_composites=True)


def with_rows_of_one_shape(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset, whose iterator refuses batches with rows of another shape than in the first.

    Where its specification tells the shapes of rows, it is the dataset itself.
    """
    leaves = tf.nest.flatten(dataset.element_spec)
    is_open = [isinstance(s, tf.TensorSpec) and None in (s.shape or [0, None])[1:] for s in leaves]
    if not any(is_open):
        return dataset

    def compare(first: tf.Tensor, batch: Any) -> tuple[tf.Tensor, Any]:
        tensors = tf.nest.flatten(batch)
        shapes = [tf.shape(t)[1:] for t, is_one in zip(tensors, is_open, strict=True) if is_one]
        text = tf.strings.join([tf.strings.format("{}", shape) for shape in shapes], " and ")
        told = [
            "rows of all batches must have one shape, to be put into larger batches. Received:",
            *(text, "after", first),
            "Use padded_batch with fixed padded_shapes, or ragged_batch() for rows of any length.",
        ]
        is_same = tf.equal(first, "") | tf.equal(first, text)
        with tf.control_dependencies([tf.debugging.Assert(is_same, told)]):
            return tf.identity(text), batch

    return dataset.scan("", compare)


def _specs_of(dataset: tf.data.Dataset, kind: Any = tf.TypeSpec) -> list[Any]:
    specs = tf.nest.flatten(dataset.element_spec)
    return [spec for spec in specs if hasattr(spec, "shape") and isinstance(spec, kind)]


def kind_of(dataset: tf.data.Dataset) -> str:
    """Return the name of the class of a step, such as "ParallelMap"."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset")


def _kinds_after_rows(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yield the kinds of steps that follow the rows, the one that makes the batches included."""
    steps = [dataset]
    while steps:
        step = steps.pop()
        kind = kind_of(step)
        yield kind
        if kind not in _BATCHES:
            steps.extend(inputs_of(step))
