"""Horovod's ops made safe for traced functions: unique names, and nothing folded or pruned."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.backends.base import Call
from tfscale.backends.slots import COUNT, EAGER, Slots

# Starts an op on guarded inputs under a name; returns its outputs.
Start = Callable[[list[tf.Tensor], str | None], Sequence[tf.Tensor]]


class _PlanNumbers:
    """Counts plans and slots where `Slots` would ask the engine's library."""

    def __init__(self) -> None:
        self._n_plans: dict[int, int] = {}
        self._n_slots: list[int] = []
        self.titles: list[str] = []

    def call(self, name: str, *arguments: Any) -> int:
        """Answer "plan_create" (group, title) and "plan_add_slot" (plan, name, signature)."""
        if name == "plan_create":
            group = arguments[0]
            number = self._n_plans.get(group, 0)
            self._n_plans[group] = number + 1
            self.titles.append(f"g{group}.p{number}")
            self._n_slots.append(0)
            return len(self.titles) - 1
        plan = arguments[0]
        self._n_slots[plan] += 1
        return self._n_slots[plan] - 1


class NamedOps:
    """Runs Horovod's ops, which find their counterparts on other ranks by name.

    Horovod's ops are stateless, and TensorFlow may compute a stateless op before the first step
    when its input is constant, merge two of them, or drop one whose result only some ranks use;
    the other ranks would then wait for ever. So each input passes an op whose result is known when
    it runs, each op carries an attribute of its own, and a stateful op behind it keeps it alive.
    Names number the traced functions of a group and the collectives in them, in the order of
    tracing, which is equal on all ranks.
    """

    def __init__(self) -> None:
        """Start without any name."""
        self._numbers = _PlanNumbers()
        self._slots = Slots(self._numbers)  # type: ignore[arg-type]

    def run(self, call: Call, inputs: Sequence[tf.Tensor], start: Start) -> list[tf.Tensor]:
        """Run an op, or place it in the function that is being traced.

        Args:
            call: Group and label. Without `after` it waits for the calls traced before it.
            inputs: Tensors; integers that only say how much is sent (splits) included.
            start: Makes the op.

        Returns:
            The op's outputs.

        Raises:
            PlanError: An eager collective is called outside of the main thread.
            ExchangeError: XLA compiles the function.
        """
        position = self._slots.place(call, "", [])
        if position.plan == EAGER:
            return list(start(list(inputs), None))
        label = COUNT.sub("", call.label)
        words = (self._numbers.titles[position.plan], f"s{position.slot}", label)
        name = re.sub(r"[^A-Za-z0-9_.-]", ".", "tfscale." + ".".join(words))
        with tf.control_dependencies([] if call.after else [_marker()]):
            outputs = list(start([_unknown_until_run(t) for t in inputs], name))
        slot = tf.compat.v1.AttrValue(s=name.encode())
        outputs[0].op._set_attr("_tfscale_slot", slot)
        _keep(outputs[0])
        return outputs


def _unknown_until_run(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor, without a copy, as one that TensorFlow cannot know ahead.

    What depends on constants alone is computed while a function is made ready to run. A rank that
    owns nothing of a bucket would gather its constant nothing there, before its first step, and
    wait for ranks whose gather is part of the step, which this rank then never begins. Control
    edges and PlaceholderWithDefault do not prevent it, nor does a shape, which TensorFlow infers.
    A slice that begins where a stateful op says does. Random ops are stateful and yet not chained
    in the order of tracing, which would end overlap.
    """
    with tf.device("CPU:0"):
        no_dimensions = tf.zeros([0], tf.int32)
        zero = tf.raw_ops.RandomUniformInt(shape=no_dimensions, minval=0, maxval=1, seed=1, seed2=1)
    if tensor.shape.rank == 0:
        return tf.stack([tensor])[zero]
    unknown = tensor[zero:]
    unknown.set_shape(tensor.shape)
    return unknown


def _marker() -> tf.Operation:
    """Make a small stateful op: TensorFlow keeps those, in the order of tracing."""
    with tf.device("CPU:0"):
        return tf.timestamp().op


def _keep(tensor: tf.Tensor) -> None:
    """Let a stateful op read one number of a tensor: behind a control edge alone it is dropped."""
    first = tf.reshape(tensor, [-1])[:1]
    with tf.device("CPU:0"):
        tf.raw_ops.Assert(condition=tf.timestamp() > 0, data=[first], summarize=1)
