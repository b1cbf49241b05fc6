"""Pipelines of tf.data whose maps run on chosen rows of each batch: a rank's, not all.

A `map` without state makes one element of each. So the rows of a batch may be chosen before it:

    paths.shuffle(n).map(decode).batch(8)    becomes
    paths.shuffle(n).batch(8).map(choose rows).unbatch().map(decode).batch(rows)

Steps between the maps and `batch` that only choose or order elements move below the maps. All that
is below the lowest map stays the dataset that it was, and so does the state of its shuffles.

Private names used here, checked with TensorFlow 2.21: those of `internals/datasets.py`;
`Dataset._variant_tensor`, `_buffer_size`, `_map_func`, `_num_parallel_calls`, `_drop_remainder`,
`_padded_shapes`, `_padding_values`, `_num_shards`, `_index`, `_datasets`; of a
function `_func`, `_input_structure`, `output_structure` and `function`; the names of the nodes of
a serialized shuffle; `structure` and `nest` of `tensorflow.python.data.util`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters import tf_dataset_adapter
from tensorflow.python.data.util import nest, structure
from tensorflow.python.framework import op_def_registry

from tfscale.internals.datasets import (
    GENERATOR,
    UNKNOWN,
    Step,
    inputs_of,
    kind_of,
    name_of,
    op_types,
    steps_of,
)

_MAPS = ("Map", "ParallelMap")
_BATCHES = ("Batch", "ParallelBatch", "PaddedBatch")
# Steps that choose or order elements, whatever these are.
_CHOOSING = (
    *("Prefetch", "Shuffle", "Take", "Skip", "Repeat", "Shard", "Options"),
    "AssertCardinality",
)
# Stateful for TensorFlow, although a call changes nothing and depends on its arguments: a lookup in
# a table, a check, and calls of functions, whose own ops are looked at.
_HARMLESS = (
    *("LookupTableFindV2", "LookupTableSizeV2", "Assert", "CheckNumerics", "CheckNumericsV2"),
    *("StatefulPartitionedCall", "If", "Case", "While"),
)
_MAP_OP = re.compile(r"(?:Parallel)?MapDataset")
_IGNORED_STATE = tf.data.experimental.ExternalStatePolicy.IGNORE


class UnmovedError(Exception):
    """A step that keeps the maps of a dataset on whole batches, and why, as a text."""


@dataclass(frozen=True)
class _Elements:
    """Elements of a dataset as maps see them, and the maps.

    Attributes:
        source: The elements before the first map, in the order of the dataset.
        apply: Makes an element of the dataset of one of `source`.
        maps: The functions of TensorFlow that `apply` calls.
        parallel_calls: Calls of a map that run at a time; None for one after another.
        prefetched: Elements that the dataset makes in advance; None for none.
    """

    source: tf.data.Dataset
    apply: Callable[[Any], Any] = field(default=lambda element: element)
    maps: tuple[Any, ...] = ()
    parallel_calls: tf.Tensor | None = None
    prefetched: int | None = None


def _elements_of(dataset: tf.data.Dataset) -> _Elements:
    """Return the source of a dataset and its maps; raise UnmovedError if a step is between them."""
    kind, inputs = kind_of(dataset), inputs_of(dataset)
    if kind in _MAPS:
        below = _elements_of(inputs[0])
        _require_stateless(dataset)
        function = dataset._map_func
        calls = getattr(dataset, "_num_parallel_calls", None)
        return replace(
            below,
            apply=lambda element: _call(function, below.apply(element)),
            maps=(*below.maps, function),
            parallel_calls=below.parallel_calls if calls is None else calls,
        )
    if kind == "Zip":
        return _zipped(dataset)
    if kind in _CHOOSING:
        below = _elements_of(inputs[0])
        if not below.maps:
            return _Elements(dataset)
        if kind == "Prefetch":
            return replace(below, prefetched=_constant(dataset._buffer_size))
        return replace(below, source=_again(dataset, below.source))
    for step in _all_steps(dataset):
        if kind_of(step) in _MAPS:
            raise UnmovedError(f"{name_of(dataset)} follows {name_of(step)}")
    return _Elements(dataset)


def _zipped(dataset: tf.data.Dataset) -> _Elements:
    parts = [_elements_of(part) for part in nest.flatten(dataset._datasets)]
    if not any(part.maps for part in parts):
        return _Elements(dataset)

    def apply(elements: Any) -> Any:
        flat = nest.flatten_up_to(dataset._datasets, elements)
        mapped = [part.apply(element) for part, element in zip(parts, flat, strict=True)]
        return nest.pack_sequence_as(dataset._datasets, mapped)

    sources = nest.pack_sequence_as(dataset._datasets, [part.source for part in parts])
    return _Elements(
        tf.data.Dataset.zip(sources),
        apply,
        maps=tuple(function for part in parts for function in part.maps),
        parallel_calls=_first(part.parallel_calls for part in parts),
        prefetched=_first(part.prefetched for part in parts),
    )


def _first(values: Iterator[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _call(function: Any, element: Any) -> Any:
    """Call the function of a map with an element; it is not traced again."""
    tensors = structure.to_tensor_list(function._input_structure, element)
    return structure.from_compatible_tensor_list(
        function.output_structure, function.function(*tensors)
    )


def _require_no_state(step: Step) -> None:
    if step.name == GENERATOR:
        raise UnmovedError("from_generator makes elements in Python")
    if step.calls_python:
        raise UnmovedError(f"{step.name} calls Python")
    if step.draws or step.writes:
        ops = ", ".join(dict.fromkeys((*step.draws, *step.writes)))
        raise UnmovedError(f"{step.name} has a state ({ops})")
    if step.is_unordered:
        raise UnmovedError(f"{step.name} has no order (deterministic=False)")


def _maps(step: Any) -> bool:
    """Return whether a step maps elements, or makes datasets that do."""
    if _is_weighting(step):
        return False
    functions = [function.function for function in step._functions()]
    ops = {op for function in functions for op in op_types(function.graph.as_graph_def())}
    return kind_of(step) in _MAPS or any(_MAP_OP.match(op) for op in ops)


def _require_stateless(dataset: tf.data.Dataset) -> None:
    ops = set(op_types(dataset._map_func.function.graph.as_graph_def()))
    for op in sorted(ops - {*_HARMLESS}):
        definition = op_def_registry.get(op)
        if definition is not None and definition.is_stateful:
            raise UnmovedError(f"{name_of(dataset)} has a state ({op})")


def _all_steps(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for each in inputs_of(dataset):
        yield from _all_steps(each)


def _again(step: Any, elements: tf.data.Dataset) -> tf.data.Dataset:
    """Return other elements, chosen and ordered as a step does it with its own."""
    kind = kind_of(step)
    if kind == "Prefetch":
        return elements.prefetch(_constant(step._buffer_size))
    if kind == "Shuffle":
        return _shuffled_like(step, elements)
    if kind == "Shard":
        return elements.shard(step._num_shards, step._index)
    if kind == "Options":
        return elements.with_options(step.options())
    if kind == "AssertCardinality":
        return _asserted(elements, step.cardinality())
    return getattr(elements, kind.lower())(step._count)


def _constant(number: tf.Tensor) -> int:
    return int(tf.get_static_value(number))


def _asserted(elements: tf.data.Dataset, n_elements: Any) -> tf.data.Dataset:
    return elements.apply(tf.data.experimental.assert_cardinality(n_elements))


def _shuffled_like(step: Any, elements: tf.data.Dataset) -> tf.data.Dataset:
    """Return elements in the orders that a step gives its own, pass by pass.

    Both draw the seeds of passes from one generator, which lives as long as the step. Only the
    serialized step tells its name.
    """
    text = step._as_serialized_graph(external_state_policy=_IGNORED_STATE).numpy()
    nodes = {node.name: node for node in tf.compat.v1.GraphDef.FromString(text).node}
    result = next(node for node in nodes.values() if node.op == "_Retval")
    shuffle = nodes[result.input[0]]
    if shuffle.op != "ShuffleDatasetV3":
        raise UnmovedError(f"shuffle is a {shuffle.op}")
    generator = nodes[shuffle.input[4]].attr["value"].tensor
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=elements._variant_tensor,
        buffer_size=step._buffer_size,
        seed=step._seed,
        seed2=step._seed2,
        seed_generator=tf.io.parse_tensor(generator.SerializeToString(), tf.resource),
        output_types=structure.get_flat_tensor_types(elements.element_spec),
        output_shapes=structure.get_flat_tensor_shapes(elements.element_spec),
        reshuffle_each_iteration=step._reshuffle_each_iteration,
    )
    return tf.data.experimental.from_variant(variant, elements.element_spec)


# Datasets of batches.


@dataclass(frozen=True)
class RowMaps:
    """The steps of a dataset of batches whose maps may run on chosen rows.

    Attributes:
        after: Steps that follow the one that makes the batches, the last one first.
        batch: The step that makes the batches.
        elements: Its rows, and the maps that make them.
    """

    after: tuple[Any, ...]
    batch: Any
    elements: _Elements

    @classmethod
    def of(cls, dataset: tf.data.Dataset) -> RowMaps | None:
        """Return the steps of a dataset; None if no map precedes `batch`.

        Raises:
            UnmovedError: A step of the dataset needs whole batches.
        """
        steps = steps_of(dataset)
        mapping = [name_of(step) for step in _all_steps(dataset) if _maps(step)]
        if not mapping and all(step.name != GENERATOR for step in steps):
            return None
        for step in steps:
            _require_no_state(step)
        after, batch = [], dataset
        while kind_of(batch) in _CHOOSING or _is_weighting(batch):
            after.append(batch)
            batch = inputs_of(batch)[0]
        if kind_of(batch) not in _BATCHES:
            has_batch = any(kind_of(step) in _BATCHES for step in _all_steps(batch))
            why = "follows batch" if has_batch else "is followed by no batch"
            raise UnmovedError(f"{name_of(batch)} {why}")
        elements = _elements_of(inputs_of(batch)[0])
        if not elements.maps and mapping:
            raise UnmovedError(f"{mapping[0]} has maps inside, or after batch")
        if not elements.maps:
            return None
        _require_plain(batch, elements)
        return cls(tuple(after), batch, elements)

    def fingerprint(self) -> int:
        """Return a number that differs if elements or maps may differ, although steps are alike.

        It covers texts in memory, such as names of files; and ops of maps, their constants, and the
        tables in which they look up.
        """
        digests = [zlib.crc32(repr(self.batch.element_spec).encode())]
        for step in _all_steps(self.batch):
            digests += [_digest_of_values(t) for t in getattr(step, "_tensors", ()) if _is_text(t)]
        for function in self.elements.maps:
            graph = function.function.graph.as_graph_def()
            bodies = [graph.node, *(body.node_def for body in graph.library.function)]
            digests += sorted(map(_digest_of_ops, bodies))
            for captured in function.function.captured_inputs:
                if captured.dtype == tf.resource:
                    digests += [
                        _digest_of_table(captured, *types) for types in _table_types(bodies)
                    ]
                elif captured.dtype != tf.variant:
                    digests.append(_digest_of_values(captured))
        return zlib.crc32(repr(digests).encode())

    def on_chosen_rows(
        self,
        choose: Callable[[Any], tuple[Any, Any]],
        n_rows: Callable[[int], int],
        join: Callable[[Any, Any, int | None], Any],
    ) -> tf.data.Dataset:
        """Return batches of chosen rows, one for each batch of the dataset.

        Args:
            choose: Called with a batch of elements before all maps; returns the chosen ones, at
                least one and as many as `n_rows` says, and tensors that describe the batch.
            n_rows: Returns the number of rows chosen of a batch; a last, smaller one has no more.
            join: Called with the mapped rows, the tensors of `choose`, and the rows of the whole
                batch if all batches have as many; returns a named tuple with a field `rows`.
        """
        elements, batch = self.elements, self.batch
        size = _constant(batch._batch_size)
        is_full = bool(tf.get_static_value(batch._drop_remainder))
        of_batches = elements.source.batch(size, drop_remainder=is_full)

        def chosen(*parts: Any) -> Any:
            rows, notes = choose(parts if type(of_batches.element_spec) is tuple else parts[0])
            shape = [tf.shape(tf.nest.flatten(rows)[0])[0]]
            return rows, tf.nest.map_structure(lambda note: tf.fill(shape, note), notes)

        rows = of_batches.map(chosen).unbatch()
        calls = elements.parallel_calls
        rows = rows.map(
            lambda element, notes: (elements.apply(element), notes),
            num_parallel_calls=calls,
            deterministic=None if calls is None else True,
        )
        if elements.prefetched is not None:
            rows = rows.prefetch(elements.prefetched)
        batches = _batched_like(batch, rows, n_rows(size), is_full).map(
            lambda rows, notes: join(
                rows, tf.nest.map_structure(lambda note: note[0], notes), size if is_full else None
            )
        )
        n_batches = batch.cardinality()
        if n_batches != UNKNOWN:  # `unbatch` does not tell
            batches = _asserted(batches, n_batches)
        for step in reversed(self.after):
            batches = _weighted(step, batches) if _is_weighting(step) else _again(step, batches)
        return batches.with_options(self.batch.options())


def _digest_of_ops(nodes: Any) -> int:
    """Return a digest of the ops of a function and of its constants, but of no names."""
    digest = 0
    for node in nodes:
        constant = node.attr["value"].tensor.SerializeToString() if node.op == "Const" else b""
        digest = zlib.crc32(node.op.encode() + constant, digest)
    return digest


def _is_text(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and tensor.dtype == tf.string


def _fingerprints(values: tf.Tensor) -> tf.Tensor:
    """Return an int64 for each row of a tensor."""
    rows = tf.reshape(values, [tf.shape(values)[0] if values.shape.rank else 1, -1])
    return tf.bitcast(tf.fingerprint(rows), tf.int64)


def _digest_of_values(tensor: tf.Tensor) -> int:
    return zlib.crc32(_fingerprints(tensor).numpy().tobytes())


def _table_types(bodies: Any) -> set[tuple[int, int]]:
    """Return the types of keys and values of the tables in which functions look up."""
    lookups = (node for nodes in bodies for node in nodes if node.op == "LookupTableFindV2")
    return {(node.attr["Tin"].type, node.attr["Tout"].type) for node in lookups}


def _digest_of_table(handle: tf.Tensor, key_type: int, value_type: int) -> int:
    """Return a digest of a table's pairs in any order; 0 if its types are others."""
    try:
        keys, values = tf.raw_ops.LookupTableExportV2(
            table_handle=handle, Tkeys=tf.as_dtype(key_type), Tvalues=tf.as_dtype(value_type)
        )
    except tf.errors.InvalidArgumentError:
        return 0
    return int(tf.reduce_sum(_fingerprints(keys) * (2 * _fingerprints(values) + 1)))


