"""Averages of the models of groups of ranks, taken in the training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, Reduction
from tfscale.comm.compression import Compression
from tfscale.exchange.executor import Executor, Reduced
from tfscale.exchange.local_sgd import AdaptiveInterval, LocalSGD
from tfscale.internals.optimizers import rate_of, slots_of, trained_by
from tfscale.optimizer.rules import sum_of
from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes, build_buckets


class GroupAverage:
    """Counts steps and, when it is due, averages this rank's variables over the groups.

    Attributes:
        across: This rank and the ranks of other groups that update the same variables.
        targets: Variables or pieces that this rank updates.
        interval: Steps between two averages: a variable, so that it can change without re-tracing.
        since: Steps since the last average.
        distance: Mean over groups of the distance between a group's parameters and the average,
            measured at the last average ([L] eq. 9).
        wants_to_stop: Set on a rank that wants to stop training; sent with the next average.
        must_stop: Whether some rank wanted to stop at the last average; equal on all ranks.
        n_averages: Averages taken in steps so far.
    """

    def __init__(
        self,
        strategy: LocalSGD,
        across: Group,
        executor: Executor,
        rule: Any,
        targets: Sequence[keras.Variable],
    ) -> None:
        """Create counters and copies, in the state just after an average. Collective.

        `rule` is the Keras optimizer that updates the `targets`.
        """
        self._strategy, self._executor, self._rule = strategy, executor, rule
        self.across = across
        # One of several ranks that update the same variables counts for the distance.
        self._is_counted = executor.shards is not None or executor.process_set.rank() == 0
        self.targets = list(targets)
        states = _shared_state(rule, executor.is_local) if strategy.average_state else []
        self._states = [s for s in states if tf.as_dtype(s.dtype).is_floating]
        # For changes of parameters and sums of gradients: a change since the last common parameters
        # needs fewer bits than the parameter. States are never compressed: squares of gradients
        # need the range.
        self._compression = executor.options.compression
        is_compressed = self._compression is not Compression.none
        sums_gradients = strategy.average == "gradients"
        needs_common = is_compressed or strategy.outer is not None or sums_gradients
        interval = strategy.interval
        first = interval.start if isinstance(interval, AdaptiveInterval) else interval
        with tf.init_scope():
            self.interval = tf.Variable(first, dtype=tf.int64, trainable=False)
            self.since = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.distance = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            self.wants_to_stop = tf.Variable(False, trainable=False)
            self.must_stop = tf.Variable(False, trainable=False)
            self.n_averages = tf.Variable(0, dtype=tf.int64, trainable=False)
            common = self.targets if needs_common else []
            self._common = [like(v, self._first_of(v)) for v in common]
            for copy, variable in zip(self._common, common, strict=True):
                copy.constraint = variable.constraint  # applied by an outer optimizer
            summed = self.targets if sums_gradients else []
            self._sums = [like(v, np.zeros(v.shape)) for v in summed]
            self._outers = [self._outer_for(part) for part in self._parts_with_outer()]

    def _first_of(self, variable: keras.Variable) -> np.ndarray:
        """Return the first group's value: all groups must start from the same one."""
        value = tf.convert_to_tensor(variable.value)
        if self.across.size > 1:
            call = Call(self.across, f"common {variable.path}")
            value = runtime.backend().broadcast(value, 0, call)
        return np.array(value.numpy())

    def _parts_with_outer(self) -> list[list[int]]:
        """Return the positions of what each outer optimizer updates, in one step of its own."""
        return [list(range(len(self.targets)))]

    def _outer_for(self, part: Sequence[int]) -> Any:
        given = self._strategy.outer
        if given is None or not part:
            return None
        # A copy, as a strategy may be given to several optimizers.
        outer = type(given).from_config(given.get_config())
        outer.build([self._common[i] for i in part])
        return outer

    @property
    def variables(self) -> list[Any]:
        """State that an exact resume needs: counters, common parameters, sums."""
        slots = [v for outer in self._outers if outer is not None for v in outer.variables]
        own = [*self._common, *self._sums, *slots]
        return [self.interval, self.since, *own]

    def start_from_here(self) -> None:
        """Use the present parameters, equal in all groups, as the last average."""
        self.since.assign(0)
        self.wants_to_stop.assign(False)
        self.must_stop.assign(False)
        for common, variable in zip(self._common, self.targets, strict=False):
            common.assign(variable.value)
        for total in self._sums:
            total.assign(tf.zeros(total.shape, total.dtype))

    def average_now(self) -> list[np.ndarray]:
        """Set the model to the average over groups; return this rank's own values. Collective."""
        own = [np.array(variable.numpy()) for variable in self.targets]
        for variable in self.targets:
            value = tf.convert_to_tensor(variable.value)
            set_constrained(variable, mean_over(self.across, [value], variable.path)[0])
        self._executor.publish()
        return own

    def resume(self, own: Sequence[np.ndarray]) -> None:
        """Restore the values that `average_now` returned. Collective in this rank's group."""
        for variable, value in zip(self.targets, own, strict=True):
            variable.assign(value)
        self._executor.publish()

    def after_update(self, reduced: Reduced) -> None:
        """Average if it is due. Called in the traced step, after the update of some targets."""
        sums = dict(zip(map(id, self.targets), self._sums, strict=False))  # perhaps none
        for target, gradient in zip(reduced.targets, reduced.gradients, strict=True):
            if gradient is not None and id(target) in sums:
                sums[id(target)].assign_add(tf.convert_to_tensor(gradient))
        reached = self.since + 1
        is_due = reached >= self.interval
        squares = [when(is_due, partial(self._average, part)) for part in self._parts()]
        for state in self._states:
            when(is_due, partial(self._average_state, state))
        when(is_due, lambda: self._measure(sum_of(squares)))
        self.since.assign(tf.where(is_due, tf.zeros_like(reached), reached))

    def _parts(self) -> list[list[int]]:
        """Return the positions of each message; one message if an outer optimizer makes a step."""
        if self._strategy.outer is not None:
            return [list(range(len(self.targets)))] if self.targets else []
        specs = [GradientSpec(v.path, tuple(v.shape), v.dtype) for v in self.targets]
        buckets = build_buckets(specs, auto_bucket_bytes(specs))
        return [sorted(bucket) for bucket in buckets[::-1]]

    def _mean_parameters(self, part: Sequence[int], own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if self._compression is Compression.none:
            return mean_over(self.across, own, "parameters")
        common = [self._common[i].value for i in part]
        changes = [o - c for o, c in zip(own, common, strict=True)]
        means = mean_over(self.across, changes, "parameters", self._compression)
        return [c + m for c, m in zip(common, means, strict=True)]

    def _average(self, part: Sequence[int]) -> tf.Tensor:
        """Give this rank's parameters the average; return the squared distance from it."""
        variables = [self.targets[i] for i in part]
        common = [self._common[i] for i in part] if self._common else []
        before = [tf.identity(v.value) for v in variables]
        means = self._move_by_gradients(part) if self._sums else self._mean_parameters(part, before)
        self._move_common(self._outers[0], common, means)
        for place, variable in enumerate(variables):
            if common:
                variable.assign(common[place].value)
            else:
                set_constrained(variable, means[place])
        return sum_of_squares([m - b for m, b in zip(means, before, strict=True)])

    def _move_common(self, outer: Any, common: Sequence[Any], means: Sequence[tf.Tensor]) -> None:
        """Set the common parameters to means, or let an outer optimizer move them there."""
        if outer is not None:
            outer.apply([c - m for c, m in zip(common, means, strict=True)], common)
            return
        for last, mean in zip(common, means, strict=False):
            set_constrained(last, mean)

    def _move_by_gradients(self, part: Sequence[int]) -> list[tf.Tensor]:
        """Return the last common parameters, moved by the mean of the groups' sums."""
        sums = [self._sums[i].value for i in part]
        means = mean_over(self.across, sums, "gradients", self._compression)
        rate = self._rate_of_step()
        pairs = zip(part, means, strict=True)
        moved = [self._common[i].value - tf.cast(rate, m.dtype) * m for i, m in pairs]
        for i in part:
            self._sums[i].assign(tf.zeros_like(self._sums[i].value))
        return moved

    def _rate_of_step(self) -> Any:
        """Return the learning rate of the last update; a schedule is already one step ahead."""
        rate = rate_of(self._rule)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self._rule.iterations - 1)
        return self._rule.learning_rate

    def _average_state(self, state: Any) -> tf.Tensor:
        state.assign(mean_over(self.across, [state.value], state.path)[0])
        return tf.zeros([], tf.float64)

    def _measure(self, square: tf.Tensor) -> tf.Tensor:
        """Measure the distance of the groups, and agree whether to stop. Collective.

        Each group's squared distance is one number, the sum of its ranks' parts. One more number
        counts the ranks that want to stop.
        """
        call = Call(runtime.world(), "distances of models")
        (sums,) = runtime.backend().allreduce([self._report(square)], call, Reduction())
        return self._take_report(sums)

    def _report(self, square: tf.Tensor) -> tf.Tensor:
        """Return what this rank adds to the sums that `_take_report` reads."""
        own = square if self._is_counted else tf.zeros_like(square)
        of_groups = tf.one_hot(self.across.rank, self.across.size, dtype=tf.float64) * own
        return tf.concat([of_groups, [tf.cast(self.wants_to_stop, tf.float64)]], axis=0)

    def _take_report(self, sums: tf.Tensor) -> tf.Tensor:
        self.distance.assign(tf.reduce_mean(tf.sqrt(sums[:-1])))
        self.must_stop.assign(sums[-1] > 0)
        self.n_averages.assign_add(1)
        return tf.zeros([], tf.float64)


