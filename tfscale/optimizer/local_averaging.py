"""Local SGD: groups of ranks that train separately, and averages of their models in the step."""

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
from tfscale.comm.runtime import ProcessSet, global_process_set, own_process_set
from tfscale.config import ConfigError
from tfscale.exchange.executor import Executor, Reduced
from tfscale.exchange.local_sgd import AdaptiveInterval, LocalSGD
from tfscale.exchange.plan import values_of
from tfscale.internals.optimizers import rate_of, slots_of, trained_by, update_rule
from tfscale.optimizer.rules import ELEMENTWISE, sum_of
from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes, build_buckets


class LocalGroups:
    """The groups of ranks of one optimizer, and their average once they train separately."""

    def __init__(self, strategy: LocalSGD, executor: Executor) -> None:
        """Form groups, unless they start later. Collective."""
        if executor.process_set is not global_process_set:
            raise ConfigError(
                f"Local SGD forms groups of all ranks. Received: {executor.process_set!r}. "
                "Leave process_set out."
            )
        self.strategy = strategy
        self.is_apart = False  # whether groups train separately
        self.average: GroupAverage | None = None
        self._members = strategy.members(runtime.size())
        # Ranks of each group; one group of all ranks until groups train separately.
        self.groups: list[list[int]] = [list(range(runtime.size()))]
        self._across: ProcessSet = global_process_set
        if strategy.start == "immediately":
            self.form(executor)

    def form(self, executor: Executor) -> None:
        """Let an executor exchange within this rank's group. Collective.

        Creates a process set of each group, and of the ranks at the same position in all groups.
        """
        rank, m = runtime.rank(), len(self._members[0])
        sets = [own_process_set(ranks) for ranks in self._members]
        alike = [[group[i] for group in self._members] for i in range(m)]
        across = [own_process_set(ranks) for ranks in alike]
        self.groups, self.is_apart = self._members, True
        executor.process_set = sets[rank // m]
        self._across = across[rank % m]

    def build(self, optimizer: Any, executor: Executor) -> None:
        """Create the average for a built optimizer if groups train separately. Collective."""
        if not self.is_apart or self.average is not None:
            return
        rule, shards = update_rule(optimizer), executor.shards
        if self.strategy.average == "gradients":
            _require_plain(optimizer, rule)
        if shards is None:
            targets = [v for v in trained_by(rule) if not executor.is_local(v)]
        else:
            _require_elementwise(self.strategy.outer)
            targets = [piece for i, piece in shards.pieces.items() if shards.owned(i)]
        self.average = GroupAverage(self.strategy, self._across.group(), executor, rule, targets)

    def after_update(self, reduced: Reduced, gradients: Sequence[Any]) -> None:
        """Average in the traced step if it is due; `gradients` are this rank's own. Collective."""
        if self.average is None:
            return
        # If data ends unannounced, a step begins without a batch, and TensorFlow runs all ops that
        # need none: some ranks would count a step that is never made. So counting waits for one of
        # this rank's own gradients, which needs a batch but no other rank.
        own = [values_of(g) for g in gradients if g is not None][-1:]
        with tf.control_dependencies([] if tf.executing_eagerly() else own):
            self.average.after_update(reduced)


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
        self._outer: Any = None
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
            self._common = [_like(v, self._first_of(v)) for v in common]
            for copy, variable in zip(self._common, common, strict=True):
                copy.constraint = variable.constraint  # applied by an outer optimizer
            summed = self.targets if sums_gradients else []
            self._sums = [_like(v, np.zeros(v.shape)) for v in summed]
            if strategy.outer is not None:
                # A copy, as a strategy may be given to several optimizers.
                self._outer = type(strategy.outer).from_config(strategy.outer.get_config())
                self._outer.build(self._common)

    def _first_of(self, variable: keras.Variable) -> np.ndarray:
        """Return the first group's value: all groups must start from the same one."""
        value = tf.convert_to_tensor(variable.value)
        if self.across.size > 1:
            call = Call(self.across, f"common {variable.path}")
            value = runtime.backend().broadcast(value, 0, call)
        return np.array(value.numpy())

    @property
    def variables(self) -> list[Any]:
        """State that an exact resume needs: counters, common parameters, sums."""
        slots = self._outer.variables if self._outer is not None else ()
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
            _set(variable, mean_over(self.across, [value], variable.path)[0])
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
        squares = [_when(is_due, partial(self._average, part)) for part in self._parts()]
        for state in self._states:
            _when(is_due, partial(self._average_state, state))
        _when(is_due, lambda: self._measure(sum_of(squares)))
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
        if self._outer is not None:
            self._outer.apply([c - m for c, m in zip(common, means, strict=True)], common)
        else:
            for last, mean in zip(common, means, strict=False):
                _set(last, mean)
        for place, variable in enumerate(variables):
            if common:
                variable.assign(common[place].value)
            else:
                _set(variable, means[place])
        apart = [m - b for m, b in zip(means, before, strict=True)]
        return sum_of([tf.reduce_sum(tf.cast(d, tf.float64) ** 2) for d in apart])

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
        n_groups, world = self.across.size, runtime.world()
        group = self.across.rank
        own = tf.one_hot(group, n_groups, dtype=tf.float64) * (square if self._is_counted else 0.0)
        own = tf.concat([own, [tf.cast(self.wants_to_stop, tf.float64)]], axis=0)
        call = Call(world, "distances of models")
        (sums,) = runtime.backend().allreduce([own], call, Reduction())
        self.distance.assign(tf.reduce_mean(tf.sqrt(sums[:-1])))
        self.must_stop.assign(sums[-1] > 0)
        self.n_averages.assign_add(1)
        return tf.zeros([], tf.float64)


def _like(variable: keras.Variable, value: np.ndarray) -> keras.Variable:
    # An array: Keras would share a TensorFlow variable instead of copying it.
    return keras.Variable(value, dtype=variable.dtype, trainable=False, name=variable.name)


def _set(variable: keras.Variable, value: Any) -> None:
    """Assign a value under the variable's constraint, which a mean may violate."""
    variable.assign(value if variable.constraint is None else variable.constraint(value))


def _when(condition: tf.Tensor, action: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return the result of `action`, or zero if the condition does not hold."""
    if tf.executing_eagerly():
        return action() if bool(condition) else tf.zeros([], tf.float64)
    return tf.cond(condition, action, lambda: tf.zeros([], tf.float64))


def _require_plain(optimizer: Any, rule: Any) -> None:
    """Raise a ConfigError if the optimizer changes gradients before it applies them."""
    if rule is not optimizer or rule.loss_scale_factor is not None:
        raise ConfigError(
            "Gradients are added up over an interval, and a loss scale may change within it. "
            f"Received: average='gradients' with {type(optimizer).__name__} and "
            f"loss_scale_factor={rule.loss_scale_factor}. Use average='parameters', or train "
            "without a loss scale (mixed_bfloat16)."
        )
    named = ("clipnorm", "clipvalue", "global_clipnorm", "weight_decay")
    used = [name for name in (*named, "gradient_accumulation_steps") if getattr(rule, name)]
    if used:
        raise ConfigError(
            "The common model moves by gradients as the ranks have them: what the optimizer "
            f"makes of them is lost. Received: average='gradients' with {', '.join(used)}. Use "
            "average='parameters', or leave that out."
        )


def _shared_state(rule: Any, is_local: Callable[[Any], bool]) -> list[Any]:
    """Return a rule's variables except the slots of local variables, which are not averaged."""
    owners, trainable = slots_of(rule), trained_by(rule)
    of_local = {slot for slot, index in owners.items() if is_local(trainable[index])}
    return [variable for variable in rule.variables if id(variable) not in of_local]


def _require_elementwise(outer: Any) -> None:
    """Raise a ConfigError if an outer optimizer needs more than a rank's segment."""
    used = [name for name in ("clipnorm", "global_clipnorm") if getattr(outer, name, None)]
    if outer is not None and (used or type(outer) not in ELEMENTWISE):
        raise ConfigError(
            "With sharded parameters an outer optimizer sees a rank's segment only. Received: "
            f"{' with '.join([type(outer).__name__, *used])}, which looks at more than one value. "
            "Use within='allreduce', or another outer optimizer such as SGD."
        )


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
