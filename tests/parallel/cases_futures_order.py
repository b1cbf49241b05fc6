"""Forward passes begin while gathers are under way."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import shared_folder
from tests.helpers.spawn import sizes
from tests.parallel.futures_model import Subject, X
from tfscale import futures, runtime
from tfscale.backends.variables import raw_variable


class Gate:
    """Ops at which a rank says that it has come so far, or waits for others that do.

    Attributes:
        awaited: Files to wait for.
        told: Files that say it.
    """

    def __init__(self) -> None:
        """Start open."""
        self.awaited: list[Path] = []
        self.told: list[Path] = []

    def wait(self, value):
        """Pass a number on when all files exist; the order is then the one that is to be seen."""
        deadline = time.monotonic() + 30
        while not all(f.exists() for f in self.awaited) and time.monotonic() < deadline:
            time.sleep(0.01)
        return value

    def tell(self, value):
        """Make the files, and pass a tensor on."""
        for file in self.told:
            file.touch()
        return value


@sizes(2, 3)
def case_the_next_call_begins_before_the_last_gather_has_ended():
    """One rank keeps back the gather of the last layer until the others have computed layer 1."""
    subject = Subject()
    model, posts, backend = subject.model, subject.posts, runtime.backend()
    gate, graphs = Gate(), []

    @tf.function
    def step(number):
        posts.post_one(posts.layouts[0], number)
        graphs.append(tf.compat.v1.get_default_graph())
        posts.post_one(posts.layouts[-1], tf.py_function(gate.wait, [number], tf.float32))

    @tf.function
    def forward(plan):
        hidden = model.layers[0](X)
        with tf.control_dependencies([tf.py_function(gate.tell, [hidden], tf.float32)]):
            backend.stamp([raw_variable(model.layers[0].embeddings).handle], plan, -1)
        return model(X)

    step(tf.constant(0.0))
    plan = next(p for p in range(1000) if backend.graph_of(p) is graphs[0])
    for late in range(tfscale.size()):
        futures.drain(model.variables)
        backend.event_array()
        with shared_folder() as folder:
            is_late = tfscale.rank() == late
            gate.told = [folder / str(tfscale.rank())]
            others = [folder / str(r) for r in range(tfscale.size()) if r != late]
            gate.awaited = others if is_late else []
            step(tf.constant(1.0))
            np.testing.assert_allclose(forward(plan), model(X), rtol=1e-6)
        events = [e for e in backend.event_array() if e["plan"] == plan]
        ended = {int(e["slot"]): int(e["ended_ns"]) for e in events}
        assert sorted(ended) == [-1, 0, 1], events
        assert ended[-1] > ended[0]
        if not is_late:
            assert ended[-1] < ended[1], ended
