"""Whoever reads a layer between two steps sees it updated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.spawn import engine_only, sizes
from tests.parallel import futures_model
from tests.parallel.cases_chunked import mlp
from tests.parallel.cases_equality import OPTIMIZERS, float64
from tests.parallel.delayed_model import Pair, due, layers_of
from tests.parallel.futures_model import flatten
from tests.parallel.parameter_reads import WAYS
from tfscale.comm import runtime

X, Y = np.linspace(-1, 1, 24).reshape(4, 6), np.linspace(0, 1, 12).reshape(4, 3)


def saved(model: keras.Model) -> list[np.ndarray]:
    """Return weights and state from a file."""
    with TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        loaded = keras.models.load_model(Path(folder) / "model.keras")
    return [v.numpy() for v in [*loaded.variables, *loaded.optimizer.variables]]


def checkpointed(model: keras.Model) -> list[np.ndarray]:
    """Return weights and state from a checkpoint of TensorFlow."""
    with TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        reader = tf.train.load_checkpoint(saved.write(f"{folder}/checkpoint"))
        names = sorted(n for n in reader.get_variable_to_shape_map() if "save_counter" not in n)
        return [reader.get_tensor(n) for n in names if "VARIABLE_VALUE" in n]


def overwritten(model: keras.Model) -> list[np.ndarray]:
    """Assign to weights and state; the rest is updated nevertheless."""
    slots = [v for v in model.optimizer.variables if v.shape == (6, 12)]
    slots[-1].assign(np.full((6, 12), 0.25))
    model.layers[1].kernel.assign(model.layers[1].kernel * 0.5)
    return model.get_weights()


def reset(model: keras.Model) -> list[np.ndarray]:
    """Assign to all weights at once."""
    model.set_weights([w + 0.1 for w in model.get_weights()])
    return model.get_weights()


ACTIONS: dict[str, Callable[[keras.Model], Any]] = {
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "state": lambda model: [v.numpy() for v in model.optimizer.variables],
    "save": saved,
    "checkpoint": checkpointed,
    "assign": overwritten,
    "set_weights": reset,
}


@engine_only("its events are looked at")
@sizes(2, 3, timeout_s=240)
def case_reads_between_steps():
    """One after another in one run, which goes on as if all were updated in their steps."""
    traced: dict[int, Callable[[], Any]] = {}

    def trace(model: keras.Model) -> None:
        traced[id(model)] = tf.function(lambda: model(X))
        traced[id(model)]()
        model.evaluate(X, Y, verbose=0)

    actions = {**ACTIONS, "traced before": lambda model: traced[id(model)]()}
    with float64():
        pair = Pair(mlp(), OPTIMIZERS["adam"], before=trace)
        trace(pair.twin)
        for name, act in actions.items():
            pair.step()
            assert due(pair.optimizer) == [True, True], name
            runtime.backend().take_events()
            found = [flatten(act(model)) for model in (pair.model, pair.twin)]
            assert not runtime.backend().take_events(), name
            for mine, single in zip(*found, strict=True):
                np.testing.assert_allclose(mine, single, rtol=1e-9, atol=1e-9, err_msg=name)
            assert due(pair.optimizer) == [False, False], name
        pair.step(2)
        pair.check()


@sizes(2, timeout_s=300)
def case_every_way_of_reading():
    rule = lambda: keras.optimizers.SGD(1e-3, momentum=0.5)  # noqa: E731
    pair = Pair(futures_model.build, rule)
    for name, read in WAYS.items():
        pair.step()
        assert due(pair.optimizer) == [True, True], name
        found = [flatten(read(model)) for model in (pair.model, pair.twin)]
        for mine, single in zip(*found, strict=True):
            np.testing.assert_allclose(mine, single, rtol=1e-3, atol=1e-4, err_msg=name)


@sizes(2, timeout_s=120)
def case_layers_wait_for_their_own_update_only():
    """In the graph of a forward pass, the first layer does not depend on the second's update."""
    pair = Pair(mlp(), OPTIMIZERS["momentum"], has_twin=False)
    pair.step()
    forward = tf.function(lambda x: pair.model(x)).get_concrete_function(tf.constant(X, "float32"))
    products = [
        op for op in forward.graph.get_operations() if op.type in ("MatMul", "BatchMatMulV2")
    ]
    updates = [layer._flush.name.decode() for layer in layers_of(pair.optimizer)]
    needed = [
        {op.get_attr("f").name for op in ancestors(product) if op.type.endswith("PartitionedCall")}
        for product in products[:2]
    ]
    assert [sorted(names) for names in needed] == [[updates[0]], sorted(updates)], needed


def ancestors(op: tf.Operation) -> set[tf.Operation]:
    """Return all that an op waits for."""
    found: set[tf.Operation] = set()
    stack = [op]
    while stack:
        current = stack.pop()
        before = [*current.control_inputs, *(tensor.op for tensor in current.inputs)]
        stack += [other for other in before if other not in found]
        found.update(before)
    return found
