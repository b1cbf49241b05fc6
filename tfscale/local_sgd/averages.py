"""Averages of the models of groups of ranks, taken in the training step."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import collectives, runtime
from tfscale.comm.backends.base import Call, Group, Reduction
from tfscale.comm.compression import Compression, QuantizedCompressor, SparseCompressor
from tfscale.exchange.executor import Executor, Reduced
from tfscale.exchange.plan import GradientOptions, Wire, values_of
from tfscale.exchange.residuals import Residuals, keep, pending_change
from tfscale.exchange.states import Saved, SavedStates, Scope, copy_of
from tfscale.internals.optimizers import rate_of, slots_of, trained_by
from tfscale.local_sgd.intervals import (
    LONGEST,
    SLACK,
    AdaptiveInterval,
    DistanceGuard,
    GrowingInterval,
    QuadraticInterval,
)
from tfscale.local_sgd.reports import AverageReport
from tfscale.plan.buckets import GradientSpec, auto_bucket_bytes, build_buckets, owner_of
from tfscale.plan.segments import block_cuts

logger = logging.getLogger("tfscale")


class GroupAverage:
    """Counts steps and, when it is due, averages this rank's variables over the groups.

    Attributes:
        across: This rank and the ranks of other groups that update the same variables.
        targets: Variables or pieces that this rank updates.
        interval: Steps between two averages: a variable, so that it can change without re-tracing.
        since: Steps since the last average.
        report: What is summed over all ranks with each average: distances, and wishes to stop.
        residuals: What averages in few bits have not sent yet; None for other averages.
    """

    def __init__(
        self,
        strategy: Any,
        across: Group,
        executor: Executor,
        rule: Any,
        targets: Sequence[keras.Variable],
    ) -> None:
        """Create counters and copies, in the state just after an average. Collective.

        `strategy` is the `LocalSGD`; `rule` is the Keras optimizer that updates the `targets`.
        """
        self._strategy, self._executor, self._rule = strategy, executor, rule
        self.across = across
        self.targets = list(targets)
        shards = executor.shards
        self._wholes = dict(zip(map(id, targets), targets, strict=True))  # the model's variables
        if shards is not None:
            self._wholes = {id(piece): shards.variables[i] for i, piece in shards.pieces.items()}
        layers = list(dict.fromkeys(owner_of(whole.path) for whole in self._wholes.values()))
        owners = [owner_of(self._wholes[id(target)].path) for target in targets]
        # One of several ranks that update the same variables counts for the distance.
        is_counted = shards is not None or executor.process_set.rank() == 0
        self.report = AverageReport(across, layers, owners, is_counted)
        states = _shared_state(rule, executor.is_local) if strategy.average_state else []
        self._states = [s for s in states if tf.as_dtype(s.dtype).is_floating]
        # For changes of parameters and sums of gradients: a change since the last common parameters
        # needs fewer bits than the parameter. States are never compressed: squares of gradients
        # need the range.
        self._compression = executor.options.compression
        is_compressed = self._compression is not Compression.none
        sums_gradients = strategy.average == "gradients"
        # The mean of one group is what its update left, under the constraints already.
        self._is_exact = across.size == 1 and not is_compressed and not sums_gradients
        is_guarded = isinstance(strategy.interval, DistanceGuard)
        needs_common = is_compressed or strategy.outer is not None or sums_gradients or is_guarded
        with tf.init_scope():
            self.interval = tf.Variable(strategy.first_interval, dtype=tf.int64, trainable=False)
            self.since = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._n_intervals = tf.Variable(0, dtype=tf.int64, trainable=False)
            # The learning rate at the last average: with 0, it has risen at the first one.
            self._last_rate = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            common = self.targets if needs_common else []
            self._common = [like(v, self._first_of(v)) for v in common]
            for copy, variable in zip(self._common, common, strict=True):
                copy.constraint = variable.constraint  # applied by an outer optimizer
            summed = self.targets if sums_gradients else []
            self._sums = [like(v, np.zeros(v.shape)) for v in summed]
            self._outers = [self._outer_for(part) for part in self._parts_with_outer()]
            self.residuals: Residuals | None = None
            self._few: set[int] = set()  # positions of targets sent in few bits, or in part
            if isinstance(self._compression, QuantizedCompressor) and across.size > 1:
                self._create_residuals(self._compression(start_step=0), self._compression.block)
            elif isinstance(self._compression, SparseCompressor) and across.size > 1:
                self._create_residuals(self._compression, self._compression.chunk)

    def _create_residuals(
        self, compression: QuantizedCompressor | SparseCompressor, block: int
    ) -> None:
        self.residuals, options = Residuals(compression), GradientOptions(compression=compression)
        self._wire = Wire(self.across, options, self.targets, residuals=self.residuals)
        shapes = [tuple(self._wholes[id(v)].shape) for v in self.targets]  # pieces are flat
        pairs = enumerate(zip(self.targets, shapes, strict=True))
        self._few = {i for i, (v, shape) in pairs if compression.fits(shape, v.dtype)}
        rounds_sum, factor = isinstance(compression, QuantizedCompressor), 1.0 / self.across.size
        self._cuts = {
            i: block_cuts(math.prod(self.targets[i].shape), block, self.across.size)
            for i in sorted(self._few)
        }
        for i, cuts in self._cuts.items():
            if compression.error_feedback:
                self.residuals.of(self.targets[i], self.across, cuts, factor, rounds_sum)

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
        template = self._strategy.outer
        if template is None or not part:
            return None
        # A copy, as a strategy may be given to several optimizers.
        outer = type(template).from_config(template.get_config())
        outer.build([self._common[i] for i in part])
        return outer

    @property
    def variables(self) -> list[Any]:
        """State that an exact resume needs: counters, common parameters, sums."""
        slots = [v for outer in self._outers if outer is not None for v in outer.variables]
        residuals = self.residuals.variables if self.residuals else []
        follows_rate = isinstance(self._strategy.interval, QuadraticInterval)
        rates = [self._last_rate] if follows_rate else []
        return [*self.counters, *self._common, *self._sums, *slots, *residuals, *rates]

    @property
    def counters(self) -> list[tf.Variable]:
        """The first of `variables`: interval, steps since the last average, intervals so far."""
        return [self.interval, self.since, self._n_intervals]

    def saved(self, scope: Scope) -> Saved:
        """Copy `variables`: this rank's segments, or once in a group what is equal in it."""
        is_saved = scope.is_leader or self._executor.shards is not None
        state = self.variables if is_saved else []
        arrays = {f"average/{i}": copy_of(variable) for i, variable in enumerate(state)}
        if self.residuals is None or not is_saved or self._sums:  # sums of gradients are dropped
            return Saved(arrays)
        numbers, places = {id(v): i for i, v in enumerate(state)}, scope.places
        pending: dict[str, Any] = {}
        for target in self.targets:
            residual, weight = self.residuals.find(target), places.get(id(self._wholes[id(target)]))
            if residual is not None and weight is not None:
                start = self._start_of(target)
                owned = residual.cuts[residual.group.rank]
                variables = [residual.own, residual.owner, *self._in_flight(target)]
                arrays_of = [numbers.get(id(v), -1) for v in variables]
                begin = self._place_in_message(target)
                pending[str(weight)] = [residual.factor, start, start + owned, *arrays_of, begin]
        return Saved(arrays, entries={"pending": pending})

    def _in_flight(self, target: keras.Variable) -> list[Any]:
        """The sent vector of a target, the one that arrives, and its common value; or nothing.

        The first two are vectors that hold it from `_place_in_message` on.
        """
        del target
        return [None, None, None]

    def _place_in_message(self, target: keras.Variable) -> int:
        del target
        return 0

    def _start_of(self, target: keras.Variable) -> int:
        """Return the element of the model's variable with which a target begins."""
        shards = self._executor.shards
        if shards is None:
            return 0
        owned = shards.owned(shards.position(self._wholes[id(target)]))
        return owned.start if owned else 0

    def _take_pending(self, saved: SavedStates) -> None:
        """Leave for later averages, or apply, what earlier groups had not sent yet.

        Residuals are cut again, so that their mean over the groups is as before.
        """
        places, sums = (
            saved.scope.places,
            dict(zip(map(id, self.targets), self._sums, strict=False)),
        )
        for target in self.targets:
            whole = self._wholes[id(target)]
            pending = pending_change(saved, places.get(id(whole), -1), math.prod(whole.shape))
            if pending is None:
                continue
            start, shape = self._start_of(target), tuple(target.shape)
            pending = pending[start : start + math.prod(shape)]
            residual = self.residuals.find(target) if self.residuals else None
            if residual is not None:
                begin, end = residual.cuts[residual.group.rank :][:2]
                residual.add(pending[begin:end])
                continue
            variables = [sums[id(target)]] if sums else [target, *self._common_of(target)]
            for variable in variables:
                variable.assign_add(pending.reshape(shape).astype(variable.dtype))
        self._executor.publish()

    def _cut_again(self, saved: SavedStates) -> None:
        """Let other ranks keep what was not sent if ranks have moved to other hosts. Collective.

        A rank keeps it of what it encodes for its host.
        """
        if self.residuals is None:
            return
        is_same = np.int64(saved.is_same_host)
        n_same = collectives.allreduce(is_same, op=runtime.Sum, name="hosts of averages")
        if int(n_same) == runtime.size():
            return
        places = saved.scope.places
        for residual in self.residuals.all:
            whole = self._wholes[id(residual.parameter)]
            weight, count = places.get(id(whole), -1), math.prod(whole.shape)
            pending = pending_change(saved, weight, count, is_in_flight=True)
            for variable in (residual.own, residual.owner):
                if variable is not None:
                    variable.assign(tf.zeros_like(variable))
            if pending is not None:
                start = self._start_of(residual.parameter)
                begin, end = residual.cuts[residual.group.rank :][:2]
                residual.add(pending[start + begin : start + end])

    def _common_of(self, target: keras.Variable) -> list[keras.Variable]:
        pairs = zip(self.targets, self._common, strict=False)  # perhaps none
        return [common for variable, common in pairs if variable is target]

    def restored(self, saved: SavedStates) -> None:
        """Resume inside an interval, or begin one from the groups' average. Collective.

        An interval begins if groups have changed, or the variables kept from the last average: by
        another inner exchange, compression or outer optimizer.
        """
        of_leader = saved.of(saved.groups[0][0]).series("average")
        if len(of_leader) >= len(self.counters):
            self._take(of_leader[: len(self.counters)])
        if not saved.is_exact:  # all groups hold the average already
            self.start_from_here()
            if not saved.is_end:
                self._take_pending(saved)
            return
        kept = saved.own.series("average") or of_leader
        fits = [value.shape for value in kept] == [tuple(v.shape) for v in self.variables]
        n_fit = collectives.allreduce(np.int64(fits), op=runtime.Sum, name="restored averages")
        if int(n_fit) == runtime.size():
            self._take(kept)
            self._cut_again(saved)
            if saved.is_end:  # the weights hold the average of all groups
                self.start_from_here()
            return
        self.average_now()
        self.start_from_here()
        if self.across.size > 1 and runtime.rank() == 0:
            text = "Groups average in another way than before: they begin with their average."
            logger.warning(text)

    def _take(self, values: Sequence[np.ndarray]) -> None:
        """Set `variables`, or the counters alone, to values of an earlier run.

        A fixed interval is the program's, not that of the earlier run.
        """
        interval = self.interval.numpy()
        restored = self.variables[: len(values)]
        for variable, value in zip(restored, values, strict=True):
            variable.assign(value)
        changing = AdaptiveInterval | GrowingInterval | QuadraticInterval
        if not isinstance(self._strategy.interval, changing):
            self.interval.assign(interval)

    def record(self) -> dict[str, Any]:
        """Return the fields of the last average, for JSON."""
        return self.report.record()

    def start_from_here(self) -> None:
        """Use the present parameters, equal in all groups, as the last average."""
        self.since.assign(0)
        self.report.forget_stops()
        for common, variable in zip(self._common, self.targets, strict=False):
            common.assign(variable.value)
        for total in self._sums:
            total.assign(tf.zeros(total.shape, total.dtype))
        if self.residuals is not None:
            self.residuals.restore((), 0)

    def average_now(self) -> list[np.ndarray]:
        """Set the model to the average over groups; return this rank's own values. Collective."""
        before = [np.array(variable.numpy()) for variable in self.targets]
        for variable in self.targets:
            value = tf.convert_to_tensor(variable.value)
            if self.across.size > 1:
                set_constrained(variable, mean_over(self.across, [value], variable.path)[0])
        self._executor.publish()
        return before

    def resume(self, values: Sequence[np.ndarray]) -> None:
        """Restore the values that `average_now` returned. Collective in this rank's group."""
        for variable, value in zip(self.targets, values, strict=True):
            variable.assign(value)
        self._executor.publish()

    def after_update(self, reduced: Reduced, gradients: Sequence[Any]) -> None:
        """Average if it is due. Called in the traced step, after the update of some targets.

        `gradients` are this rank's own. At the end of data of unknown size TensorFlow still runs
        every op that does not depend on the batch. Tied to a local gradient, which needs a batch
        but no other rank, the counter does not count a step without data.
        """
        local_gradient = [values_of(g) for g in gradients if g is not None][-1:]
        with tf.control_dependencies([] if tf.executing_eagerly() else local_gradient):
            self._count_update(reduced)

    def _count_update(self, reduced: Reduced) -> None:
        sums = dict(zip(map(id, self.targets), self._sums, strict=False))  # perhaps none
        for target, gradient in zip(reduced.targets, reduced.gradients, strict=True):
            if gradient is not None and id(target) in sums:
                sums[id(target)].assign_add(tf.convert_to_tensor(gradient))
        reached = self.since + 1
        is_due = self._is_due(reached)
        shape = [len(self.report.layers)]
        squares = [when(is_due, partial(self._average, part), shape) for part in self._parts()]
        for state in self._states:
            when(is_due, partial(self._average_state, state))
        squares.append(tf.zeros(shape, tf.float64))
        when(is_due, lambda: self._measure(tf.reduce_sum(tf.stack(squares), axis=0)))
        self._count(is_due, reached)

    def _is_due(self, reached: tf.Tensor) -> tf.Tensor:
        """Return whether to average after `reached` steps. Collective for a `DistanceGuard`."""
        guard, is_full = self._strategy.interval, reached >= self.interval
        if not isinstance(guard, DistanceGuard):
            return is_full
        is_measured = tf.logical_not(is_full) & (reached % guard.every == 0)
        return is_full | (when(is_measured, self._distance_from_common) > guard.limit)

    def _distance_from_common(self) -> tf.Tensor:
        pairs = zip(self.targets, self._common, strict=True)
        changes = [target.value - last.value for target, last in pairs]
        squares = self.report.squares_of(range(len(changes)), changes)
        call = Call(runtime.world(), "distances from the last average")
        (sums,) = runtime.backend().allreduce([self.report.vector(squares)], call, Reduction())
        return self.report.distances_in(sums)[0]

    def _count(self, is_due: tf.Tensor, reached: tf.Tensor) -> None:
        """Count a step, and the interval if one is over, after which the next may be longer."""
        self.since.assign(tf.where(is_due, tf.zeros_like(reached), reached))
        self._n_intervals.assign_add(tf.cast(is_due, tf.int64))
        rule = self._strategy.interval
        if isinstance(rule, GrowingInterval):
            steps = rule.initial * (1.0 + rule.growth * tf.cast(self._n_intervals, tf.float64))
            self.interval.assign(tf.minimum(tf.cast(steps, tf.int64), rule.maximum))
        if isinstance(rule, QuadraticInterval):
            when(is_due, partial(self._follow_rate, rule))

    def _follow_rate(self, rule: QuadraticInterval) -> tf.Tensor:
        rate = tf.cast(self._rate_of_step(), tf.float64)
        steps = tf.cast(tf.minimum(SLACK * (rule.alpha / rate) ** 2, LONGEST), tf.int64)
        least = tf.constant(rule.minimum, tf.int64)
        self.interval.assign(tf.where(rate > self._last_rate, least, tf.maximum(steps, least)))
        self._last_rate.assign(rate)
        return tf.zeros([], tf.float64)

    def _parts(self) -> list[list[int]]:
        """Return the positions of each message; one message if an outer optimizer makes a step."""
        if self._strategy.outer is not None:
            return [list(range(len(self.targets)))] if self.targets else []
        return [sorted(bucket) for bucket in messages_of(self.targets)]

    def _mean_parameters(self, part: Sequence[int], values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means of parameters; compressed, of their changes since the last average."""
        if self._compression is Compression.none:
            return mean_over(self.across, values, "parameters")
        anchors = [self._common[i].value for i in part]
        changes = [value - anchor for value, anchor in zip(values, anchors, strict=True)]
        means = self._mean_changes(part, changes, "parameters")
        return [anchor + mean for anchor, mean in zip(anchors, means, strict=True)]

    def _mean_changes(
        self, part: Sequence[int], changes: Sequence[tf.Tensor], what: str
    ) -> list[tf.Tensor]:
        """Return means over the groups of changes of some targets, compressed. Collective."""
        if self.residuals is None:
            return mean_over(self.across, changes, what, self._compression)
        few = [position for position, i in enumerate(part) if i in self._few]
        rest = [position for position, i in enumerate(part) if i not in self._few]
        exact = mean_over(self.across, [changes[position] for position in rest], what)
        means = dict(zip(rest, exact, strict=True))
        if few:
            wire, call = replace(self._wire, updates=[]), Call(self.across, f"average of {what}")
            few_changes, indices = (
                [changes[position] for position in few],
                [part[position] for position in few],
            )
            means |= zip(few, wire.quantized(few_changes, call, indices), strict=True)
            keep(wire.updates)
        return [means[position] for position in range(len(part))]

    def _average(self, part: Sequence[int]) -> tf.Tensor:
        """Give this rank's parameters the average; return the squared distance from it."""
        variables = [self.targets[i] for i in part]
        common = [self._common[i] for i in part] if self._common else []
        before = [tf.identity(v.value) for v in variables]
        means = self._move_by_gradients(part) if self._sums else self._mean_parameters(part, before)
        self._move_common(self._outers[0], common, means)
        for position, variable in enumerate(variables):
            if common:
                variable.assign(common[position].value)
            else:
                self._set(variable, means[position])
        self.report.note(common or means)
        changes = [m - b for m, b in zip(means, before, strict=True)]
        return self.report.squares_of(part, changes)

    def _move_common(self, outer: Any, common: Sequence[Any], means: Sequence[tf.Tensor]) -> None:
        """Set the common parameters to means, or let an outer optimizer move them there."""
        if outer is not None:
            outer.apply([c - m for c, m in zip(common, means, strict=True)], common)
            return
        for last, mean in zip(common, means, strict=False):
            self._set(last, mean)

    def _set(self, variable: keras.Variable, mean: tf.Tensor) -> None:
        if self._is_exact:
            variable.assign(mean)
        else:
            set_constrained(variable, mean)

    def _move_by_gradients(self, part: Sequence[int]) -> list[tf.Tensor]:
        """Return the last common parameters, moved by the mean of the groups' sums."""
        sums = [self._sums[i].value for i in part]
        means = self._mean_changes(part, sums, "gradients")
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

    def _measure(self, squares: tf.Tensor) -> tf.Tensor:
        """Measure the distance of the groups, and agree whether to stop. Collective."""
        call = Call(runtime.world(), "distances of models")
        (sums,) = runtime.backend().allreduce([self.report.vector(squares)], call, Reduction())
        return self.report.take(sums)


def messages_of(variables: Sequence[keras.Variable]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the variables of each message, in the order of the model."""
    specs = [GradientSpec(v.path, tuple(v.shape), v.dtype) for v in variables]
    return build_buckets(specs, auto_bucket_bytes(specs))[::-1]


def like(variable: keras.Variable, value: np.ndarray) -> keras.Variable:
    """Return a variable of another's dtype, for a value of its own."""
    # An array: Keras would share a TensorFlow variable instead of copying it.
    return keras.Variable(value, dtype=variable.dtype, trainable=False, name=variable.name)


def set_constrained(variable: keras.Variable, value: Any) -> None:
    """Assign a value under the variable's constraint, which a mean may violate."""
    variable.assign(value if variable.constraint is None else variable.constraint(value))


def when(
    condition: tf.Tensor, action: Callable[[], tf.Tensor], shape: Sequence[int] = ()
) -> tf.Tensor:
    """Return the result of `action`, or zeros of its shape if the condition does not hold."""
    zeros = partial(tf.zeros, shape, tf.float64)
    if tf.executing_eagerly():
        return action() if bool(condition) else zeros()
    return tf.cond(condition, action, zeros)


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
        indices = [i for i, (p, _) in enumerate(packed) if p.dtype == dtype]
        compressed = [packed[i][0] for i in indices]
        means_of_dtype = runtime.backend().allreduce(
            compressed, call, Reduction(postscale=1.0 / group.size)
        )
        means.update(zip(indices, means_of_dtype, strict=True))
    return [compression.decompress(means[i], context) for i, (_, context) in enumerate(packed)]
