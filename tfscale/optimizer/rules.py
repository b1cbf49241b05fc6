"""Keras optimizers on pieces of variables: supported update rules, clipping and checks.

Keras computes clipping, weight decay and the check for infinity from the gradients that it is
given, but each rank has only a part of them. These methods of the optimizer are replaced during a
step, where Keras calls them, so that they are also correct after gradient accumulation.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Reduction
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange.executor import Executor, Reduced
from tfscale.exchange.plan import values_of
from tfscale.exchange.shards import Shards
from tfscale.exchange.tables import TableRows
from tfscale.internals.optimizers import (
    decaying_as,
    has_outer_scaler,
    overwrites_with_gradient,
    replaced,
    update_rule,
)
from tfscale.optimizer.lars import LARS
from tfscale.optimizer.table_rules import on_rows

logger = logging.getLogger("tfscale")

_rules = keras.optimizers
_warned: set[str] = set()
# The update of a value depends on that value's gradient and state alone.
ELEMENTWISE = (
    *(_rules.SGD, _rules.RMSprop, _rules.Adam, _rules.AdamW, _rules.Adadelta),
    *(_rules.Adagrad, _rules.Adamax, _rules.Nadam, _rules.Ftrl, _rules.Lion),
)
# The update of a variable needs the whole variable, but no other variable.
LAYERWISE = (LARS, _rules.Lamb, _rules.Adafactor, _rules.Muon)


def why_whole(rule: Any) -> str:
    """Return why an update rule cannot work on parts of the parameters, or an empty string."""
    if type(rule) in ELEMENTWISE + LAYERWISE:
        return ""
    return f"it is not known whether {type(rule).__name__} can update parts of them"


def why_uncut(rule: Any, variable: Any) -> str:
    """Return why one rank must own all of a variable, or an empty string."""
    if type(rule) in LAYERWISE:
        return f"{type(rule).__name__} needs whole kernels"
    return "" if variable.constraint is None else "a constraint needs the whole kernel"


def refuse_bypassed(optimizer: Any) -> None:
    """Raise a ConfigError for another Keras backend or an overridden `apply_gradients`."""
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            "KERAS_BACKEND must be tensorflow. Received: the Keras backend "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    for each in (optimizer, update_rule(optimizer)):
        method = getattr(type(each), "apply_gradients", None)
        if method not in (None, keras.optimizers.Optimizer.apply_gradients):
            raise ConfigError(
                "`apply_gradients` must not be overridden: Keras 3 calls `apply`. Received: "
                f"{type(each).__name__}, which overrides `apply_gradients`. Override `apply` "
                "instead."
            )


def require_keras(variables: Sequence[Any]) -> None:
    """Raise a ConfigError unless variables are of Keras: only their readers can wait."""
    others = [v for v in variables if not isinstance(v, keras.Variable)]
    if others:
        raise ConfigError(
            "parameters must be Keras variables if sharded. Received: a "
            f"{type(others[0]).__name__}, {others[0].name}. Use keras.Variable, or "
            "exchange='allreduce'."
        )


def refuse_outer_scaler(distributed: type) -> None:
    """Raise an ExchangeError if a LossScaleOptimizer calls us: it may skip one rank's step."""
    if has_outer_scaler(distributed):
        raise ExchangeError(
            "LossScaleOptimizer must be inside DistributedOptimizer, or ranks that see an "
            "infinite gradient skip the exchange and the others wait for them. Received: "
            "LossScaleOptimizer(DistributedOptimizer(...)). Write "
            "DistributedOptimizer(LossScaleOptimizer(...)), pass auto_scale_loss=False to "
            "compile(), or let tfscale.prepare(model) or any tfscale callback repair it."
        )


@contextlib.contextmanager
def on_pieces(optimizer: Any, reduced: Reduced, executor: Executor) -> Iterator[None]:
    """Within a block, let an optimizer apply gradients of pieces like those of whole variables.

    The optimizer is built on the pieces; `reduced` has the gradients of the step. Loss scaling
    looks at the gradients of all ranks, also of those of local variables.
    """
    rule, shards = update_rule(optimizer), executor.shards
    with contextlib.ExitStack() as stack:
        # Keras passes all gradients through one op of tf.distribute, which changes nothing here;
        # TensorFlow's time to infer its shapes grows with the square of their number.
        stack.enter_context(replaced(rule, _all_reduce_sum_gradients=list))
        stack.enter_context(on_rows(rule))
        group = executor.process_set.group()
        pairs = zip(reduced.gradients, reduced.variables, strict=True)
        to_update = [v for g, v in pairs if g is not None and not overwrites_with_gradient(v)]
        parts = Parts(group, shards, to_update)
        if shards is not None:
            originals = [(piece, shards.variables[i]) for i, piece in shards.pieces.items()]
            stack.enter_context(decaying_as(rule, originals))
        if parts.are_any:
            stack.enter_context(replaced(rule, _clip_gradients=lambda g: clip(rule, g, parts)))
        if rule is not optimizer and executor.has_own_gradients(reduced.variables):
            group = executor.process_set.group()
            finite = replaced(optimizer, check_finite=lambda g: are_finite(g, group))
            stack.enter_context(finite)
        yield


def warn_of_sums(rule: Any, gradients: Sequence[Any]) -> None:
    """Warn, once per rule, if sums of repeated indices give other updates than Keras's own way."""
    name = type(rule).__name__
    clips = rule.clipnorm or rule.global_clipnorm or rule.clipvalue
    is_sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
    if is_sparse and (clips or type(rule) is not _rules.SGD) and name not in _warned:
        _warned.add(name)
        logger.warning(
            "tfscale adds up the gradients of an index that occurs repeatedly (Embedding), on one "
            "process as on several. Keras alone gives them to %s one by one, with other results: "
            "see 'Exchanges', section 'Sparse gradients', in the documentation.",
            name,
        )


