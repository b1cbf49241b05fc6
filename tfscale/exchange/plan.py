"""Exchange plans: frozen descriptions of a step's exchange, compiled by every strategy.

A strategy compiles a `Table` of the trainable parameters to an `ExchangePlan`. The plan has parts
in slot order, each of them the gradients of one message, and buckets of the parameters that ranks
update in pieces and gather afterwards. `exchange.executor` executes it.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from tfscale.comm import eager, runtime
from tfscale.comm.backends.base import Call, Group, Reduction
from tfscale.comm.collectives import allreduce_sparse
from tfscale.comm.compression import QuantizedCompressor
from tfscale.config import ConfigError, PlanError, require
from tfscale.exchange import batch_shares as shares
from tfscale.exchange.residuals import Cuts, Residuals, Update
from tfscale.exchange.shards import Shards, label_of, name_of
from tfscale.internals.keras import by_device
from tfscale.plan.buckets import Bucket, GradientSpec, Kind, group_buckets
from tfscale.plan.segments import SegmentedBucket, block_cuts, build_segments, row_cuts

QUANTIZED = ("int8", "int4")  # dtypes on the wire
ChooseBuckets = Callable[[list[GradientSpec]], Sequence[Bucket]]


@dataclass(frozen=True)
class GradientOptions:
    """Options for the reduction of gradients, the same for every strategy."""

    op: str = "Average"  # or "Sum"
    predivide: float = 1.0  # divides before the sum; size / predivide divides after it (Average)
    compression: Any = None  # see `tfscale.Compression`
    sparse_as_dense: bool = False
    repeated_indices: str = "sum"  # or "keras": rows stay apart
    num_groups: int = 0  # number of buckets; 0: chosen by the strategy
    # Lists of variables that are sent together, or a number of buckets as in Horovod, which becomes
    # `num_groups`; None: chosen by the strategy.
    groups: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.groups, int):
            object.__setattr__(self, "num_groups", self.groups)  # the dataclass is frozen
            object.__setattr__(self, "groups", None)
        fits = self.op in (runtime.Average, runtime.Sum)
        require(fits, "op", "Average or Sum for gradients", self.op)
        if self.predivide != 1.0 and self.op != runtime.Average:
            raise ConfigError(
                "gradient_predivide_factor needs op=Average. "
                f"Received: gradient_predivide_factor={self.predivide}, op={self.op}."
            )
        require(self.predivide > 0, "gradient_predivide_factor", "greater than 0", self.predivide)
        choices = "'sum' or 'keras'"
        fits = self.repeated_indices in ("sum", "keras")
        require(fits, "repeated_indices", choices, self.repeated_indices)
        choices = "Compression.none, fp16, bf16, int8, int4, low_rank or sparse"
        require(hasattr(self.compression, "compress"), "compression", choices, self.compression)
        groups = [] if self.groups is None else self.groups
        fits = isinstance(groups, list | tuple)
        fits = fits and all(isinstance(group, list | tuple) for group in groups)
        if self.num_groups < 0 or not fits:
            raise ConfigError(
                "groups must be a number of 0 or more, or lists of variables that are sent "
                f"together. Received: num_groups={self.num_groups}, groups={self.groups!r}."
            )

    def reduction(self, size: int) -> Reduction:
        """Return the sum over `size` ranks, with the factors before and after it."""
        return runtime.reduction_of(self.op, size, 1.0 / self.predivide, self.predivide)


@dataclass(frozen=True)
class Parameter:
    """A trainable variable as strategies see it."""

    spec: GradientSpec  # path, shape and dtype of the variable
    wire_dtype: str  # dtype in which its gradient is sent, or a key of `_SUMS`
    gradient: Kind = "none"  # "rows" of IndexedSlices; "weights", or what a dense layer computed
    is_local: bool = False  # whether its gradient stays on its rank
    is_whole: bool = False  # whether one rank must own all of it, if parameters are cut
    device: str = ""  # of the variable
    # For a dense kernel that is cut between rows, and for its bias: the kernel's position; else -1.
    row_bucket: int = -1


@dataclass(frozen=True)
class Table:
    """The trainable parameters, in the order of the model."""

    parameters: tuple[Parameter, ...]
    # Messages that the user chose instead of the strategy's buckets: the positions of the gradients
    # of each, or their number; None and 0 leave them to the strategy.
    messages: tuple[tuple[int, ...], ...] | None = None
    n_messages: int = 0

    @property
    def shared(self) -> list[int]:
        """Positions of the parameters that are equal on all ranks."""
        return [i for i, p in enumerate(self.parameters) if not p.is_local]

    def with_gradients(self, *kinds: Kind) -> list[int]:
        """Return positions of the shared parameters with gradients of the given kinds."""
        return [i for i in self.shared if self.parameters[i].gradient in kinds]

    def buckets(self, positions: Sequence[int], choose: ChooseBuckets) -> list[tuple[int, ...]]:
        """Return the positions of each message of dense gradients, in slot order.

        `choose` returns the strategy's buckets, which are used unless the user chose messages. A
        collective takes the variables of one device: buckets with those of several are split.
        """
        chosen = [self.parameters[i] for i in positions]
        specs = [replace(p.spec, dtype=p.wire_dtype) for p in chosen]
        if self.messages is not None:
            places = {i: position for position, i in enumerate(positions)}
            groups = [[places[i] for i in message if i in places] for message in self.messages]
            buckets = group_buckets(specs, [group for group in groups if group])
        elif self.n_messages > 0 and specs:
            n = -(-len(specs) // self.n_messages)
            runs = [list(range(i, min(i + n, len(specs)))) for i in range(0, len(specs), n)]
            buckets = group_buckets(specs, runs)
        else:
            buckets = tuple(choose(specs))
        return [
            tuple(positions[position] for position in part)
            for bucket in buckets
            for part in by_device(bucket, lambda position: chosen[position].device)
        ]


@dataclass(frozen=True)
class Wire:
    """The ranks, options and variables with which parts send gradients."""

    group: Group
    options: GradientOptions
    variables: Sequence[Any]  # in the order of the table; sources of a tape may be tensors
    shards: Shards | None = None  # None if every rank updates whole variables
    residuals: Residuals | None = None  # of gradients that are quantised
    # Next values of residuals, which the parts add.
    updates: list[Update] = field(default_factory=list, compare=False)
    # What else is to be sent: the first sum takes it. `checks` is what the update must wait for.
    riders: list[shares.Rider] = field(default_factory=list, compare=False)
    checks: list[tf.Tensor] = field(default_factory=list, compare=False)

    @property
    def cut(self) -> Shards:
        """The pieces of the parameters that are cut."""
        if self.shards is None:
            raise PlanError(
                "plan() may return segments only where updates are of pieces. Received: segments, "
                "and whole variables. Set `is_sharding = True` in the strategy, and let `whole()` "
                "return one without segments, for uses that cannot cut, such as a tape."
            )
        return self.shards

    def call(self, indices: Sequence[int], group: Group | None = None) -> Call:
        """Return label and order of a collective for the gradients of some variables."""
        chosen = [self.variables[i] for i in indices]
        names = [name_of(v) for v in chosen]
        # Sources of a tape may be tensors, which have no handle.
        after = tuple(v.handle for v in chosen if hasattr(v, "handle"))
        return Call(group or self.group, label_of(names), after, names=tuple(names))

    def reduction(self, tensors: Sequence[tf.Tensor]) -> Reduction:
        """Return op and factors that reduce tensors; ConfigError if a dtype cannot be summed."""
        runtime.require_reducible(tensors)
        return self.options.reduction(self.group.size)

    def quantized(
        self,
        tensors: Sequence[tf.Tensor],
        call: Call,
        indices: Sequence[int],
        parts: Sequence[Cuts] | None = None,
    ) -> list[tf.Tensor]:
        """Sum tensors over the ranks, sent with few bits, as one message. Collective.

        With `parts`, the cuts of each tensor between ranks, the result is one flat tensor: this
        rank's parts of the sums.
        """
        assert self.residuals is not None
        compression = self.residuals.compression
        assert isinstance(compression, QuantizedCompressor)
        if tf.executing_eagerly():
            eager.agree(eager.header_of("gradients", [], list(tensors), call.label), call.group)
        chosen, size = [self.variables[i] for i in indices], self.group.size
        reduction = self.options.reduction(size)
        cuts = parts or [block_cuts(math.prod(t.shape), compression.block, size) for t in tensors]
        quantization = self.residuals.quantization(
            chosen, cuts, self.group, reduction.postscale, rounds_sum=parts is None
        )
        backend = runtime.backend()
        collective = backend.quantized_scatter if parts else backend.quantized_allreduce
        result = collective(tensors, quantization, call, reduction)
        self.updates.extend(self.residuals.updates(chosen, result))
        return result.sums

    def allreduce(
        self, tensors: Sequence[tf.Tensor], call: Call, reduction: Reduction
    ) -> list[tf.Tensor]:
        """Sum tensors over the ranks of a call, as one message. Collective."""
        if tf.executing_eagerly():
            eager.agree(eager.header_of("gradients", [], list(tensors), call.label), call.group)
        return runtime.backend().allreduce(tensors, call, reduction)


@dataclass(frozen=True)
class Part(abc.ABC):
    """Gradients that are exchanged together, by the method of the subclass."""

    indices: tuple[int, ...]  # positions in the table, in the order of the message

    @abc.abstractmethod
    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Return the gradients that this rank's update uses. Collective, in slot order.

        `gradients` are this rank's, by position; dense ones are compressed.
        """


