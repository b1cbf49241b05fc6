"""Gradients that are NaN or infinite on some rank: what all ranks do about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.config import ConfigError, ExchangeError
from tfscale.exchange.bucketed import name_of
from tfscale.exchange.dense_uses import use_of
from tfscale.update.loss_scale import update_rule

logger = logging.getLogger("tfscale")

Policy = Literal["ignore", "raise", "skip"]
_NAMES_SHOWN = 3
_OF_ALL = ("replicated", "partial")
_LOGGED = 10  # skipped steps, each; then every hundredth


class NonFinite:
    """What a distributed optimizer does about gradients that are not finite.

    Reduced gradients are equal on all ranks, and NaN and infinity survive a sum, so the ranks
    agree without a message; parts of sharded gradients take one number per step. Who sent what is
    asked only in a step in which something is wrong.
    """

    def __init__(self, policy: Policy, exchange: Any = None) -> None:
        """Keep the policy.

        Args:
            policy: "ignore" looks at nothing; "raise" ends training on all ranks with an error
                that names rank, step and parameter; "skip" leaves weights, the optimizer's state
                and `iterations` as they were before the step. Metrics have seen it; what layers
                keep beside their weights is the business of `callbacks.finite_state`.
            exchange: How gradients travel.

        Raises:
            ConfigError: The policy is none of these, or does not go together with the exchange.
        """
        if policy not in get_args(Policy):
            raise ConfigError(
                f"nonfinite must be 'ignore', 'raise' or 'skip'. Received: nonfinite={policy!r}."
            )
        if policy == "skip" and getattr(exchange, "average", None) == "gradients":
            raise ConfigError(
                "Local SGD that averages gradients adds up those of all steps. Received: "
                "nonfinite='skip' with LocalSGD(average='gradients'). Use nonfinite='raise', or "
                "average='parameters'."
            )
        self.policy = policy
        self._skipped: tf.Variable | None = None

    @property
    def n_skipped(self) -> int:
        """Steps skipped so far by this rank."""
        return 0 if self._skipped is None else int(self._skipped.numpy())

    def guard(
        self,
        optimizer: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        is_cut: bool,
    ) -> Any:
        """Return what is to be given reduced gradients in this step instead of an optimizer.

        Args:
            optimizer: A built Keras optimizer.
            gradients: This rank's own, one per variable.
            variables: The model's.
            group: Who exchanges them.
            is_cut: Each rank of the group sees a part of the reduced gradients.

        Raises:
            ConfigError: The optimizer scales the loss and is to raise.
        """
        if self.policy == "ignore":
            return optimizer
        if type(optimizer) is keras.optimizers.LossScaleOptimizer:
            if self.policy == "skip":
                return optimizer  # it does so itself
            raise ConfigError(
                "A LossScaleOptimizer tries scales until gradients are finite. Received: "
                "nonfinite='raise' with loss scaling. Use nonfinite='skip' or 'ignore'."
            )
        if self._skipped is None:
            with tf.init_scope():
                self._skipped = tf.Variable(0, dtype=tf.int64, trainable=False)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        # Of layers that exchange activations every rank has the whole batch's gradient, which
        # does not tell whose samples spoiled it.
        pairs = [pair for pair in pairs if use_of(pair[1]) not in _OF_ALL] or pairs
        return _Guard(self, optimizer, pairs, group, is_cut)

    def tell(self, iterations: int, rows: np.ndarray, names: list[str], ranks: list[int]) -> None:
        """Raise or log what was found.

        Args:
            iterations: Of the optimizer, before the step.
            rows: One per rank, one number per name: 1 where that rank's gradient is not finite.
            names: Of the parameters.
            ranks: Of the rows.

        Raises:
            ExchangeError: The policy says so.
        """
        where = []
        for rank, row in zip(ranks, rows, strict=True):
            found = [names[i] for i in np.flatnonzero(row)]
            more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
            if found:
                where.append(f"rank {rank} in {', '.join(found[:_NAMES_SHOWN])}{more}")
        what = "; ".join(where) or "no rank's own gradient, only their sum: it overflows"
        text = f"Gradients must be finite. Received: NaN or infinity in step {iterations + 1}, on "
        if self.policy == "raise":
            raise ExchangeError(
                f"TFSCALE_FAILED: {text}{what}. Look at that rank's data, or use nonfinite='skip'."
            )
        assert self._skipped is not None
        n = int(self._skipped.assign_add(1))
        if n <= _LOGGED or n % 100 == 0:
            logger.warning("%s%s. All ranks skip it; %d skipped so far.", text, what, n)


class _Guard:
    """An optimizer for one step, which first looks at the gradients it is given."""

    def __init__(
        self, owner: NonFinite, optimizer: Any, pairs: list[Any], group: Group, is_cut: bool
    ) -> None:
        self._owner, self._optimizer = owner, optimizer
        self._pairs, self._group, self._is_cut = pairs, group, is_cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Let the optimizer apply reduced gradients if they are finite on all ranks."""
        finite = self._are_finite(gradients)

        def update() -> None:
            self._optimizer.apply(gradients, variables)

        if tf.executing_eagerly():
            update() if bool(finite) else self._report()
            return
        tf.cond(finite, _as_branch(update), _as_branch(self._report))

    def _are_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        checks = [_is_finite(g) for g in gradients if g is not None]
        own = tf.reduce_all(tf.stack([tf.constant(True), *checks]))
        if not self._is_cut:
            return own
        call = Call(self._group, "are gradients finite")
        flag = [tf.cast(own, tf.int32)]
        (least,) = runtime.backend().allreduce(flag, call, ReduceOp.MIN, Scaling())
        return tf.cast(least, tf.bool)

    def _report(self) -> None:
        """Ask all ranks whose gradients are not finite. Collective: all take this branch."""
        names = [name_of(v) for _, v in self._pairs]
        bad = [tf.logical_not(_is_finite(g)) for g, _ in self._pairs]
        flags = tf.cast(tf.stack(bad), tf.uint8)
        ranks = [runtime.rank()]
        if self._group.size > 1 and self._group.rank >= 0:
            ranks = list(self._group.ranks)
            call = Call(self._group, "gradients that are not finite")
            flags, _ = runtime.backend().allgather(flags, call)
        rows = tf.reshape(flags, [len(ranks), len(names)])

        def tell(iterations: tf.Tensor, every: tf.Tensor) -> None:
            self._owner.tell(int(iterations), every.numpy(), names, ranks)

        iterations = update_rule(self._optimizer).iterations
        if tf.executing_eagerly():
            tell(iterations, rows)
        else:
            tf.py_function(tell, [tf.convert_to_tensor(iterations), rows], [])


def _is_finite(gradient: Any) -> tf.Tensor:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_all(tf.math.is_finite(values))


def _as_branch(body: Callable[[], None]) -> Callable[[], tf.Tensor]:
    def branch() -> tf.Tensor:
        body()
        return tf.constant(0)

    return branch