def like(variable: keras.Variable, value: np.ndarray) -> keras.Variable:
    """Return a variable of another's dtype, for a value of its own."""
    # An array: Keras would share a TensorFlow variable instead of copying it.
    return keras.Variable(value, dtype=variable.dtype, trainable=False, name=variable.name)


def sum_of_squares(changes: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the squared norm of several tensors together, as float64.

    Each is summed in its own dtype, or float32 if that has fewer bits: a copy in float64 would cost
    more than all else in an average.
    """
    wide = [c if c.dtype.size >= tf.float32.size else tf.cast(c, tf.float32) for c in changes]
    return sum_of([2.0 * tf.cast(tf.nn.l2_loss(change), tf.float64) for change in wide])


def set_constrained(variable: keras.Variable, value: Any) -> None:
    """Assign a value under the variable's constraint, which a mean may violate."""
    variable.assign(value if variable.constraint is None else variable.constraint(value))


def when(condition: tf.Tensor, action: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return the result of `action`, or zero if the condition does not hold."""
    if tf.executing_eagerly():
        return action() if bool(condition) else tf.zeros([], tf.float64)
    return tf.cond(condition, action, lambda: tf.zeros([], tf.float64))


def _shared_state(rule: Any, is_local: Callable[[Any], bool]) -> list[Any]:
    """Return a rule's variables except the slots of local variables, which are not averaged."""
    owners, trainable = slots_of(rule), trained_by(rule)
    of_local = {slot for slot, index in owners.items() if is_local(trainable[index])}
    return [variable for variable in rule.variables if id(variable) not in of_local]


def mean_over(
    group: Group, values: Sequence[tf.Tensor], what: str, compression: Any = Compression.none
) -> list[tf.Tensor]:
    """Return the means of tensors over a group, one message for each dtype. Collective."""
    call = Call(group, f"average of {what}")
    packed = [compression.compress(value) for value in values]
    means: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(p.dtype for p, _ in packed):
        places = [i for i, (p, _) in enumerate(packed) if p.dtype == dtype]
        own = [packed[i][0] for i in places]
        some = runtime.backend().allreduce(own, call, Reduction(postscale=1.0 / group.size))
        means.update(zip(places, some, strict=True))
    return [compression.decompress(means[i], context) for i, (_, context) in enumerate(packed)]