@dataclass(frozen=True)
class Sum(Part):
    """Dense gradients whose sum every rank receives."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum each gradient over the ranks."""
        tensors = [gradients[i] for i in self.indices]
        call, reduction = wire.call(self.indices), wire.reduction(tensors)
        riders = [wire.riders.pop()] if wire.riders else []
        if riders:
            tensors += [tf.cast(rider.signs, tensors[0].dtype) for rider in riders]
            call = replace(call, names=(*call.names, "signs of the batch"))
        sums = wire.allreduce(tensors, call, reduction)
        for rider, total in zip(riders, sums[len(self.indices) :], strict=True):
            factor = reduction.prescale * reduction.postscale
            wire.checks.extend(rider.check(total, wire.group.size, factor))
        return dict(zip(self.indices, sums, strict=False))


@dataclass(frozen=True)
class QuantizedSum(Part):
    """Dense gradients whose sum every rank receives, sent with few bits per value."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum each gradient over the ranks."""
        tensors = [gradients[i] for i in self.indices]
        sums = wire.quantized(tensors, wire.call(self.indices), self.indices)
        return dict(zip(self.indices, sums, strict=True))


@dataclass(frozen=True)
class LowRankSum(Part):
    """Dense gradients whose sum every rank receives, sent as two factors each.

    With this rank's matrix M and Q of the step before, ranks take one step of subspace iteration:

        P = orthonormal basis of sum(M Q),  Q = sum(M^T P),  the result is P Q^T

    M - P P^T M is left for the next step. The mean of what ranks have left is what the result
    lacks, since all of this is linear in M. Unlike the variant that computes P and Q in turn, it is
    exact for matrices of that rank, and sends messages of the same shapes in each step.

    Source: Vogels et al. (2019), algorithm 1.
    """

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum each gradient over the ranks."""
        assert wire.residuals is not None
        tensors = [gradients[i] for i in self.indices]
        call, reduction = wire.call(self.indices), wire.reduction(tensors)
        later = replace(call, label=f"{call.label} (second factors)", stream="second factors")
        factor, kept = reduction.prescale * reduction.postscale, []
        for i, t in zip(self.indices, tensors, strict=True):
            cuts = block_cuts(math.prod(t.shape), 1, wire.group.size)
            kept.append(wire.residuals.of(wire.variables[i], wire.group, cuts, factor))
        tensors = [t + residual.own for t, residual in zip(tensors, kept, strict=True)]
        bases = [residual.basis.read_value() for residual in kept]

        def as_factors() -> list[list[tf.Tensor]]:
            # Transposed, so that they are views of the kernels.
            matrices = [tf.reshape(t, [-1, t.shape[-1]]) for t in tensors]
            pairs = zip(matrices, bases, strict=True)
            left = [tf.matmul(m, q, transpose_a=True) for m, q in pairs]
            left = [tf.linalg.qr(p).q for p in wire.allreduce(left, call, reduction)]
            rank_factors = [tf.matmul(m, p) for m, p in zip(matrices, left, strict=True)]
            right = wire.allreduce(rank_factors, later, reduction)

            def products(factors: list[tf.Tensor]) -> list[tf.Tensor]:
                parts = zip(factors, left, tensors, strict=True)
                return [tf.reshape(tf.matmul(q, p, transpose_b=True), t.shape) for q, p, t in parts]

            errors = [t - sent for t, sent in zip(tensors, products(rank_factors), strict=True)]
            return [products(right), errors, right]

        def as_they_are() -> list[list[tf.Tensor]]:
            sums = wire.allreduce(tensors, call, reduction)
            return [sums, [tf.zeros_like(t) for t in tensors], bases]

        begun = wire.residuals.has_begun()
        results = as_factors() if begun is True else tf.cond(begun, as_factors, as_they_are)
        sums, errors, bases = results
        wire.updates.extend(zip([residual.own for residual in kept], errors, strict=True))
        wire.updates.extend(zip([residual.basis for residual in kept], bases, strict=True))
        return dict(zip(self.indices, sums, strict=True))


@dataclass(frozen=True)
class Rows(Part):
    """The sparse gradient of one variable, whose rows every rank gathers."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Gather the rows."""
        (i,) = self.indices
        reduction = wire.options.reduction(wire.group.size)
        keeps = wire.options.repeated_indices == "keras"
        call, slices = wire.call(self.indices), gradients[i]
        if keeps and shares.is_common(slices.values):  # one row for all samples: positions
            (values,) = runtime.backend().allreduce([slices.values], call, reduction)
            return {i: tf.IndexedSlices(values, slices.indices, slices.dense_shape)}
        return {i: allreduce_sparse(slices, reduction, call, keeps_repeats=keeps)}


