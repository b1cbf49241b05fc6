"""Traced functions: data attached to their graphs, and private TensorFlow names to inspect them.

Checked with TensorFlow 2.18 and 2.21: `FuncGraph.outer_graph`, `ControlFlowFuncGraph`,
`control_flow_util.GraphOrParentsInXlaContext`, `FunctionCache`, `polymorphic_function.Function`
(`_function_cache`, `_lock`, `_created_variables`, `_variable_creation_config`,
`_no_variable_creation_config`); `ag_error_metadata` of errors in functions that AutoGraph converts.
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
        places = [line for line in lines if line.startswith('File "') and _is_users(line)]
        texts = [line for line in lines if line and not line.startswith(_STACK)]
    else:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f'File "{f.filename}", line {f.lineno}: {f.line}' for f in frames]
        places, texts = list(filter(_is_users, places)), [str(error).strip()]
    place = f" ({places[-1]})" if places else ""
    return f"{type(error).__name__}: {' '.join(texts).rstrip('.')}{place}"


def _is_users(place: str) -> bool:
    return not any(folder in place for folder in ("site-packages", _HERE))


_STACK = ("File ", "Graph execution error", "Detected at node", "[[{{node", "<stack traces")
_HERE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
