"""Traced functions that are to be traced anew, because what they read has changed its nature."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from tensorflow.core.function.polymorphism.function_cache import FunctionCache
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function


def drop_traces(variables: Sequence[Any]) -> list[str]:
    """Let every tf.function that was traced with some variables be traced anew when called next.

    TensorFlow knows no such call: the functions are found among all objects of the process.

    Args:
        variables: TensorFlow variables.

    Returns:
        The names of the functions.
    """
    handles = {id(v.handle) for v in variables}
    dropped = []
    for thing in gc.get_objects():
        # Not isinstance, which some proxies answer by importing or computing something.
        if type(thing) is not Function:
            continue
        # `_list_all_concrete_functions` would trace those that have an input signature.
        if any(_captures(concrete, handles) for concrete in thing._function_cache.values()):
            with thing._lock:
                thing._created_variables = None
                thing._variable_creation_config = None
                thing._no_variable_creation_config = None
                thing._function_cache = FunctionCache()
            dropped.append(thing.name)
    return sorted(dropped)


def _captures(concrete: Any, handles: set[int]) -> bool:
    return any(id(tensor) in handles for tensor in concrete.captured_inputs)