@dataclass(frozen=True)
class Replicated(Part):
    """The gradient of a dense layer's weight that every rank has computed for the whole batch."""

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Return the gradient unchanged."""
        return {i: gradients[i] for i in self.indices}


@dataclass(frozen=True)
class Scatter(Part):
    """Dense gradients of which each rank receives the sum of its own segment."""

    segment: SegmentedBucket  # the bucket of these variables, perhaps with others

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Sum this rank's segment over the ranks and split it into gradients of its pieces."""
        shards = wire.cut
        tensors = [gradients[i] for i in self.indices]
        flat = self.scatter(tensors, shards.call("gradients", self.indices), wire)
        results: dict[int, Any] = {}
        begin = 0
        for i in self.indices:
            owned = shards.owned(i)
            end = begin + (owned.count if owned else 0)
            results[i] = shards.shaped(i, flat[begin:end])
            begin = end
        return results

    def scatter(self, tensors: Sequence[tf.Tensor], call: Call, wire: Wire) -> tf.Tensor:
        """Return this rank's pieces of the sums, one after another. Collective."""
        sent = frozenset(self.indices)
        counts = [
            sum(p.count for p in self.segment.pieces(rank) if p.variable in sent)
            for rank in range(wire.group.size)
        ]
        reduction = wire.reduction(tensors)
        return runtime.backend().scatter_reduce(tensors, counts, call, reduction)


