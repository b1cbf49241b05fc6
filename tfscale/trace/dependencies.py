"""Which collectives of a traced function need the results of which."""

from __future__ import annotations

import tensorflow as tf

from tfscale.trace.analysis import Key


def has_slot(op: tf.Operation) -> bool:
    """Return whether an op is a collective or a stamp; one that waits for parameters is not."""
    return op.type.startswith("Tfscale") and op.type != "TfscaleAwait"


def collectives_before(graph: tf.Graph) -> dict[Key, frozenset[Key]]:
    """Return for each collective of a graph those that must end before it can be posted.

    Args:
        graph: A function's graph. What runs inside of functions that it calls is not seen.

    Returns:
        Per slot the slots it needs, directly or through other ops, by data or by order.
    """
    keys: list[Key] = []
    reached: dict[tf.Operation, int] = {}  # per op, a bit for each collective it needs
    before: dict[Key, int] = {}
    for op in graph.get_operations():  # in the order of creation: inputs come first
        needed = 0
        for tensor in op.inputs:
            needed |= reached.get(_producer(tensor), 0)
        for other in op.control_inputs:
            needed |= reached.get(other, 0)
        if has_slot(op):
            key = Key(int(op.get_attr("plan")), int(op.get_attr("slot")))
            before[key] = needed
            needed |= 1 << len(keys)
            keys.append(key)
        if needed:
            reached[op] = needed
    return {
        key: frozenset(other for bit, other in enumerate(keys) if bits >> bit & 1)
        for key, bits in before.items()
    }


def _producer(tensor: tf.Tensor) -> tf.Operation:
    """Return the op that computes a tensor.

    Keras passes all gradients through one IdentityN, which TensorFlow removes before it runs the
    function: an output of it needs one input only.
    """
    while tensor.op.type == "IdentityN":
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op
