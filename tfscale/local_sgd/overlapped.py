"""Averages of groups of ranks that training does not wait for."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, Reduction
from tfscale.exchange.executor import Reduced
from tfscale.internals.keras import by_device, device_of, raw_variable
from tfscale.local_sgd.averages import GroupAverage, messages_of, set_constrained, when
from tfscale.optimizer.state import n_bytes
from tfscale.plan.buckets import layers_of

logger = logging.getLogger("tfscale")

LABEL = "posted average of parameters"  # of its collectives, in timelines
_NOTHING = 0  # steps left where nothing is on its way


@dataclass
class Message:
    """Variables that are sent together, as vectors of all their elements.

    Attributes:
        places: Their positions among the targets of the average.
        variables: TensorFlow's variables.
        common: Their common parameters, if there are any.
        sent: The parameters as they were when they were sent.
        means: What arrives: means of parameters or, with common parameters, of changes since then.
        residuals: What changes in few bits leave for later averages; it arrives, too. None where
            changes are sent as they are.
    """

    places: list[int]
    variables: list[tf.Variable]
    common: list[keras.Variable]
    sent: tf.Variable
    means: tf.Variable
    residuals: list[tf.Variable] | None = None

    @property
    def arriving(self) -> list[tf.Variable]:
        """The variables that an average on its way sets."""
        return [self.means, *(self.residuals or ())]


@dataclass
class Fragment:
    """Some of this rank's variables, averaged together.

    Attributes:
        messages: What is sent.
        outer: The outer optimizer of their common parameters, or None.
        left: Steps until the average on its way is merged; 0 where none is on its way.
    """

    messages: list[Message]
    outer: Any
    left: tf.Variable


class OverlappedAverage(GroupAverage):
    """Sends averages fragment by fragment, and merges each a fixed number of steps later.

    In an interval of H steps, fragment i of n is sent after step i * H / n, counted from the end of
    the last interval. Exactly `overlap` steps later, on all ranks alike, the change that the
    average makes is added to the parameters, so the steps in between are kept. If it has not
    arrived by then, the step waits: results do not depend on timing.

    The distance of the models, and the wish to stop, are summed over ranks when the last fragment
    is merged, and read when the next fragment is sent.

    Attributes:
        overlap: Steps between sending and merging: a variable, so that it can change without
            re-tracing.
        steps_per_average: How many steps an average takes, as measured for "auto"; 0 if it was
            not measured.
        fragments: Parts of the targets, in the order in which they are sent.

    Source: Douillard et al.: Streaming DiLoCo with overlapping communication, 2025.
    """

    def __init__(self, strategy: Any, across: Group, *others: Any) -> None:
        """Create counters and copies, in the state just after an average. Collective."""
        super().__init__(strategy, across, *others)
        self._waits = strategy.overlap == 0
        with tf.init_scope():
            self.overlap = tf.Variable(strategy.first_overlap, dtype=tf.int64, trainable=False)
            self.steps_per_average = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            zeros = np.zeros(len(self.report.layers))
            self._squares = tf.Variable(zeros, dtype=tf.float64, trainable=False)
            self._has_report = tf.Variable(False, trainable=False)
            self._reported = tf.Variable(np.zeros(self.report.size), trainable=False)
            pairs = zip(self._parts_with_outer(), self._outers, strict=True)
            self.fragments = [self._fragment(places, outer) for places, outer in pairs]

    def _parts_with_outer(self) -> list[list[int]]:
        n_fragments = self._strategy.fragments
        numbers = _fragment_of(list(self._wholes.values()), n_fragments)
        fragments = [numbers[self._wholes[id(target)].path] for target in self.targets]
        return [[i for i, f in enumerate(fragments) if f == n] for n in range(n_fragments)]

    def _fragment(self, places: list[int], outer: Any) -> Fragment:
        few = [i for i in places if i in self._few]
        rest = [i for i in places if i not in self._few]
        messages = [*self._messages(rest, False), *self._messages(few, True)]
        return Fragment(messages, outer, tf.Variable(_NOTHING, dtype=tf.int64, trainable=False))

    def _messages(self, places: list[int], is_few: bool) -> Iterator[Message]:
        targets = [self.targets[i] for i in places]
        buckets = messages_of(targets) if targets else ()
        parts = (by_device(bucket, lambda i: device_of(targets[i])) for bucket in buckets)
        for bucket in chain(*parts):
            bucket_variables = [raw_variable(targets[i]) for i in bucket]
            sent = tf.zeros(
                [sum(v.shape.num_elements() for v in bucket_variables)], bucket_variables[0].dtype
            )
            packed = self._compression.compress(sent)[0]
            first, arrived = (tf.Variable(vector, trainable=False) for vector in (sent, packed))
            numbers = [places[i] for i in bucket]
            common = [self._common[i] for i in numbers if self._common]
            kept: list[tf.Variable] | None = None
            if is_few and self.residuals is not None:
                kept = self.residuals.kept([targets[i] for i in bucket])
            yield Message(numbers, bucket_variables, common, first, arrived, kept)

    @property
    def variables(self) -> list[Any]:
        """State that an exact resume needs. Waits for what is on its way."""
        state: list[Any] = [self.overlap, self.steps_per_average, self._has_report]
        state += [self._squares, self._reported]
        for fragment in self.fragments:
            state.append(fragment.left)
            state += [vector for m in fragment.messages for vector in (m.sent, m.means)]
            self._await([v for m in fragment.messages for v in m.residuals or ()])
        self._await(state)
        return [*super().variables, *state]

    def _in_flight(self, target: keras.Variable) -> list[Any]:
        fragment, message, number = self._message_of(target)
        if int(fragment.left.numpy()) == _NOTHING:
            return super()._in_flight(target)
        return [message.sent, message.means, message.common[number]]

    def _place_in_message(self, target: keras.Variable) -> int:
        _, message, number = self._message_of(target)
        return sum(math.prod(v.shape) for v in message.variables[:number])

    def _message_of(self, target: keras.Variable) -> tuple[Fragment, Message, int]:
        """Return where a target is sent, and its number in that message."""
        number = next(i for i, variable in enumerate(self.targets) if variable is target)
        pairs = ((f, m) for f in self.fragments for m in f.messages)
        fragment, message = next(pair for pair in pairs if number in pair[1].places)
        return fragment, message, message.places.index(number)

    # In the traced step

    def _count_update(self, reduced: Reduced) -> None:
        """Merge and send what is due. Called in the traced step, after the update."""
        reached = self.since + 1
        is_full = reached >= self.interval
        position = tf.where(is_full, tf.zeros_like(reached), reached)
        n = len(self.fragments)
        for i, fragment in enumerate(self.fragments):
            left = tf.maximum(fragment.left - 1, _NOTHING)
            merges = (fragment.left > _NOTHING) & (left <= _NOTHING)
            when(merges, partial(self._merge, fragment))
            # An interval that has just become shorter may ask for a fragment that is on its way.
            sends = (position == i * self.interval // n) & (left <= _NOTHING)
            when(sends, partial(self._send, fragment))
            if self._waits:
                when(sends, partial(self._merge, fragment))
            else:
                left = tf.where(sends, self.overlap, left)
            fragment.left.assign(left)
        self._count(is_full, reached)

    def _send(self, fragment: Fragment) -> tf.Tensor:
        when(self._has_report, self._read_report)
        call, mean = Call(self.across, LABEL), Reduction(postscale=1.0 / self.across.size)
        for message in fragment.messages:
            now = _vector(message.variables)
            message.sent.assign(now)
            if message.residuals is not None:
                self._send_few(message, call, mean)
                continue
            now = now - _vector(message.common) if self._common else now
            packed = self._compression.compress(now)[0]
            runtime.backend().post_allreduce([packed], [message.means], call, mean)
        return tf.zeros([], tf.float64)

    def _send_few(self, message: Message, call: Call, mean: Reduction) -> None:
        assert self.residuals is not None and message.residuals is not None
        pairs = zip(message.variables, message.common, strict=True)
        changes = [now.read_value() - raw_variable(last).read_value() for now, last in pairs]
        coding = self.residuals.coding([self._cuts[i] for i in message.places])
        post = runtime.backend().post_coded
        post(changes, message.means, message.residuals, coding, call, mean)

    def _merge(self, fragment: Fragment) -> tf.Tensor:
        self._await([v for message in fragment.messages for v in message.arriving])
        means = new = [tf.cast(m.means.value(), m.sent.dtype) for m in fragment.messages]
        if self._common:  # changes have arrived
            pairs = zip(fragment.messages, means, strict=True)
            means = [_vector(message.common) + change for message, change in pairs]
            self._move_common_to(means, fragment)
            new = [_vector(message.common) for message in fragment.messages]
        weight = self._strategy.merge
        self.report.note([*(common for m in fragment.messages for common in m.common), *means])
        for message, mean, after in zip(fragment.messages, means, new, strict=True):
            sent = message.sent.value()
            vectors = mean, sent, after, sent if weight is None else after
            kept = 1.0 if weight is None else weight
            squares = runtime.backend().merge(message.variables, vectors, kept)
            self._squares.assign_add(self.report.by_layer(message.places, squares))
            for variable in (self.targets[i] for i in message.places):
                if variable.constraint is not None and not self._is_exact:
                    set_constrained(variable, variable.value)
        if fragment is self.fragments[-1]:
            self._post_report()
        return tf.zeros([], tf.float64)

    def _move_common_to(self, means: Sequence[tf.Tensor], fragment: Fragment) -> None:
        common = [c for message in fragment.messages for c in message.common]
        parts: list[tf.Tensor] = []
        for message, mean in zip(fragment.messages, means, strict=True):
            parts += tf.split(mean, [v.shape.num_elements() for v in message.variables])
        pairs = zip(parts, common, strict=True)
        self._move_common(fragment.outer, common, [tf.reshape(p, c.shape) for p, c in pairs])

    def _post_report(self) -> None:
        call = Call(runtime.world(), "posted distances of models")
        report_here = self.report.vector(self._squares.value())
        runtime.backend().post_allreduce([report_here], [self._reported], call, Reduction())
        self._squares.assign(tf.zeros_like(self._squares))
        self._has_report.assign(True)

    def _read_report(self) -> tf.Tensor:
        self._await([self._reported])
        self._has_report.assign(False)
        return self.report.take(self._reported.value())

    def _await(self, variables: Sequence[tf.Variable], is_write: bool = False) -> None:
        if variables:
            runtime.backend().await_variables([v.handle for v in variables], is_write)

    # Between steps

    @property
    def is_final(self) -> bool:
        """True if `overlap` was given, or has been measured."""
        return self._strategy.overlap != "auto" or float(self.steps_per_average.numpy()) > 0

    def choose_overlap(self, n_steps: int, steps_per_average: float) -> None:
        """Set the overlap of averages that are sent from now on, equal on all ranks."""
        self.overlap.assign(n_steps)
        self.steps_per_average.assign(steps_per_average)

    def _take(self, values: Sequence[np.ndarray]) -> None:
        """As for `GroupAverage`; a measured overlap is kept, a given one is the program's."""
        super()._take(values)
        first = self._strategy.first_overlap
        if self._strategy.overlap != "auto":
            self.steps_per_average.assign(0.0)
        is_measured = float(self.steps_per_average.numpy()) > 0
        self.overlap.assign(min(first, int(self.overlap.numpy())) if is_measured else first)

    def record(self) -> dict[str, Any]:
        """As for `GroupAverage`, with the overlap of averages that are sent next."""
        measured = float(self.steps_per_average.numpy())
        return {
            **super().record(),
            "overlap": int(self.overlap.numpy()),
            "steps_per_average": measured or None,
        }

    def start_from_here(self) -> None:
        """Use the present parameters, equal in all groups, as the last average."""
        self._drop()
        super().start_from_here()

    def _drop(self) -> None:
        """Forget what is on its way, and begin an interval."""
        for fragment in self.fragments:
            arriving = [v for message in fragment.messages for v in message.arriving]
            self._await(arriving, is_write=True)
            fragment.left.assign(_NOTHING)
        self._await([self._reported], is_write=True)
        self._has_report.assign(False)
        self._squares.assign(tf.zeros_like(self._squares))
        self.since.assign(0)


def _vector(variables: Sequence[Any]) -> tf.Tensor:
    """Return all elements of variables, one after another."""
    return tf.concat([tf.reshape(raw_variable(v), [-1]) for v in variables], 0)


def _fragment_of(variables: Sequence[keras.Variable], n_fragments: int) -> dict[str, int]:
    """Return the fragment of each variable by its path; layers are not cut.

    Each layer, in the order of the model, joins the fragment that has the fewest bytes so far.
    """
    sizes = [0] * n_fragments
    numbers: dict[str, int] = {}
    for places in layers_of([variable.path for variable in variables]):
        layer_variables = [variables[i] for i in places]
        smallest = sizes.index(min(sizes))
        sizes[smallest] += n_bytes(layer_variables)
        numbers |= {variable.path: smallest for variable in layer_variables}
    return numbers
