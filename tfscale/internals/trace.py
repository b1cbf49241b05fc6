"""Traced functions: data attached to their graphs, and private TensorFlow names to inspect them.

Checked with TensorFlow 2.18 and 2.21: `FuncGraph.outer_graph`, `FuncGraph.capture`,
`ControlFlowFuncGraph`,
`control_flow_util.GraphOrParentsInXlaContext`, `FunctionCache`, `polymorphic_function.Function`
(`_function_cache`, `_lock`, `_created_variables`, `_variable_creation_config`,
`_no_variable_creation_config`), `Tensor._handle_data`, `device_lib.list_local_devices`;
`ag_error_metadata` of errors in functions that AutoGraph converts.
"""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.core.function.polymorphism.function_cache import FunctionCache
from tensorflow.python.client import device_lib
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph


@dataclass
class TraceContext:
    """Data attached to one traced function, kept as long as its graph."""

    # Uses of the weights of dense layers in the function, by `id` of the weight.
    uses: dict[int, set[str]] = field(default_factory=dict)
    # Gradients computed by the calls of dense layers: name of the tensor to `id` of the weight.
    # Names, because tensors would keep their graph alive.
    made: dict[str, int] = field(default_factory=dict)
    # How tensors came to have several rows for each sample, by name: see `block_layout`.
    layouts: dict[str, str | None] = field(default_factory=dict)


_contexts: weakref.WeakKeyDictionary[tf.Graph, TraceContext] = weakref.WeakKeyDictionary()


def context_of(graph: tf.Graph) -> TraceContext:
    """Return the `TraceContext` of a graph, made at the first call."""
    return _contexts.setdefault(graph, TraceContext())


