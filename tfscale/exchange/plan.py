"""Exchange plans: one frozen description of the way of each gradient, compiled by every strategy.

A strategy is given a `Table` of the trainable parameters and returns an `ExchangePlan`: parts in
slot order, each of them gradients that are one message, and the buckets of the parameters that
ranks update piece by piece and gather afterwards. `exchange.executor` runs it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, Scaling
from tfscale.comm.collectives import allreduce_sparse
from tfscale.comm.eager import agree, header_of
from tfscale.comm.runtime import reduction_of
from tfscale.config import ConfigError
from tfscale.exchange.shards import Shards, label_of, name_of
from tfscale.plan.buckets import Bucket, GradientSpec, group_buckets
from tfscale.plan.segments import SegmentedBucket, row_cuts

# "rows": IndexedSlices. "replicated", "partial": of the whole batch already, all of it or this
# rank's rows, as the calls of a dense layer have made it. "none": not in this step.
Gradient = Literal["none", "dense", "rows", "replicated", "partial"]
ChooseBuckets = Callable[[list[GradientSpec]], Sequence[Bucket]]


@dataclass(frozen=True)
class GradientOptions:
    """How gradients are reduced; the same for every strategy.

    Attributes:
        op: "Average" or "Sum".
        predivide: Divide by this before the sum and by size / predivide after it (Average).
        compression: See `tfscale.Compression`.
        sparse_as_dense: Make IndexedSlices dense first.
        num_groups: Number of buckets; 0 leaves it to the strategy.
        groups: Variables that are sent together, by object, or a number of buckets as in Horovod,
            which becomes `num_groups`; None leaves it to the strategy.
    """

    op: str = "Average"
    predivide: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    num_groups: int = 0
    groups: Any = None

    def __post_init__(self) -> None:
        """Check what users choose."""
        if isinstance(self.groups, int):
            object.__setattr__(self, "num_groups", self.groups)  # a frozen dataclass's own way
            object.__setattr__(self, "groups", None)
        if self.op not in (runtime.Average, runtime.Sum):
            raise ConfigError(f"op must be Average or Sum for gradients. Received: op={self.op!r}.")
        if self.predivide != 1.0 and self.op != runtime.Average:
            raise ConfigError(
                "gradient_predivide_factor needs op=Average. "
                f"Received: gradient_predivide_factor={self.predivide}, op={self.op}."
            )
        if not self.predivide > 0:
            raise ConfigError(
                "gradient_predivide_factor must be greater than 0. "
                f"Received: gradient_predivide_factor={self.predivide}."
            )
        if not hasattr(self.compression, "compress"):
            raise ConfigError(
                "compression must be Compression.none, Compression.fp16 or Compression.bf16. "
                f"Received: compression={self.compression!r}."
            )
        groups = [] if self.groups is None else self.groups
        is_list = isinstance(groups, list | tuple)
        if (
            self.num_groups < 0
            or not is_list
            or not all(isinstance(g, list | tuple) for g in groups)
        ):
            raise ConfigError(
                "groups must be a number of 0 or more, or lists of variables that are sent "
                f"together. Received: num_groups={self.num_groups}, groups={self.groups!r}."
            )

    def factors(self) -> Scaling:
        """Return what is multiplied before and after the sum, besides the mean's division."""
        return Scaling(1.0 / self.predivide, self.predivide)


@dataclass(frozen=True)
class Parameter:
    """A trainable variable as strategies see it.

    Attributes:
        spec: Path, shape and dtype of the variable.
        wire_dtype: Dtype in which its gradient is sent.
        gradient: Form of its gradient in the step that is traced.
        is_local: Its gradient stays on its rank.
        is_whole: One rank must own all of it, if ranks own parts.
        row_bucket: Position of the dense kernel, this one or this bias's, that is cut between rows;
            -1 for all others.
    """

    spec: GradientSpec
    wire_dtype: str
    gradient: Gradient = "none"
    is_local: bool = False
    is_whole: bool = False
    row_bucket: int = -1


