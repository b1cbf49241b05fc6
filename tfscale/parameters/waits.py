"""Waiting for what is on its way to variables: now, or where a function being traced will run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import control_flow_util

from tfscale.comm.backends.base import Backend, raw_variable
from tfscale.comm.eager import raise_own_errors
from tfscale.config import ExchangeError

Wait = Callable[[Sequence[Any], bool], None]


def wait_for_gathers(backend: Backend) -> Wait:
    """Return what waits until no gather of some variables is under way.

    Args:
        backend: Who gathers.
    """

    def wait(variables: Sequence[Any], is_write: bool) -> None:
        backend.await_variables([raw_variable(v).handle for v in variables], is_write)

    return wait


def wait_now_or_traced(parts: Sequence[tuple[Wait, Sequence[Any]]], is_write: bool) -> None:
    """Wait, now or where the function that is being traced will run.

    Args:
        parts: Ways of waiting, and Keras variables that are waited for in that way.
        is_write: The variables are about to be written, so that errors do not matter.

    Raises:
        ExchangeError: What is waited for failed, or XLA compiles the function.
    """
    if not parts:
        return
    if tf.executing_eagerly():
        raise_own_errors(lambda: [wait(own, is_write) for wait, own in parts])
        return
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, FuncGraph):
        return
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ExchangeError(
            "A function that XLA compiles cannot wait for parameters. Received: jit_compile=True "
            f"for {graph.name}, which reads {parts[0][1][0].path}. Compile with "
            "jit_compile=False, or call and trace it within "
            "tfscale.parameters.futures.plain(model.variables)."
        )
    # Not once per graph: a function that it calls may have posted in between.
    for wait, own in parts:
        wait(own, is_write)