def _require_plain(batch: tf.data.Dataset, elements: _Elements) -> None:
    """Require tensors of one shape: of the elements before the maps, and of the rows."""
    if tf.get_static_value(batch._batch_size) is None:
        raise UnmovedError("batch has a size that is no constant")
    for spec in tf.nest.flatten(elements.source.element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
            raise UnmovedError(f"{name_of(elements.source)} gives elements of open shapes")
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(batch.element_spec)):
        raise UnmovedError(f"{name_of(batch)} gives elements that are no dense tensors")
    if kind_of(batch) == "PaddedBatch":
        shapes = [tf.get_static_value(shape) for shape in nest.flatten(batch._padded_shapes)]
        if any(shape is None or (shape < 0).any() for shape in shapes):
            raise UnmovedError("padded_batch pads to the longest row of a batch")


def _batched_like(step: Any, rows: tf.data.Dataset, n_rows: int, is_full: bool) -> Any:
    if kind_of(step) == "PaddedBatch":
        notes = tf.nest.map_structure(lambda _: tf.TensorShape([]), rows.element_spec[1])
        zeros = tf.nest.map_structure(lambda spec: tf.zeros([], spec.dtype), rows.element_spec[1])
        return rows.padded_batch(
            n_rows, (step._padded_shapes, notes), (step._padding_values, zeros), is_full
        )
    return rows.batch(n_rows, is_full, getattr(step, "_num_parallel_calls", None))


def _is_weighting(step: Any) -> bool:
    """Return whether a step adds the weights of classes, as Keras does after `batch`."""
    if kind_of(step) not in _MAPS:
        return False
    return getattr(step._map_func._func, "__module__", "") == tf_dataset_adapter.__name__


def _weighted(step: Any, batches: tf.data.Dataset) -> tf.data.Dataset:
    weigh = step._map_func
    return batches.map(lambda *parts: _with_rows(batches, parts, weigh))


def _with_rows(batches: tf.data.Dataset, parts: Any, function: Any) -> Any:
    batch = parts[0] if len(parts) == 1 else type(batches.element_spec)(*parts)
    return batch._replace(rows=_call(function, batch.rows))
