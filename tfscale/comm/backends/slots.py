"""Plans and slots of collectives: the one place that decides their order."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfscale.comm.backends.base import Call
from tfscale.config import ExchangeError, PlanError
from tfscale.internals.trace import is_compiled_by_xla, is_function

EAGER = -1
COUNT = re.compile(r"_\d+(?=\W|_|$)")  # number that a process appends to repeated names


class Position(NamedTuple):
    """Plan id and slot number; plan `EAGER` outside of traced functions."""

    plan: int
    slot: int


class Slots:
    """Gives each collective of a traced function a slot of its own, in the order of tracing.

    Tracing runs the same Python code on every rank, so the order is the same everywhere, and it
    is one that the graph's own dependencies allow. A function graph has a plan per group for
    gradients (which start when they are ready) and one for all other collectives, so that a
    gradient never waits for a collective that was merely traced before it.
    """

    def __init__(self, number: Callable[..., int]) -> None:
        # Returns the number of a new plan or slot. It is called as ("plan_create", group, title,
        # is_patient) or ("plan_add_slot", plan, label, signature), see custom_ops/comm/c_api.h.
        self._number = number
        self._names: dict[Position, str] = {}
        self._plans: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def place(self, call: Call, kind: str, tensors: list[tf.Tensor]) -> Position:
        """Return the position of a collective; `EAGER` where it runs in the order of the calls.

        `kind` is its name with further text that must be equal on all ranks, as must be the dtypes
        and static shapes of `tensors`. Raises PlanError for an eager call outside of the main
        thread, and ExchangeError in a function that XLA compiles.
        """
        if tf.executing_eagerly():
            if threading.current_thread() is not threading.main_thread():
                raise PlanError(
                    f"{call.label} must be called from the main thread, where all ranks have the "
                    f"same order. Received: a call on {threading.current_thread().name}. Call it "
                    "from the main thread, or inside a tf.function that one thread calls at a "
                    "time."
                )
            return Position(EAGER, 0)
        graph = tf.compat.v1.get_default_graph()
        if is_compiled_by_xla(graph):
            raise ExchangeError(
                "jit_compile must be False where collectives run. Received: jit_compile=True "
                f"for {call.label}. Compile with jit_compile=False, or let "
                "tfscale.prepare(model) or any tfscale callback do it where it is 'auto'."
            )
        plan = self._plan_of(graph, call)
        texts = [f"{kind} {call.label}".replace("\n", " "), _signature(call, kind, tensors)]
        slot = self._number("plan_add_slot", plan, *(text.encode() for text in texts))
        self._names[Position(plan, slot)] = call.label
        return Position(plan, slot)

    def name(self, plan: int, slot: int) -> str:
        """Return the label of a slot, for timelines."""
        return self._names.get(Position(plan, slot), "eager collective")

    def graph_of(self, plan: int) -> tf.Graph | None:
        """Return the function graph of a plan; None where it is no longer in use."""
        return next((g for g, plans in list(self._plans.items()) if plan in plans.values()), None)

    def _plan_of(self, graph: tf.Graph, call: Call) -> int:
        plans = self._plans.setdefault(graph, {})
        stream = call.stream or ("gradients" if call.after else "calls")
        if not is_function(graph):  # of a TF 1 session: it may grow after it has run
            stream = f"{stream} {len(plans)}"
        key = (call.group.id, stream)
        if key not in plans:
            # Graph names carry a number that counts functions of the process, which may differ.
            name = getattr(graph, "name", "graph").rsplit("__", 1)[0]
            name = COUNT.sub("", name).rstrip("_0123456789")
            title = f"{name} ({stream})".encode()
            plans[key] = self._number("plan_create", call.group.id, title, call.is_patient)
        return plans[key]


def _signature(call: Call, kind: str, tensors: list[tf.Tensor]) -> str:
    """Return the text that must be equal on all ranks, with a line for each named tensor."""
    kind = f"{kind} {call.terms}" if call.terms else kind
    inputs = [f"{t.dtype.name}{t.shape}" for t in tensors]
    if call.names and tensors:
        lines = [f"{n} {text}" for n, text in zip(call.names, inputs, strict=True)]
        lines.append(kind)  # last: it may hold numbers that follow from their shapes
    else:
        lines = [" ".join([kind, call.label, *inputs])]
    # Keras numbers layers by a count of the process, which may differ between ranks.
    return "\n  ".join(COUNT.sub("", line).replace("\n", " ") for line in lines)