def is_finite(gradient: Any) -> tf.Tensor:
    """Return whether all values of a gradient are finite."""
    return tf.reduce_all(tf.math.is_finite(values_of(gradient)))


def are_finite(gradients: Sequence[Any], group: Group | None = None) -> tf.Tensor:
    """Return whether gradients are finite, on all ranks of a group if given. Collective then."""
    checks = [is_finite(g) for g in gradients if g is not None]
    flag = tf.reduce_all(tf.stack([tf.constant(True), *checks]))
    if group is None:
        return flag
    call = Call(group, "are gradients finite")
    flag_here = tf.cast(flag, tf.int32)
    (least,) = runtime.backend().allreduce([flag_here], call, Reduction(ReduceOp.MIN))
    return tf.cast(least, tf.bool)


class Parts:
    """Of which gradients of a step this rank has parts: of cut parameters, and of tables.

    Attributes:
        group: The ranks that have the other parts.
        places: For each gradient the position of its part among those of all ranks; -1 for one that
            every rank has whole.
        n_places: Number of parts, also of those whose gradients only other ranks have.
    """

    def __init__(self, group: Group, shards: Shards | None, variables: Sequence[Any]) -> None:
        """Sort the variables of a step's gradients."""
        self.group = group
        pieces = {} if shards is None else {i: place for place, i in enumerate(shards.pieces)}
        tables = [v for v in variables if isinstance(v, TableRows) and group.size > 1]
        at = {id(v): len(pieces) + i for i, v in enumerate(tables)}
        place_of = (
            {} if shards is None else {id(v): pieces.get(shards.position(v), -1) for v in variables}
        )
        self.places = [at.get(id(v), place_of.get(id(v), -1)) for v in variables]
        self.n_places, self.are_any = len(pieces) + len(tables), shards is not None or bool(tables)
        # Keras clips other sparse gradients by their values, perhaps of repeated indices.
        self.are_dense = [shards is not None and id(v) not in at for v in variables]
        dtypes = {tf.as_dtype(v.dtype) for v in (*tables, *(shards.variables if shards else ()))}
        widest = tf.float64 if tf.float64 in dtypes else tf.float32
        # Equal on all ranks, whatever parts they have.
        self._dtype = dtypes.pop() if len(dtypes) == 1 else widest

    def norms(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Return the norm of each gradient of a whole variable. Collective."""
        squares = [_square(g) for g in gradients]
        square_of = {p: s for p, s in zip(self.places, squares, strict=True) if p >= 0}
        zero = tf.zeros([], self._dtype)
        squares_here = [tf.cast(square_of.get(i, zero), self._dtype) for i in range(self.n_places)]
        sums = self._sum_over_ranks(tf.stack(squares_here))
        pairs = zip(self.places, squares, strict=True)
        return [tf.sqrt(tf.cast(sums[p], s.dtype) if p >= 0 else s) for p, s in pairs]

    def global_norm(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Return the norm of all gradients of whole variables together. Collective."""
        squares = [tf.cast(_square(g), self._dtype) for g in gradients]
        pairs = list(zip(self.places, squares, strict=True))
        # Not of `norms`: this rank has no gradients of variables that others own entirely.
        total = self._sum_over_ranks(sum_of([s for p, s in pairs if p >= 0], self._dtype))
        return tf.sqrt(total + sum_of([s for p, s in pairs if p < 0], self._dtype))

    def _sum_over_ranks(self, values: tf.Tensor) -> tf.Tensor:
        call = Call(self.group, "norms of gradients")
        (total,) = runtime.backend().allreduce([values], call, Reduction())
        return total


def clip(rule: Any, gradients: Sequence[Any], parts: Parts) -> list[Any]:
    """Return gradients clipped as Keras does it, by the norms of whole variables. Collective.

    IndexedSlices are clipped by their values, as Keras does it, too.
    """
    pairs = zip(gradients, parts.are_dense, strict=True)
    gradients = [tf.convert_to_tensor(g) if is_dense else g for g, is_dense in pairs]
    if rule.clipnorm and rule.clipnorm > 0:
        limit = rule.clipnorm
        pairs = zip(gradients, parts.norms(gradients), strict=True)
        return [_times(g, limit / tf.maximum(norm, limit)) for g, norm in pairs]
    if rule.global_clipnorm and rule.global_clipnorm > 0:
        limit, norm = rule.global_clipnorm, parts.global_norm(gradients)
        # An infinite norm makes all gradients NaN, as in Keras.
        scale = limit * tf.minimum(1 / norm, tf.constant(1 / limit, norm.dtype)) + (norm - norm)
        return [_times(g, scale) for g in gradients]
    if rule.clipvalue and rule.clipvalue > 0:
        limit = rule.clipvalue
        return [
            _changed(g, lambda values: tf.clip_by_value(values, -limit, limit)) for g in gradients
        ]
    return list(gradients)


def sum_of(scalars: Sequence[tf.Tensor], dtype: tf.DType = tf.float64) -> tf.Tensor:
    """Return the sum of scalars of a dtype; 0 if there are none."""
    # Not add_n: in a branch, TensorFlow's memory optimizer rewrites it to ops that fail.
    return tf.reduce_sum(tf.stack([tf.zeros([], dtype), *scalars]))


def _square(gradient: Any) -> tf.Tensor:
    values = values_of(gradient)
    return tf.reduce_sum(values * values)


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    return _changed(gradient, lambda values: values * tf.cast(factor, values.dtype))


def _changed(gradient: Any, change: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return change(gradient)
    return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