def current_graph() -> tf.Graph | None:
    """Return the graph of the function being traced; None while executing eagerly."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def outer_graphs(graph: tf.Graph) -> Iterator[tf.Graph]:
    """Yield the graphs of the functions around one, innermost first."""
    outer = getattr(graph, "outer_graph", None)
    while outer is not None:
        yield outer
        outer = getattr(outer, "outer_graph", None)


def runs_once_per_step() -> bool:
    """Return whether a function is being traced, outside of branches and loops."""
    graph = current_graph()
    return graph is not None and not isinstance(graph, ControlFlowFuncGraph)


def is_function(graph: tf.Graph | None) -> bool:
    """Return whether a graph is that of a traced function."""
    return isinstance(graph, FuncGraph)


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Return whether XLA compiles a graph or an outer graph."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def run_either(condition: tf.Tensor, yes: Callable[[], None], no: Callable[[], None]) -> None:
    """Run one of two bodies, now or as branches of the function being traced."""
    if tf.executing_eagerly():
        (yes if bool(condition) else no)()
        return

    def branch(body: Callable[[], None]) -> tf.Tensor:
        body()
        return tf.constant(0)

    tf.cond(condition, lambda: branch(yes), lambda: branch(no))


# How tensors of a function were made.


def joins_scalars(values: tf.Tensor) -> bool:
    """Return whether a tensor was made of numbers, such as losses; False of an eager tensor."""
    if hasattr(values, "numpy"):
        return False
    waiting = [values]
    seen: set[str] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor.op.type == "Pack" and tensor.op.inputs[0].shape.rank == 0:
            return True
        # Ops whose result has the same values, changed one by one.
        same = [item for item in tensor.op.inputs if item.shape == tensor.shape]
        waiting.extend(item for item in same if item.name not in seen)
        seen.update(item.name for item in same)
    return False


def block_layout(values: tf.Tensor) -> str | None:
    """Return how a tensor, or one of which this is the shape, came to have k rows for each sample.

    Returns:
        "blocks" if rows of the batch were joined, as by `concat([fake, real], 0)` and `tile`;
        "repeated" if several rows follow each other for one sample, as after `repeat`, or where a
        reshape merged the first two axes; None if neither is seen, and of an eager tensor.
    """
    if hasattr(values, "numpy"):
        return None
    layouts = context_of(values.graph).layouts
    waiting = [values]
    while waiting:
        tensor = waiting[-1]
        if tensor.name not in layouts:
            layout = _layout_made_by(tensor)
            layouts[tensor.name] = layout  # also where the graph has a circle
            if layout is None:
                waiting.extend(item for item in tensor.op.inputs if item.name not in layouts)
            continue
        waiting.pop()
        if layouts[tensor.name] is None:
            of_inputs = {layouts.get(item.name) for item in tensor.op.inputs}
            present = [layout for layout in ("blocks", "repeated") if layout in of_inputs]
            layouts[tensor.name] = present[0] if present else None
    return layouts[values.name]


def note_shape(shape: tf.Tensor, tensor: tf.Tensor) -> None:
    """Record that one tensor is the shape of another, which a constant does not tell."""
    if not hasattr(shape, "numpy") and not hasattr(tensor, "numpy"):
        layout = block_layout(tensor)
        if layout is not None:
            context_of(shape.graph).layouts[shape.name] = layout


def _layout_made_by(tensor: tf.Tensor) -> str | None:
    op, rank = tensor.op, tensor.shape.rank
    if not rank or (rank == 1 and tensor.dtype.is_integer):  # numbers and shapes
        return None
    if op.type == "ConcatV2" and tf.get_static_value(op.inputs[-1]) in (0, -rank):
        return "blocks"
    if op.type == "Tile":
        multiples = tf.get_static_value(op.inputs[1], partial=True)
        return None if multiples is not None and multiples[0] == 1 else "blocks"
    if op.type == "Reshape":
        before = op.inputs[0].shape
        is_merged = before.rank == rank + 1 and tuple(before[2:]) == tuple(tensor.shape[1:])
        return "repeated" if is_merged else None
    return None


# How a function changes variables.

_SAME = ("Identity", "StopGradient", "EnsureShape", "Reshape", "Squeeze", "CheckNumerics")
_ADDED = {"AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterAdd", "ResourceScatterSub"}
# Ops on a variable that do not change it.
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}


def probe(update: Callable[..., Any], args: Any, kwargs: Any) -> tf.Graph:
    """Return the graph of a call that is traced, and not run, with tensors like those given."""
    graph = FuncGraph("probe")
    with graph.as_default():

        def placeholder(value: Any) -> Any:
            if not tf.is_tensor(value):
                return value
            return tf.compat.v1.placeholder(value.dtype, value.shape)

        args, kwargs = tf.nest.map_structure(placeholder, (args, kwargs))
        update(*args, **kwargs)
    return graph


def changes_of(graph: tf.Graph, first_op: int, variables: Sequence[Any]) -> list[str]:
    """Return how the ops of a function change each of some variables, from one op on.

    Returns:
        For each variable "sum", if amounts are added that depend on none of the variables; "max" or
        "min", if the variable is compared with the largest or smallest of values that do not
        depend on them; "none" without a change; "other" for all else.
    """
    ops = graph.get_operations()[first_op:]
    handles = [graph.capture(variable.handle).name for variable in variables]
    return [_change_of(ops, handle, set(handles)) for handle in handles]


def _change_of(ops: Sequence[tf.Operation], handle: str, handles: set[str]) -> str:
    changes = set()
    dependent: dict[str, bool] = {}

    def depends(tensor: tf.Tensor) -> bool:
        """Return whether a tensor depends on one of the variables."""
        waiting = [tensor]
        seen = set()
        while waiting:
            each = waiting.pop()
            if each.name in seen or dependent.get(each.name) is False:
                continue
            seen.add(each.name)
            if each.name in handles or dependent.get(each.name):
                dependent[tensor.name] = True
                return True
            waiting.extend(each.op.inputs)
        dependent.update(dict.fromkeys(seen, False))
        return False

    def is_same(op: tf.Operation) -> bool:
        """Return whether an op returns its first input, except for its shape and precision."""
        if op.type != "Cast":
            return op.type in _SAME
        kinds = op.inputs[0].dtype, op.outputs[0].dtype
        return kinds[1].is_floating or all(kind.is_integer for kind in kinds)

    def is_extreme(tensor: tf.Tensor, kind: str) -> bool:
        """Return whether a tensor is the largest or smallest value along the first axis."""
        while is_same(tensor.op):
            tensor = tensor.op.inputs[0]
        if tensor.op.type != kind:
            return False
        axes = tf.get_static_value(tensor.op.inputs[1])
        rank = tensor.op.inputs[0].shape.rank
        return axes is not None and (0 in axes.ravel() or (rank and -rank in axes.ravel()))

    def of(tensor: tf.Tensor) -> str:
        """Return the change by assigning a tensor: that of the variable's value is "none"."""
        op = tensor.op
        inputs = list(op.inputs)
        if op.type == "ReadVariableOp" and inputs[0].name == handle:
            return "none"
        if is_same(op):
            return of(inputs[0])
        if op.type in ("AddV2", "Add", "AddN", "Sub"):
            terms = [item for item in inputs if depends(item)]
            if len(terms) != 1 or (op.type == "Sub" and terms[0] is not inputs[0]):
                return "other"
            return _either({of(terms[0]), "sum"})
        if op.type in ("TensorScatterAdd", "TensorScatterSub"):
            is_free = not any(map(depends, inputs[1:]))
            return _either({of(inputs[0]), "sum"}) if is_free else "other"
        if op.type in ("Select", "SelectV2") and not depends(inputs[0]):
            return _either({of(item) for item in inputs[1:]})
        if op.type in ("Maximum", "Minimum"):
            terms = [item for item in inputs if depends(item)]
            rest = [item for item in inputs if not depends(item)]
            kind = op.type[:3]
            if len(terms) == 1 and is_extreme(rest[0], kind):
                return _either({of(terms[0]), kind.lower()})
        return "other"

    for op in ops:
        inputs = list(op.inputs)
        if not any(item.name == handle for item in inputs) or op.type in _READS:
            continue
        if op.type == "AssignVariableOp":
            changes.add(of(inputs[1]))
        elif op.type in _ADDED and not any(map(depends, inputs[1:])):
            changes.add("sum")
        else:
            changes.add("other")
    return _either(changes)