@dataclass(frozen=True)
class QuantizedScatter(Scatter):
    """Dense gradients whose segments are sent with few bits per value."""

    def scatter(self, tensors: Sequence[tf.Tensor], call: Call, wire: Wire) -> tf.Tensor:
        """Return this rank's pieces of the sums, one after another. Collective."""
        stops: dict[int, list[int]] = {i: [0] for i in self.indices}
        for rank in range(wire.group.size):
            ends = {p.variable: p.stop for p in self.segment.pieces(rank)}
            for i, found in stops.items():
                found.append(ends.get(i, found[-1]))
        parts = [tuple(stops[i]) for i in self.indices]
        (flat,) = wire.quantized(tensors, call, self.indices, parts)
        return flat


@dataclass(frozen=True)
class Partial(Part):
    """The gradient of a dense layer's weight for the whole batch, for this rank's piece."""

    has_own_rows: bool  # whether the gradient has this rank's rows only

    def reduce(self, gradients: Mapping[int, Any], wire: Wire) -> dict[int, Any]:
        """Return the gradient of this rank's piece."""
        shards = wire.cut
        (i,) = self.indices
        if self.has_own_rows:
            rows = _own_rows(gradients[i], wire.variables[i].shape[0], wire.group)
            return {i: tf.reshape(rows, [-1])}
        return {i: shards.part(i, tf.convert_to_tensor(gradients[i]))}


@dataclass(frozen=True)
class ExchangePlan:
    """The exchange of all gradients of a step, and of the parameters after it."""

    # In slot order, in which gradients become ready. Each parameter that has a gradient and is not
    # local is in one part.
    parts: tuple[Part, ...]
    # Buckets of the parameters that are cut, in forward order. A rank updates and publishes its own
    # pieces of them; it updates all other parameters whole.
    segments: tuple[SegmentedBucket, ...] = ()
    overlap: bool = True  # False sends nothing before all gradients are ready


_SUMS: dict[str, type[Part]] = {"low_rank": LowRankSum, **dict.fromkeys(QUANTIZED, QuantizedSum)}