@dataclass(frozen=True)
class Table:
    """The trainable parameters, in the order of the model.

    Attributes:
        parameters: One for each variable.
        messages: Positions of gradients that the user wants in one message each; instead of the
            strategy's buckets.
        n_messages: Number of messages that the user wants instead; 0 leaves it to the strategy.
    """

    parameters: tuple[Parameter, ...]
    messages: tuple[tuple[int, ...], ...] | None = None
    n_messages: int = 0

    @property
    def shared(self) -> list[int]:
        """Positions of the parameters that are equal on all ranks."""
        return [i for i, p in enumerate(self.parameters) if not p.is_local]

    def given(self, *forms: Gradient) -> list[int]:
        """Return positions of the shared parameters whose gradients have one of some forms."""
        return [i for i in self.shared if self.parameters[i].gradient in forms]

    def buckets(self, positions: Sequence[int], choose: ChooseBuckets) -> list[tuple[int, ...]]:
        """Return positions for each message of dense gradients, in the order of their slots.

        `choose` returns the strategy's buckets, where the user wants no others.
        """
        chosen = [self.parameters[i] for i in positions]
        specs = [replace(p.spec, dtype=p.wire_dtype) for p in chosen]
        if self.messages is not None:
            places = {i: place for place, i in enumerate(positions)}
            groups = [[places[i] for i in message if i in places] for message in self.messages]
            buckets = group_buckets(specs, [group for group in groups if group])
        elif self.n_messages > 0 and specs:
            n = -(-len(specs) // self.n_messages)
            runs = [list(range(i, min(i + n, len(specs)))) for i in range(0, len(specs), n)]
            buckets = group_buckets(specs, runs)
        else:
            buckets = tuple(choose(specs))
        return [tuple(positions[place] for place in bucket) for bucket in buckets]


@dataclass(frozen=True)
class Wire:
    """The ranks, options and variables with which parts send gradients.

    Attributes:
        group: The ranks that exchange.
        options: As chosen by the user.
        variables: The model's, in the order of the table; a tape's sources may be tensors.
        shards: The pieces that this rank owns; None where it updates whole variables.
    """

    group: Group
    options: GradientOptions
    variables: Sequence[Any]
    shards: Shards | None = None

    def call(self, indices: Sequence[int], group: Group | None = None) -> Call:
        """Return a collective's label and order for the gradients of some variables."""
        chosen = [self.variables[i] for i in indices]
        names = [name_of(v) for v in chosen]
        # Sources of a tape may be tensors, which have no handle.
        after = tuple(v.handle for v in chosen if hasattr(v, "handle"))
        return Call(group or self.group, label_of(names), after, names=tuple(names))

    def scaling(self, tensors: Sequence[tf.Tensor]) -> Scaling:
        """Return the factors before and after a sum of all ranks' tensors."""
        options = self.options
        return reduction_of(options.op, options.factors(), self.group.size, tensors)[1]

    def allreduce(
        self, tensors: Sequence[tf.Tensor], call: Call, scaling: Scaling
    ) -> list[tf.Tensor]:
        """Sum tensors over the ranks of a call, as one message. Collective."""
        if tf.executing_eagerly():
            agree(header_of("gradients", [], list(tensors), call.label), call.group)
        return runtime.backend().allreduce(tensors, call, ReduceOp.SUM, scaling)


@dataclass(frozen=True)
class Part(abc.ABC):
    """Gradients that are exchanged together; subclasses say in which way.

    Attributes:
        indices: Positions in the table, in the order of the message.
    """

    indices: tuple[int, ...]

    @property
    def ready(self) -> int:
        """The position whose gradient completes the part: back-propagation ends with the first."""
        return min(self.indices)

    @abc.abstractmethod
    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Return the gradients that this rank's update takes. Collective, in slot order.

        `gradients` are this rank's, by position; dense ones are compressed.
        """


@dataclass(frozen=True)
class Sum(Part):
    """Dense gradients whose sum every rank receives."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum each gradient over the ranks."""
        tensors = [gradients[i] for i in self.indices]
        sums = wire.allreduce(tensors, wire.call(self.indices), wire.scaling(tensors))
        return dict(zip(self.indices, sums, strict=True))


@dataclass(frozen=True)
class Rows(Part):
    """The sparse gradient of one variable, whose rows every rank gathers."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Gather the rows."""
        (i,) = self.indices
        options, call = wire.options, wire.call(self.indices)
        return {i: allreduce_sparse(gradients[i], options.op, options.factors(), call)}


@dataclass(frozen=True)
class Replicated(Part):
    """The gradient of one weight of a dense layer, of the whole batch on every rank already."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Return it as it is."""
        del wire
        return {i: gradients[i] for i in self.indices}


@dataclass(frozen=True)
class CutPart(Part):
    """Gradients of parameters that are cut.

    Attributes:
        segment: The bucket that the variables lie in, perhaps with others.
    """

    segment: SegmentedBucket

    @property
    def ready(self) -> int:
        """As of the whole bucket, whichever of its gradients a step has."""
        return min(self.segment.indices)


@dataclass(frozen=True)
class Scatter(CutPart):
    """Dense gradients of which each rank receives the sum of its own segment."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum the own segment over the ranks and cut it into the gradients of the own pieces."""
        assert wire.shards is not None
        counts = [
            sum(p.count for p in self.segment.pieces(rank) if p.variable in self.indices)
            for rank in range(wire.group.size)
        ]
        tensors = [gradients[i] for i in self.indices]
        call = wire.shards.call("gradients", self.indices)
        flat = runtime.backend().scatter_reduce(
            tensors, counts, call, ReduceOp.SUM, wire.scaling(tensors)
        )
        results: dict[int, Any] = {}
        begin = 0
        for i in self.indices:
            n = wire.shards.n_owned(i)
            results[i] = wire.shards.shaped(i, flat[begin : begin + n])
            begin += n
        return results


@dataclass(frozen=True)
class Partial(CutPart):
    """The gradient of one weight of a dense layer, of the whole batch, for this rank's piece.

    Attributes:
        has_own_rows: The gradient has this rank's rows only.
    """

    has_own_rows: bool

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Return the own piece's part."""
        assert wire.shards is not None
        (i,) = self.indices
        if self.has_own_rows:
            rows = _own_rows(gradients[i], wire.variables[i].shape[0], wire.group)
            return {i: tf.reshape(rows, [-1])}
        return {i: wire.shards.part(i, tf.convert_to_tensor(gradients[i]))}


@dataclass(frozen=True)
class ExchangePlan:
    """The exchange of all gradients of a step, and of the parameters after it.

    Attributes:
        table: The parameters.
        parts: In slot order: that in which gradients become ready. Each parameter that has a
            gradient and is not local is in one of them.
        segments: Buckets of the parameters that are cut, in forward order. This rank updates its
            own pieces of them and publishes these; it updates all other parameters whole.
        overlap: False sends nothing before all gradients exist.
    """

    table: Table
    parts: tuple[Part, ...]
    segments: tuple[SegmentedBucket, ...] = ()
    overlap: bool = True


def compile_plan(
    table: Table,
    choose: ChooseBuckets,
    segments: Sequence[SegmentedBucket] = (),
    overlap: bool = True,
    sum_part: Callable[[tuple[int, ...]], Part] = Sum,
) -> ExchangePlan:
    """Return the plan of some buckets.

    Args:
        table: The parameters.
        choose: Returns the buckets of gradients that are summed whole.
        segments: Buckets of the parameters that are cut; see `cut_parameters`.
        overlap: False sends nothing before all gradients exist.
        sum_part: Makes the part of a bucket of `choose`.

    Raises:
        PlanError: Messages that the user chose overlap.
    """
    cut = {i for bucket in segments for i in bucket.indices}
    dense = [i for i in table.given("dense") if i not in cut]
    parts = [sum_part(indices) for indices in table.buckets(dense, choose)]
    parts += [Replicated((i,)) for i in table.given("replicated", "partial") if i not in cut]
    given = set(table.given("dense", "rows"))
    made = {i: table.parameters[i].gradient for i in table.given("replicated", "partial")}
    for bucket in segments:
        indices = tuple(i for i in bucket.indices if i in given)
        if indices:
            parts.append(Scatter(indices, bucket))
        parts += [Partial((i,), bucket, made[i] == "partial") for i in bucket.indices if i in made]
    parts.sort(key=lambda part: -part.ready)  # stable: what a layer has made follows its bucket
    # Slots start in this order, and an embedding's gradient is the last of back-propagation.
    parts += [Rows((i,)) for i in table.given("rows") if i not in cut]
    return ExchangePlan(table, tuple(parts), tuple(segments), overlap)


def cut_parameters(
    table: Table,
    positions: Sequence[int],
    lay_out: Callable[
        [list[GradientSpec], frozenset[int], list[tuple[int, ...]]], Sequence[SegmentedBucket]
    ],
) -> tuple[SegmentedBucket, ...]:
    """Return the buckets of the parameters that are cut, in forward order.

    The result depends on what does not change during training alone, so that a rank's pieces stay.

    Args:
        table: The parameters.
        positions: Of those that are cut.
        lay_out: Returns the buckets of some specs, given which of them must not be cut and which
            are cut between rows.
    """
    places = {i: place for place, i in enumerate(positions)}
    chosen = [table.parameters[i] for i in positions]
    whole = frozenset(place for place, p in enumerate(chosen) if p.is_whole)
    rows: dict[int, list[int]] = {}
    for i, place in places.items():
        kernel = table.parameters[i].row_bucket
        if kernel in places:
            rows.setdefault(kernel, []).append(place)
    # The kernel comes first, whatever the order of the variables.
    by_rows = [tuple(sorted(own, key=lambda p: p != places[k])) for k, own in rows.items()]
    buckets = lay_out([p.spec for p in chosen], whole, by_rows)
    return tuple(replace(b, indices=tuple(positions[p] for p in b.indices)) for b in buckets)


def values_of(gradient: Any) -> tf.Tensor:
    """Return a gradient, or the values of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _own_rows(gradient: Any, n_in: int, group: Group) -> tf.Tensor:
    """Return this rank's rows of a partial gradient of a kernel with `n_in` rows.

    It is IndexedSlices as `PartialCall` makes them, or a sum of several for a layer that is called
    more than once; or a tensor of the kernel's (or bias's) shape.
    """
    begin, end = row_cuts(n_in, group.size)[group.rank :][:2]
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[begin:end]
    if gradient.values.shape[0] == end - begin:
        return gradient.values
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices - begin, end - begin)
