"""Keras optimizers on pieces of variables: supported update rules, clipping and checks.

Keras computes clipping, weight decay and the check for infinity from the gradients that it is
given, but each rank has only a part of them. These methods of the optimizer are replaced during a
step, where Keras calls them, so that they are also correct after gradient accumulation.
"""

from __future__ import annotations

import contextlib
import functools
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
from tfscale.internals.optimizers import (
    decaying_as,
    has_outer_scaler,
    overwrites_with_gradient,
    replaced,
    update_rule,
)
from tfscale.optimizer.lars import LARS

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
        own = getattr(type(each), "apply_gradients", None)
        if own not in (None, keras.optimizers.Optimizer.apply_gradients):
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
        if shards is not None:
            clipped = [v for v in reduced.variables if not overwrites_with_gradient(v)]
            positions = [i if i in shards.pieces else -1 for i in map(shards.position, clipped)]
            pairs = [(piece, shards.variables[i]) for i, piece in shards.pieces.items()]
            stack.enter_context(decaying_as(rule, pairs))
            clip_whole = functools.partial(clip, rule, positions=positions, shards=shards)
            stack.enter_context(replaced(rule, _clip_gradients=clip_whole))
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


def clip(
    rule: Any, gradients: Sequence[Any], positions: Sequence[int], shards: Shards
) -> list[tf.Tensor]:
    """Return gradients clipped as Keras does it, by the norms of whole variables. Collective.

    `positions` are those of the gradients' variables in `shards`; -1 for one that is not cut.
    """
    dense = [tf.convert_to_tensor(g) for g in gradients]
    if rule.clipnorm and rule.clipnorm > 0:
        norms = [tf.sqrt(square) for square in _squares(dense, positions, shards)]
        limit = rule.clipnorm
        return [g * limit / tf.maximum(n, limit) for g, n in zip(dense, norms, strict=True)]
    if rule.global_clipnorm and rule.global_clipnorm > 0:
        return _clip_globally(rule.global_clipnorm, dense, positions, shards)
    if rule.clipvalue and rule.clipvalue > 0:
        return [tf.clip_by_value(g, -rule.clipvalue, rule.clipvalue) for g in dense]
    return dense


def _clip_globally(
    limit: float, gradients: list[tf.Tensor], positions: Sequence[int], shards: Shards
) -> list[tf.Tensor]:
    dtype = _dtype_of_norms(shards)
    squares = [tf.cast(tf.reduce_sum(g * g), dtype) for g in gradients]
    shared = [s for s, p in zip(squares, positions, strict=True) if p >= 0]
    local = [s for s, p in zip(squares, positions, strict=True) if p < 0]
    # Not of `_squares`: this rank has no gradients of variables that others own entirely.
    total = _sum_over_ranks(sum_of(shared, dtype), shards)
    norm = tf.sqrt(total + sum_of(local, dtype))
    # An infinite norm makes all gradients NaN, as in Keras.
    scale = limit * tf.minimum(1 / norm, tf.constant(1 / limit, norm.dtype)) + (norm - norm)
    return [g * tf.cast(scale, g.dtype) for g in gradients]


def sum_of(scalars: Sequence[tf.Tensor], dtype: tf.DType = tf.float64) -> tf.Tensor:
    """Return the sum of scalars of a dtype; 0 if there are none."""
    # Not add_n: in a branch, TensorFlow's memory optimizer rewrites it to ops that fail.
    return tf.reduce_sum(tf.stack([tf.zeros([], dtype), *scalars]))


def _squares(
    gradients: list[tf.Tensor], positions: Sequence[int], shards: Shards
) -> list[tf.Tensor]:
    """Return the sum of squares of each gradient's whole variable."""
    squares = [tf.reduce_sum(g * g) for g in gradients]
    dtype = _dtype_of_norms(shards)
    parts = {p: s for p, s in zip(positions, squares, strict=True) if p >= 0}
    vector = [
        tf.cast(parts[i], dtype) if i in parts else tf.zeros([], dtype) for i in shards.pieces
    ]
    sums = _sum_over_ranks(tf.stack(vector), shards)
    sum_of_piece = {position: number for number, position in enumerate(shards.pieces)}
    return [
        tf.cast(sums[sum_of_piece[p]], s.dtype) if p >= 0 else s
        for p, s in zip(positions, squares, strict=True)
    ]


def _dtype_of_norms(shards: Shards) -> tf.DType:
    """Return the dtype in which ranks add squares: equal on all, whatever parts they own."""
    dtypes = {tf.as_dtype(variable.dtype) for variable in shards.variables}
    if len(dtypes) == 1:
        return dtypes.pop()
    return tf.float64 if tf.float64 in dtypes else tf.float32


def _sum_over_ranks(values: tf.Tensor, shards: Shards) -> tf.Tensor:
    call = Call(shards.group, "norms of gradients")
    (total,) = runtime.backend().allreduce([values], call, Reduction())
    return total
