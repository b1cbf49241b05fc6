"""Policies for gradients that are NaN or infinite on some rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group
from tfscale.comm.objects import listed
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange.dense import use_of
from tfscale.exchange.executor import Executor, Reduced
from tfscale.exchange.plan import values_of
from tfscale.exchange.residuals import keep, rescale
from tfscale.exchange.shards import name_of
from tfscale.internals.optimizers import iterations_of, scaled_by
from tfscale.internals.trace import run_either
from tfscale.optimizer.rules import are_finite

logger = logging.getLogger("tfscale")

Policy = Literal["warn", "ignore", "raise", "skip"]
_MAX_INPUTS = 128  # of one op, in gradients
_NAMES_SHOWN = 3
_LOGGED = 10  # number of skipped steps that are all logged; then every hundredth


class NonFinite:
    """Applies reduced gradients under a policy for those that are not finite.

    Reduced gradients are equal on all ranks, and NaN and infinity survive a sum, so the ranks
    agree without a message; with sharded gradients or local variables they exchange one number per
    step. Only a step with such gradients exchanges the ranks and parameters that caused it.
    A warning needs no message: each rank looks at its own gradient of the first layer, which
    back-propagation reaches last, and at the last reduced one, which shows those of other ranks.
    Of a kernel and a bias it takes the bias: both have the same output gradient.
    """

    def __init__(self, policy: Policy) -> None:
        """Check the policy; see `DistributedOptimizer`.

        Metrics include a skipped step; `callbacks.base.keep_finite` restores moving statistics.
        """
        if policy not in get_args(Policy):
            raise ConfigError(
                "nonfinite must be 'warn', 'ignore', 'raise' or 'skip'. "
                f"Received: nonfinite={policy!r}."
            )
        self.policy = policy
        self._is_spread = False  # whether a step has had such gradients, with the policy "warn"
        self._skipped: tf.Variable | None = None

    @property
    def n_skipped(self) -> int:
        """Steps skipped so far by this rank."""
        return 0 if self._skipped is None else int(self._skipped.numpy())

    def apply(
        self,
        optimizer: Any,
        reduced: Reduced,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        executor: Executor,
    ) -> None:
        """Let a built optimizer apply reduced gradients if they are finite on all ranks.

        `gradients` are this rank's own, one for each of the model's `variables`.

        Raises:
            ConfigError: The optimizer scales the loss, and the policy is "raise".
        """

        def update() -> None:
            optimizer.apply(reduced.gradients, reduced.targets)
            if not is_scaled:
                keep(reduced.residuals)

        def report() -> None:
            self._report(iterations_of(optimizer), pairs, group)

        is_scaled = scaled_by(optimizer) is not None
        group = executor.process_set.group()
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        # For layers that exchange activations, every rank has the gradient of the whole batch,
        # which does not show whose samples caused it.
        pairs = [pair for pair in pairs if use_of(pair[1]) == "weights"] or pairs
        if self.policy == "ignore" or (is_scaled and self.policy != "raise"):
            if is_scaled and reduced.residuals:
                _update_scaled(optimizer, reduced)
            else:
                update()  # loss scaling skips such steps itself
            return
        if self.policy == "warn":
            if group.rank >= 0 and not runtime.is_single() and pairs:
                received = [g for g in reduced.gradients if g is not None]
                looked_at = [*_smallest([g for g, _ in pairs[:2]]), *_smallest(received[-2:])]
                run_either(_have_finite_sum(looked_at), lambda: None, report)
            update()
            return
        if is_scaled:
            raise ConfigError(
                "nonfinite='raise' would stop a search for a loss scale. Received: "
                "nonfinite='raise' with loss scaling. Use nonfinite='skip' or 'ignore'."
            )
        if self._skipped is None:
            with tf.init_scope():
                self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False)
        asks = executor.has_own_gradients(variables)
        finite = are_finite(reduced.gradients, group if asks else None)
        run_either(finite, update, report)

    def _report(self, iterations: Any, pairs: Sequence[tuple[Any, Any]], group: Group) -> None:
        """Tell which gradients are not finite.

        Collective unless the policy is "warn": all ranks take this branch.
        """
        names = [name_of(v) for _, v in pairs]
        # Few ops, as this branch is traced with every model and hardly ever runs; not one op, as
        # TensorFlow's inference of shapes visits an op again for each of its inputs.
        values = [values_of(g) for g, _ in pairs]
        parts = [values[i : i + _MAX_INPUTS] for i in range(0, len(values), _MAX_INPUTS)]
        flags = tf.concat([tf.numpy_function(_are_bad, part, tf.uint8) for part in parts], 0)
        flags = tf.ensure_shape(flags, [len(pairs)])
        ranks = [runtime.rank()]
        if group.size > 1 and group.rank >= 0 and self.policy != "warn":
            ranks = list(group.ranks)
            call = Call(group, "gradients that are not finite")
            flags, _ = runtime.backend().allgather(flags, call)
        rows = tf.reshape(flags, [len(ranks), len(names)])

        def tell(iterations: tf.Tensor, every: tf.Tensor) -> None:
            self.tell(int(iterations), every.numpy(), names, ranks)

        if tf.executing_eagerly():
            tell(iterations, rows)
        else:
            tf.py_function(tell, [tf.convert_to_tensor(iterations), rows], [])

    def tell(self, iterations: int, rows: np.ndarray, names: list[str], ranks: list[int]) -> None:
        """Raise or log; `rows` has 1 for each gradient, by ranks and names, that is not finite."""
        where = []
        for rank, row in zip(ranks, rows, strict=True):
            bad_names = [names[i] for i in np.flatnonzero(row)]
            if bad_names:
                where.append(f"rank {rank} in {listed(bad_names, _NAMES_SHOWN)}")
        what = "; ".join(where) or "no rank's own gradient, only their sum: it overflows"
        text = f"gradients must be finite. Received: NaN or infinity in step {iterations + 1}, on "
        if self.policy == "raise":
            raise ExchangeError(
                f"TFSCALE_FAILED: {text}{what}. Look at that rank's data, or use nonfinite='skip'."
            )
        if self.policy == "warn":
            if where and not self._is_spread:
                hint = "look at that rank's data, or use nonfinite='raise', 'skip' or 'ignore'"
                logger.warning("%s%s. It spreads to all ranks: %s.", text, what, hint)
            self._is_spread = True
            return
        assert self._skipped is not None
        n = int(self._skipped.assign_add(1))
        if n <= _LOGGED or n % 100 == 0:
            logger.warning("%s%s. All ranks skip it; %d skipped so far.", text, what, n)


def _are_bad(*gradients: np.ndarray) -> np.ndarray:
    """Return 1 for each gradient with values that are not finite, else 0; uint8."""
    return np.array([not np.isfinite(values).all() for values in gradients], np.uint8)


def _update_scaled(optimizer: Any, reduced: Reduced) -> None:
    """Let a LossScaleOptimizer update; keep residuals, which are of scaled gradients."""
    finite = optimizer.check_finite([g for g in reduced.gradients if g is not None])
    before = tf.convert_to_tensor(optimizer.dynamic_scale)
    optimizer.apply(reduced.gradients, reduced.targets)
    factor = tf.convert_to_tensor(optimizer.dynamic_scale) / before
    run_either(finite, lambda: keep(reduced.residuals), lambda: None)
    run_either(factor == 1.0, lambda: None, lambda: rescale(reduced.residuals, factor))


def _smallest(gradients: Sequence[Any]) -> list[Any]:
    """Return the gradient with fewest values, in a list; none of none."""
    sizes = [values_of(gradient).shape.num_elements() or math.inf for gradient in gradients]
    return [gradients[sizes.index(min(sizes))]] if gradients else []


def _have_finite_sum(gradients: Sequence[Any]) -> tf.Tensor:
    """Return whether sums are finite, those of 16-bit values too; cheaper than `are_finite`."""
    values = [tf.convert_to_tensor(values_of(gradient)) for gradient in gradients]
    wide = [tf.cast(v, tf.float32) if v.dtype.size < 4 else v for v in values]
    return tf.math.is_finite(tf.add_n([tf.cast(tf.reduce_sum(v), tf.float32) for v in wide]))
