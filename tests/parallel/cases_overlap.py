"""What is on the wire while layers are computed, shown by layers that wait for it.

Nothing is timed: a layer that waits for a collective which needs that layer's own result would wait
for ever, so that the end of the wait proves the order.
"""

import time
from collections import Counter
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.cases import require_engine, sizes
from tests.helpers.ranks import new_folder
from tfscale.measure.analysis import Key, collectives_before
from tfscale.testing import inspect

require_engine("its events are looked at")

N_STEPS = 3
TIMEOUT_S = 40.0


def until(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT_S
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


class Ended:
    def __init__(self) -> None:
        self._listener = inspect.listen()
        self._counts: Counter[str] = Counter()

    def __call__(self, label: str, step: int) -> bool:
        """Wait until the collective has ended in step number `step`, from 1."""
        return until(lambda: self._count(label) >= step)

    def _count(self, label: str) -> int:
        sent = (event for event in self._listener.take() if event["slot"] >= 0)
        name = inspect.name_of
        self._counts.update(name(int(event["plan"]), int(event["slot"])) for event in sent)
        return sum(n for name, n in self._counts.items() if label in name)


class Gate(keras.layers.Layer):
    """Passes values or errors on when `forward` or `backward`, one of the two, has returned."""

    def __init__(self, forward=None, backward=None) -> None:
        super().__init__()
        self._ways = {"forward": forward, "backward": backward}
        self._n_steps = 0
        self.passed: list[bool] = []

    def _through(self, way: str, tensor: tf.Tensor) -> tf.Tensor:
        wait = self._ways[way]
        if wait is None:
            return tf.identity(tensor)

        def pass_on(value: np.ndarray) -> np.ndarray:
            self._n_steps += 1
            self.passed.append(wait(self._n_steps))
            return value

        return tf.ensure_shape(tf.numpy_function(pass_on, [tensor], tensor.dtype), tensor.shape)

    def call(self, inputs, training=None):
        if not training:
            return inputs

        @tf.custom_gradient
        def gate(x):
            return self._through("forward", x), lambda error: self._through("backward", error)

        return gate(inputs)


def train(layers: list[keras.layers.Layer], strategy) -> None:
    """Train for some steps; what waited in vain shows in the gates."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), *layers])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), exchange=strategy)
    model.compile(optimizer=optimizer, loss="mse")
    tfscale.prepare(model)
    x, y = np.ones((4, 6)), np.ones((4, 3))
    for _ in range(N_STEPS):
        model.train_on_batch(x, y)
    model.get_weights()  # waits for what is under way
    gates = [layer for layer in layers if isinstance(layer, Gate)]
    passed = [flag for gate in gates for flag in gate.passed]
    assert passed == [True] * (N_STEPS * len(gates)), passed


def dense(units: int, name: str) -> keras.layers.Layer:
    return keras.layers.Dense(units, name=name)


@sizes(2, 3, timeout_s=240)
def case_chunk_1_is_through_before_the_gradients_of_chunk_2_exist():
    ended = Ended()
    gate = Gate(backward=lambda step: ended("middle/kernel", step))
    layers = [dense(5, "first"), gate, dense(4, "middle"), dense(3, "last")]
    train(layers, tfscale.Chunked(first_chunk_layers=2))


def rank_0_comes_last() -> tuple[Callable[[int], bool], Callable[[int], bool]]:
    """Return two gates: at the first one rank 0 waits until the others have passed the second."""
    folder = new_folder()

    def come_last(step: int) -> bool:
        others = range(1, tfscale.size()) if tfscale.rank() == 0 else ()
        return until(lambda: all((folder / f"{step}-{rank}").exists() for rank in others))

    def tell(step: int) -> bool:
        (folder / f"{step}-{tfscale.rank()}").touch()
        return True

    return come_last, tell


STRATEGIES = (
    tfscale.Chunked(first_chunk_layers=1, replicated_dense=2),
    tfscale.Sharded(dense="replicated"),
    tfscale.Sharded(dense="partial"),
)


@sizes(2, 3, timeout_s=240)
def case_activations_are_there_before_back_propagation_comes():
    """Rank 0 sends its own when the others have computed the later layers, which do not wait."""
    for strategy in STRATEGIES:
        ended = Ended()
        come_last, tell = rank_0_comes_last()
        after = Gate(backward=lambda step, ended=ended: ended("wide activations", step))
        layers = [Gate(forward=come_last), dense(5, "wide"), after, dense(4, "next")]
        train([*layers, Gate(forward=tell), dense(3, "last")], strategy)


@sizes(2, 3, timeout_s=240)
def case_output_gradients_are_there_before_earlier_gradients_exist():
    """They wait for no gradient, though later layers send gradients before."""
    for strategy in STRATEGIES:
        ended = Ended()
        before = Gate(backward=lambda step, ended=ended: ended("wide output gradients", step))
        train([dense(7, "early"), before, dense(5, "wide"), dense(3, "last")], strategy)


_SENDS_ACTIVATIONS = ("TfscaleAllgather", "TfscaleAlltoall")


class OwnDense(keras.layers.Dense):
    pass


def awaited_before(op: tf.Operation) -> set[int]:
    """Return the ids of the handles of variables that an op, or what it needs, waits for."""
    outer = {id(inner): id(handle) for handle, inner in op.graph.captures}
    found, seen, rest = set(), set(), [op]
    while rest:
        one = rest.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.type == "TfscaleAwait":
            found |= {outer[id(tensor)] for tensor in one.inputs}
        rest += [*(tensor.op for tensor in one.inputs), *one.control_inputs]
    return found


def kind(key: Key) -> str:
    """Return whose collective it is: of gradients, parameters, or the layer "wide"."""
    name = inspect.name_of(key.plan, key.slot)
    return next(word for word in ("parameters", "wide", "gradients") if word in name)


@sizes(2, 3, timeout_s=120)
def case_streams_do_not_wait_for_each_other():
    """Gradients, activations, output gradients; nor activations for parameters of their layer."""
    for route in ("replicated", "partial"):
        layers = [OwnDense(7, name="early"), dense(5, "wide"), OwnDense(3, name="last")]
        listener = inspect.listen()
        train(layers, tfscale.Sharded(dense=route, bucket_mb=0))
        plans = {int(e["plan"]) for e in listener.take() if e["plan"] >= 0 and e["slot"] >= 0}
        (graph,) = {inspect.graph_of(plan) for plan in plans}
        before = {k: v for k, v in collectives_before(graph).items() if k.slot >= 0}
        # Gradients of two layers; activations, output gradients; parameters, rows with their bias.
        assert len(before) == 4 + 2 + (5 if route == "partial" else 6), before
        for key, needed in before.items():
            assert kind(key) == "parameters" or {kind(k) for k in needed} <= {kind(key)}, key
        (op, *_) = [op for op in graph.get_operations() if op.type in _SENDS_ACTIVATIONS]
        handles = {v.path: id(v._value.handle) for layer in layers for v in layer.variables}
        waits = {path for path, handle in handles.items() if handle in awaited_before(op)}
        assert {path.split("/")[-2] for path in waits} == {"early"}, waits
