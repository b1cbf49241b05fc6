"""A dense layer whose update is made when somebody reads it: in the next forward pass, or before.

What the update needs is kept: the activations and errors of the whole batch, and the learning rate,
iteration and weight decay of its step. The reader, whoever it is, calls one small function that
looks whether an update is due and makes it.

Source: [T] chapter 3, algorithm 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope
from tensorflow.python.eager import record

from tfscale.comm.backends.base import raw_variable
from tfscale.exchange.factors import Factors, product


class DelayedLayer:
    """One layer's kernel and bias, and the update they wait for.

    Attributes:
        variables: Kernel, and bias if there is one.
        rule: The Keras optimizer that updates them.
        waiting: Those and the optimizer's state for them: what must not be read before `flush`.
    """

    def __init__(self, layer: keras.layers.Dense, rule: Any) -> None:
        """Make room for an update.

        Args:
            layer: Built.
            rule: The Keras optimizer that updates it, built on all variables of the model.
        """
        self.variables = [v for v in (layer.kernel, layer.bias) if v is not None]
        self.rule = rule
        n_in, n_out = layer.kernel.shape
        with tf.init_scope():
            self._activations = _rows(n_in, layer.compute_dtype)
            self._errors = _rows(n_out, layer.compute_dtype)
            self._is_due = tf.Variable(False, trainable=False, name="is_due")
            self._moment = {
                name: tf.Variable(value, trainable=False, name=name.strip("_"))
                for name, value in _moment_of(rule).items()
            }
            self._lock = tf.CriticalSection(name="delayed")
            self._is_tracing = True
            with AutocastScope(None), record.stop_recording():
                function = tf.function(self._update_if_due, autograph=False)
                # Concrete, or the next call to `drop_traces` would have it traced anew.
                self._flush = function.get_concrete_function()
            self._is_tracing = False
        touched = {id(tensor) for tensor in self._flush.captured_inputs}
        state = [v for v in rule.variables if id(raw_variable(v).handle) in touched]
        self.waiting = [*self.variables, *state]

    def flush(self, variables: Sequence[Any] = (), is_write: bool = False) -> None:
        """Make the update if one is due: now, or in the function that is being traced.

        Args:
            variables: Not used: all of the layer's are updated.
            is_write: Not used: the optimizer's state needs the update too.
        """
        del variables, is_write
        if not self._is_tracing:
            with record.stop_recording():
                self._flush()

    def keep(self, factors: Sequence[Factors]) -> None:
        """Let an update be due, of the step that is being traced.

        Args:
            factors: Of the gradients of `variables`.
        """
        values = _moment_of(self.rule)
        kept = [self._moment[name].assign(value) for name, value in values.items()]
        kept.append(self._activations.assign(factors[0].activations))
        kept.append(self._errors.assign(factors[0].errors))
        with tf.control_dependencies(kept):
            self._is_due.assign(True)

    def _update_if_due(self) -> None:
        # Readers on several threads: one makes the update, the others wait for it.
        self._lock.execute(lambda: tf.cond(self._is_due, self._update, lambda: False))

    def _update(self) -> bool:
        errors = self._errors.read_value()
        parts = [Factors(self._activations.read_value(), errors), Factors(None, errors)]
        gradients = [
            tf.cast(product(p), v.dtype) for p, v in zip(parts, self.variables, strict=False)
        ]
        with _at_moment(self.rule, self._moment):
            self.rule.apply(gradients, self.variables)
        for rows in (self._activations, self._errors):
            rows.assign(tf.zeros([0, rows.shape[1]], rows.dtype))  # gives memory back
        self._is_due.assign(False)
        return True


def _rows(width: int, dtype: str) -> tf.Variable:
    empty = tf.zeros([0, width], dtype)
    return tf.Variable(empty, trainable=False, shape=[None, width], name="rows")


def _moment_of(rule: Any) -> dict[str, tf.Tensor]:
    """Return what changes from step to step, by the optimizer's attribute that holds it.

    A schedule's rate is that of the iteration.
    """
    values = {"_iterations": rule.iterations, "_learning_rate": rule.learning_rate}
    if rule.weight_decay is not None:
        values["weight_decay"] = rule.weight_decay
    return {name: tf.convert_to_tensor(value) for name, value in values.items()}


@contextlib.contextmanager
def _at_moment(rule: Any, moment: dict[str, tf.Variable]) -> Iterator[None]:
    """Let an optimizer be at another moment, while an update is traced.

    `apply` counts its step there too, so that the optimizer's own count stays.
    """
    own = {name: vars(rule)[name] for name in moment}
    vars(rule).update(moment)
    try:
        yield
    finally:
        vars(rule).update(own)