def compile_plan(
    table: Table,
    choose: ChooseBuckets,
    segments: Sequence[SegmentedBucket] = (),
    overlap: bool = True,
    sum_part: Callable[[tuple[int, ...]], Part] = Sum,
) -> ExchangePlan:
    """Return a plan that scatters the gradients of cut parameters and sums all others.

    `choose` returns the buckets of gradients that are summed whole, `sum_part` a part for each;
    `segments` are the buckets of `cut_parameters`. Without `overlap` all gradients are awaited
    first. It is a PlanError if messages that the user chose overlap.
    """
    cut = {i for bucket in segments for i in bucket.indices}
    dense = [i for i in table.with_gradients("weights") if i not in cut]
    made = {i: table.parameters[i].gradient for i in table.with_gradients("replicated", "partial")}
    # Each part with the position of its last gradient: back-propagation ends with position 0.
    ordered: list[tuple[int, Part]] = []
    for indices in table.buckets(dense, choose):  # of one dtype each
        lossy = _SUMS.get(table.parameters[indices[0]].wire_dtype, Sum)
        part = lossy if sum_part is Sum else sum_part
        ordered.append((min(indices), part(indices)))
    ordered += [(i, Replicated((i,))) for i in made if i not in cut]
    sent = set(table.with_gradients("weights", "rows"))
    for bucket in segments:
        # Of the whole bucket, even if a step has only some of its gradients.
        last, indices = min(bucket.indices), tuple(i for i in bucket.indices if i in sent)
        few = tuple(i for i in indices if table.parameters[i].wire_dtype in QUANTIZED)
        exact = tuple(i for i in indices if table.parameters[i].wire_dtype not in QUANTIZED)
        ordered += [(last, QuantizedScatter(few, bucket))] if few else []
        ordered += [(last, Scatter(exact, bucket))] if exact else []
        ordered += [
            (last, Partial((i,), made[i] == "partial")) for i in bucket.indices if i in made
        ]
    # A stable sort: a dense layer's gradients follow their bucket.
    parts = [part for _, part in sorted(ordered, key=lambda pair: -pair[0])]
    # Slots start in this order, and an embedding's gradient is the last of back-propagation.
    parts += [Rows((i,)) for i in table.with_gradients("rows") if i not in cut]
    return ExchangePlan(tuple(parts), tuple(segments), overlap)


def cut_parameters(
    table: Table,
    positions: Sequence[int],
    size: int,
    bucket_bytes: int = 0,
    paths: Sequence[Sequence[str]] | None = None,
) -> tuple[SegmentedBucket, ...]:
    """Return the buckets of the parameters that are cut among `size` ranks, in forward order.

    They have up to `bucket_bytes`, or the variables of the given `paths`; see `build_segments`.
    The result depends only on facts that do not change during training, so a rank keeps its pieces.
    """
    apart = by_device(positions, lambda i: table.parameters[i].device)
    if len(apart) > 1:
        parts = [
            cut_parameters(table, piece_places, size, bucket_bytes, paths) for piece_places in apart
        ]
        return tuple(sorted(itertools.chain(*parts), key=lambda bucket: bucket.indices))
    places = {i: position for position, i in enumerate(positions)}
    chosen = [table.parameters[i] for i in positions]
    whole = frozenset(position for position, p in enumerate(chosen) if p.is_whole)
    rows: dict[int, list[int]] = {}
    for i, position in places.items():
        kernel = table.parameters[i].row_bucket
        if kernel in places:
            rows.setdefault(kernel, []).append(position)
    # The kernel comes first, whatever the order of the variables.
    by_rows = [
        tuple(sorted(piece_places, key=lambda p: p != places[k]))
        for k, piece_places in rows.items()
    ]
    specs = [p.spec for p in chosen]
    groups = None if paths is None else places_of(specs, paths)
    buckets = build_segments(specs, size, bucket_bytes, whole, by_rows, groups)
    return tuple(replace(b, indices=tuple(positions[p] for p in b.indices)) for b in buckets)


def places_of(specs: Sequence[GradientSpec], groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the positions of paths in `specs`; paths of no spec are left out."""
    positions: dict[str, int] = {}
    for position, spec in enumerate(specs):
        positions.setdefault(spec.name, position)  # a second one of the same name is sent alone
    in_groups = [[positions[name] for name in group if name in positions] for group in groups]
    return [group for group in in_groups if group]


def values_of(gradient: Any) -> tf.Tensor:
    """Return a gradient, or the values of a sparse one."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _own_rows(gradient: Any, n_in: int, group: Group) -> tf.Tensor:
    """Return this rank's rows of a partial gradient of a kernel with `n_in` rows.

    The gradient is the IndexedSlices of `PartialCall`, their sum for a layer that is called more
    than once, or a tensor of the kernel's or bias's shape.
    """
    begin, end = row_cuts(n_in, group.size)[group.rank :][:2]
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[begin:end]
    if gradient.values.shape[0] == end - begin:
        return gradient.values
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices - begin, end - begin)
