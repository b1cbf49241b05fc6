"""The averaging step of local SGD, as part of the traced training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.comm.compression import Compression
from tfscale.exchange.local_sgd import LocalSGD
from tfscale.exchange.means import mean_over
from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes, build_buckets


class GroupAverage:
    """Counts steps and, when an average is due, averages over the groups what this rank updates.

    Attributes:
        across: This rank and those of the other groups that update the same.
        targets: What this rank updates.
        interval: Steps between two averages: a variable, so that it may change without tracing.
        since: Steps since the last average.
        distance: Mean over groups of the distance between a group's parameters and the average,
            measured at the last average ([L] eq. 9).
        wants_to_stop: Set on a rank that is to stop training; it travels with the next average.
        must_stop: Whether some rank wanted to stop at the last average; equal on all ranks.
        n_averages: Averages taken in steps so far.
    """

    def __init__(
        self, strategy: LocalSGD, across: Group, is_counted: bool, compression: Any
    ) -> None:
        """Begin with an average just taken.

        Args:
            strategy: What is averaged how.
            across: See above.
            is_counted: Whether this rank's part counts for the distance; False on all but one of
                several ranks that update the same.
            compression: What travels of changes of parameters and of sums of gradients, see
                `Compression`. States always travel whole: squares of gradients need the range.
        """
        self._strategy = strategy
        self._compression = compression
        self.across = across
        self._is_counted = is_counted
        with tf.init_scope():
            self.interval = tf.Variable(strategy.first_interval, dtype=tf.int64, trainable=False)
            self.since = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.distance = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.wants_to_stop = tf.Variable(False, trainable=False)
            self.must_stop = tf.Variable(False, trainable=False)
            self.n_averages = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.targets: list[keras.Variable] = []
        self._states: list[Any] = []
        self._common: list[keras.Variable] = []
        self._sums: list[keras.Variable] = []
        self._rule: Any = None
        self._outer: Any = None

    def build(self, rule: Any, variables: Sequence[keras.Variable], states: Sequence[Any]) -> None:
        """Remember what this rank updates. Collective.

        Args:
            rule: The optimizer that does, for its learning rate.
            variables: Whole ones or pieces.
            states: The optimizer's own, averaged if the strategy says so.
        """
        self._rule = rule
        self.targets = list(variables)
        if self._strategy.average_state:
            self._states = [s for s in states if tf.as_dtype(s.dtype).is_floating]
        with tf.init_scope():
            if self._needs_common:
                self._common = [_like(v, self._first_of(v)) for v in self.targets]
                for common, variable in zip(self._common, self.targets, strict=True):
                    common.constraint = variable.constraint  # an outer optimizer obeys it
            if self._strategy.average == "gradients":
                self._sums = [_like(v, np.zeros(v.shape)) for v in self.targets]
            if self._strategy.outer is not None:
                # One of its own: a strategy may be given to several optimizers.
                outer = self._strategy.outer
                self._outer = type(outer).from_config(outer.get_config())
                self._outer.build(self._common)

    def _first_of(self, variable: keras.Variable) -> np.ndarray:
        """Return the first group's value: groups whose changes begin elsewhere never meet."""
        value = tf.convert_to_tensor(variable.value)
        if self.across.size > 1:
            call = Call(self.across, f"common {variable.path}")
            value = runtime.backend().broadcast(value, 0, call)
        return np.array(value.numpy())

    @property
    def _needs_common(self) -> bool:
        # Few bits say more about how far a parameter has moved than about where it is.
        is_compressed = self._compression is not Compression.none
        strategy = self._strategy
        return is_compressed or strategy.outer is not None or strategy.average == "gradients"

    @property
    def variables(self) -> list[Any]:
        """All that a run must keep to go on exactly: counters, common parameters, sums."""
        slots = self._outer.variables if self._outer is not None else ()
        own = [*self._common, *self._sums, *slots]
        return [self.interval, self.since, *own]

    def start_from_here(self) -> None:
        """Take the present parameters, equal in all groups, as the last average."""
        self.since.assign(0)
        self.wants_to_stop.assign(False)
        self.must_stop.assign(False)
        for common, variable in zip(self._common, self.targets, strict=False):
            common.assign(variable.value)
        for total in self._sums:
            total.assign(tf.zeros(total.shape, total.dtype))

    def average_now(self) -> None:
        """Average what this rank updates over the groups, eagerly. Collective."""
        for variable in self.targets:
            value = tf.convert_to_tensor(variable.value)
            _set(variable, mean_over(self.across, [value], variable.path)[0])

    def after_update(self, targets: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Average if it is due. Called in the traced step, behind the update.

        Args:
            targets: What was updated.
            gradients: With which gradients, equal within a group.
        """
        places = {id(v): i for i, v in enumerate(self.targets)}
        if self._sums:
            for target, gradient in zip(targets, gradients, strict=True):
                if id(target) in places:
                    self._sums[places[id(target)]].assign_add(tf.convert_to_tensor(gradient))
        reached = self.since + 1
        is_due = reached >= self.interval
        squares = [_when(is_due, partial(self._average, part)) for part in self._parts()]
        for state in self._states:
            _when(is_due, partial(self._average_state, state))
        _when(is_due, lambda: self._measure(_sum(squares)))
        self.since.assign(tf.where(is_due, tf.zeros_like(reached), reached))

    def _parts(self) -> list[list[int]]:
        """Return what travels together; all at once where an outer optimizer takes one step."""
        if self._strategy.outer is not None:
            return [list(range(len(self.targets)))] if self.targets else []
        specs = [GradientSpec(v.path, tuple(v.shape), v.dtype) for v in self.targets]
        buckets = build_buckets(specs, auto_bucket_bytes(specs))
        return [sorted(bucket.indices) for bucket in buckets[::-1]]

    def _mean_parameters(self, part: Sequence[int], own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self._compression is Compression.none:
            return mean_over(self.across, own, "parameters")
        common = [self._common[i].value for i in part]
        changes = [o - c for o, c in zip(own, common, strict=True)]
        means = mean_over(self.across, changes, "parameters", self._compression)
        return [c + m for c, m in zip(common, means, strict=True)]

    def _average(self, part: Sequence[int]) -> tf.Tensor:
        variables = [self.targets[i] for i in part]
        before = [tf.identity(v.value) for v in variables]
        if self._sums:
            self._move_by_gradients(part)
            means = [v.value for v in variables]
        else:
            means = self._mean_parameters(part, before)
            self._take_over(part, means)
        apart = [m - b for m, b in zip(means, before, strict=True)]
        return _sum([tf.reduce_sum(tf.cast(d, tf.float64) ** 2) for d in apart])

    def _take_over(self, part: Sequence[int], means: Sequence[tf.Tensor]) -> None:
        """Set parameters to their means, or where the outer optimizer goes from there."""
        common = [self._common[i] for i in part] if self._common else []
        if self._outer is not None:
            self._outer.apply([c - m for c, m in zip(common, means, strict=True)], common)
        else:
            for last, mean in zip(common, means, strict=False):
                _set(last, mean)
        for place, i in enumerate(part):
            if common:
                self.targets[i].assign(common[place].value)
            else:
                _set(self.targets[i], means[place])

    def _move_by_gradients(self, part: Sequence[int]) -> None:
        sums = [self._sums[i].value for i in part]
        means = mean_over(self.across, sums, "gradients", self._compression)
        for i, mean in zip(part, means, strict=True):
            rate = tf.cast(self._rate_of_step(), mean.dtype)
            _set(self._common[i], self._common[i].value - rate * mean)
            self.targets[i].assign(self._common[i].value)
            self._sums[i].assign(tf.zeros_like(mean))

    def _rate_of_step(self) -> Any:
        """Return the rate of the update just made, behind which a schedule is a step ahead."""
        rate = self._rule._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self._rule.iterations - 1)
        return self._rule.learning_rate

    def _average_state(self, state: Any) -> tf.Tensor:
        state.assign(mean_over(self.across, [state.value], state.path)[0])
        return tf.zeros([], tf.float64)

    def _measure(self, square: tf.Tensor) -> tf.Tensor:
        """Each group's distance travels as one number; ranks of a group add their parts up.

        One more number says how many ranks want to stop.
        """
        n_groups, world = self.across.size, runtime.world()
        group = self.across.rank
        own = tf.one_hot(group, n_groups, dtype=tf.float64) * (square if self._is_counted else 0.0)
        own = tf.concat([own, [tf.cast(self.wants_to_stop, tf.float64)]], axis=0)
        call = Call(world, "distances of models")
        (sums,) = runtime.backend().allreduce([own], call, ReduceOp.SUM, Scaling())
        self.distance.assign(tf.reduce_mean(tf.sqrt(sums[:-1])))
        self.must_stop.assign(sums[-1] > 0)
        self.n_averages.assign_add(1)
        return tf.zeros([], tf.float64)


def _like(variable: keras.Variable, value: np.ndarray) -> keras.Variable:
    # An array: Keras would share a TensorFlow variable instead of copying it.
    return keras.Variable(value, dtype=variable.dtype, trainable=False, name=variable.name)


def _set(variable: keras.Variable, value: Any) -> None:
    """Assign a value as a rule does: a mean may lie where a constraint lets no parameter be."""
    variable.assign(value if variable.constraint is None else variable.constraint(value))


def _sum(scalars: Sequence[tf.Tensor]) -> tf.Tensor:
    # Not add_n: in a branch TensorFlow's memory optimizer makes of it what fails when it runs.
    return tf.reduce_sum(tf.stack([tf.zeros([], tf.float64), *scalars]))


def _when(condition: tf.Tensor, action: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return what `action` returns, or zero where the condition does not hold."""
    if tf.executing_eagerly():
        return action() if bool(condition) else tf.zeros([], tf.float64)
    return tf.cond(condition, action, lambda: tf.zeros([], tf.float64))
