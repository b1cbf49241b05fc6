"""Marks in a traced step: when the update of which variables is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import raw_variable
from tfscale.comm.events import has_events
from tfscale.measure.analysis import has_slot

_STAMP = "TfscaleStamp"


def stamp_updates(variables: Sequence[Any]) -> None:
    """Record when variables are updated: a stamp per exchanged bucket, and one for the rest.

    Called behind the update, while a step is traced. A stamp is ordered behind the last use of its
    variables and behind nothing else. It shows that computation went on while collectives were
    under way whose results it does not need; see `tfscale.measure.analysis`.

    Args:
        variables: Keras variables that an optimizer has updated.
    """
    if tf.executing_eagerly() or runtime.is_single() or not has_events():
        return
    graph = tf.compat.v1.get_default_graph()
    own = {
        handle.name: handle for handle in (graph.capture(raw_variable(v).handle) for v in variables)
    }
    ops = [op for op in graph.get_operations() if has_slot(op)]
    n_stamps = sum(op.type == _STAMP for op in ops)
    if not ops:
        return
    groups = []
    for op in ops:
        handles = [t for t in op.inputs if t.dtype == tf.resource and t.name in own]
        if handles and op.type != _STAMP:
            groups.append([own.pop(handle.name) for handle in handles])
    plan = int(ops[0].get_attr("plan"))
    engine: Any = runtime.backend()
    for handles in filter(None, [*groups, list(own.values())]):
        n_stamps += 1
        engine.stamp(handles, plan, -n_stamps)