def _either(changes: set[str]) -> str:
    kinds = changes - {"none"}
    return "none" if not kinds else kinds.pop() if len(kinds) == 1 else "other"


def drop_traces(variables: Sequence[Any]) -> list[str]:
    """Make every tf.function that captures some variables re-trace at its next call.

    TensorFlow has no API for this, so the functions are searched among all objects of the process.
    Concrete functions that a user keeps are not changed. Returns the names of the functions.
    """
    handles = {id(v.handle) for v in variables}
    dropped = []
    for thing in gc.get_objects():
        # Not isinstance: it makes some proxies import or compute something.
        if type(thing) is not Function:
            continue
        # `_list_all_concrete_functions` would trace functions with an input signature.
        concrete = thing._function_cache.values()
        if any(id(tensor) in handles for each in concrete for tensor in each.captured_inputs):
            with thing._lock:
                thing._created_variables = None
                thing._variable_creation_config = None
                thing._no_variable_creation_config = None
                thing._function_cache = FunctionCache()
            dropped.append(thing.name)
    return sorted(dropped)


def captured_variables(concrete: Any) -> list[tuple[tf.Tensor, tf.DType]]:
    """Return handle and dtype of each variable that a concrete function reads or assigns.

    Variables of functions that it calls are among them. Other resources, such as tables, are not.
    """
    captured = []
    for tensor in concrete.captured_inputs:
        if tensor.dtype == tf.resource:
            data = tensor._handle_data
            if data is not None and data.is_set and data.shape_and_type:
                captured.append((tensor, tf.as_dtype(data.shape_and_type[0].dtype)))
    return captured


def ops_of(concrete: Any) -> set[str]:
    """Return the types of all ops of a concrete function and of the functions that it calls."""
    definition = concrete.graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    return {node.op for nodes in (definition.node, *functions) for node in nodes}


def memory_limit(device: str) -> int:
    """Return the bytes that TensorFlow may use of a device, such as "/device:GPU:0"."""
    return {d.name: d.memory_limit for d in device_lib.list_local_devices()}[device]


def set_attribute(op: tf.Operation, name: str, text: str) -> None:
    """Give an op of a graph an attribute of one's own."""
    op._set_attr(name, tf.compat.v1.AttrValue(s=text.encode()))


def text_with_place(error: Exception) -> str:
    """Return class and text of an error, with the line of the user's code that raised it."""
    converted = getattr(error, "ag_error_metadata", None)
    if converted is not None:  # names the lines of the source, not of what AutoGraph made of it
        return str(converted.get_message()).strip().rstrip(".")
    if isinstance(error, tf.errors.OpError):  # its message holds the stack of the op
        lines = [line.strip() for line in error.message.splitlines()]
        code_lines = [line for line in lines if line.startswith('File "') and _is_users(line)]
        texts = [line for line in lines if line and not line.startswith(_STACK)]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        code_lines = [f'File "{f.filename}", line {f.lineno}: {f.line}' for f in frames]
        code_lines, texts = list(filter(_is_users, code_lines)), [str(error).strip()]
    where = f" ({code_lines[-1]})" if code_lines else ""
    return f"{type(error).__name__}: {' '.join(texts).rstrip('.')}{where}"


def _is_users(code_line: str) -> bool:
    return not any(folder in code_line for folder in ("site-packages", _HERE))


_STACK = ("File ", "Graph execution error", "Detected at node", "[[{{node", "<stack traces")
_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
