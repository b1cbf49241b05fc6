"""The parameters a rank owns: variables of their own, beside the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Group, ReduceOp, gather_and_assign, raw_variable
from tfscale.comm.runtime import Average, scaling_of
from tfscale.config import ConfigError
from tfscale.exchange.base import GradientOptions
from tfscale.exchange.bucketed import name_of
from tfscale.exchange.dense import own_rows
from tfscale.exchange.dense_uses import Use, use_of
from tfscale.exchange.provenance import require_own
from tfscale.exchange.sharded import Sharded
from tfscale.plan.buckets import GradientSpec
from tfscale.plan.segments import Piece, SegmentedBucket


class Shards:
    """Pieces of a model's variables, in buckets.

    Every variable has a piece, so that an optimizer built on the pieces has its slots in the order
    of one built on the variables; pieces that lie in other ranks' segments are empty.

    Attributes:
        variables: The model's, in forward order.
        pieces: One for each variable: flat, or of the variable's shape where one rank owns it all.
        group: The ranks that share.
        arrived: What was received since it was cleared, in the order of exchanges.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        group: Group,
        strategy: Sharded,
        whole: frozenset[int] = frozenset(),
        by_rows: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Cut the variables and copy the own pieces.

        Args:
            variables: What is trained; values must be equal on all ranks.
            group: The ranks that share; this process is one of them.
            strategy: Sizes of buckets, and what overlaps.
            whole: Positions of variables that must not be cut.
            by_rows: Positions of kernels that are cut between rows, each with its bias.
        """
        self.variables = list(variables)
        self.group = group
        self._strategy = strategy
        self._whole = whole
        self.arrived: list[tf.Tensor] = []
        self._places = {id(v): i for i, v in enumerate(self.variables)}
        specs = [GradientSpec(name_of(v), tuple(v.shape), v.dtype) for v in self.variables]
        self.buckets = strategy.segments(specs, group.size, whole, by_rows)
        self._owned = {p.variable: p for b in self.buckets for p in b.pieces(group.rank)}
        with tf.init_scope():
            self.pieces = [self._make_piece(i) for i in range(len(self.variables))]

    def owned(self, index: int) -> Piece | None:
        """Return what this rank owns of a variable, or None."""
        return self._owned.get(index)

    def is_whole(self, index: int) -> bool:
        """Return whether one rank owns all of a variable."""
        return index in self._whole

    def place(self, variable: Any) -> int:
        """Return the position of a variable.

        Raises:
            ConfigError: The optimizer was built for others.
        """
        if id(variable) not in self._places:
            raise ConfigError(
                "An optimizer must be given the variables that it was built for. Received: "
                f"{name_of(variable)}. Compile the model again after changing what is trainable."
            )
        return self._places[id(variable)]

    def _make_piece(self, index: int) -> keras.Variable:
        variable = self.variables[index]
        piece = keras.Variable(
            self._part(index, variable.numpy()), dtype=variable.dtype, name=variable.name
        )
        piece._path = variable.path
        if getattr(variable, "overwrite_with_gradient", False):  # a scale of float8
            piece.overwrite_with_gradient = True
        if index in self._whole:
            piece.constraint = variable.constraint
        return piece

    def _part(self, index: int, value: Any) -> Any:
        """Return the own part of a value of a variable's shape, shaped as its piece."""
        owned = self._owned.get(index)
        if index in self._whole and len(value.shape) > 0:
            return value if owned else value[:0]
        flat = tf.reshape(value, [-1]) if tf.is_tensor(value) else np.reshape(value, -1)
        return flat[owned.start : owned.stop] if owned else flat[:0]

    def refresh(self, variable: keras.Variable, value: Any) -> None:
        """Follow an assignment to a model's variable.

        Args:
            variable: One of `variables`.
            value: Its new value, equal on all ranks.
        """
        index = self.place(variable)
        if self._owned.get(index):
            value = tf.cast(value, self.pieces[index].dtype)
            self.pieces[index].assign(self._part(index, value))

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        options: GradientOptions,
    ) -> list[tf.Tensor]:
        """Return the reduced gradients of the own pieces.

        Args:
            gradients: Tensors or IndexedSlices, one per variable; no None.
            variables: Some or all of `self.variables`.
            group: As given on construction.
            options: How they are reduced.

        Returns:
            One gradient for each variable, of the shape of its piece.

        Raises:
            ConfigError: A variable is none of those the optimizer was built for.
            ExchangeError: Communication failed.
            PlanError: A dense layer's gradient is not what its calls have made.
        """
        del group
        given = {self.place(v): g for g, v in zip(gradients, variables, strict=True)}
        uses = {i: use_of(self.variables[i]) for i in given}
        for i in (i for i, use in uses.items() if use != "plain"):
            require_own(given[i], self.variables[i], variables, options.op == Average)
        plain = {i: tf.convert_to_tensor(g) for i, g in given.items() if uses[i] == "plain"}
        if not self._strategy.overlap and not tf.executing_eagerly():
            with tf.control_dependencies(list(plain.values())):
                plain = {i: tf.identity(g) for i, g in plain.items()}
        packed = {i: options.compression.compress(g) for i, g in plain.items()}
        results: dict[int, tf.Tensor] = {}
        for bucket in reversed(self.buckets):
            chosen = {i: packed[i][0] for i in bucket.indices if i in packed}
            if chosen:
                self._reduce(bucket, chosen, options, results)
            for i in bucket.indices:
                if i in given and i not in packed:
                    results[i] = self._own_part(i, given[i], uses[i])
                    self.arrived.append(results[i])
        for i, (_, context) in packed.items():
            results[i] = options.compression.decompress(results[i], context)
        return [results[i] for i in given]

    def _own_part(self, index: int, gradient: Any, use: Use) -> tf.Tensor:
        """Return the own piece's part of a gradient that is the whole batch's already."""
        if use == "partial":
            n_in = self.variables[index].shape[0]
            return tf.reshape(own_rows(gradient, n_in, self.group), [-1])
        return self._part(index, tf.convert_to_tensor(gradient))

    def _reduce(
        self,
        bucket: SegmentedBucket,
        gradients: dict[int, tf.Tensor],
        options: GradientOptions,
        results: dict[int, tf.Tensor],
    ) -> None:
        counts = [
            sum(p.count for p in bucket.pieces(rank) if p.variable in gradients)
            for rank in range(self.group.size)
        ]
        tensors = list(gradients.values())
        scaling = scaling_of(options.op, options.factors(), self.group.size, tensors)
        call = self._call("gradients", list(gradients))
        flat = runtime.backend().scatter_reduce(tensors, counts, call, ReduceOp.SUM, scaling)
        self.arrived.append(flat)
        begin = 0
        for index in gradients:
            owned = self._owned.get(index)
            n = owned.count if owned else 0
            part = flat[begin : begin + n]
            shape = tuple(self.variables[index].shape)  # a gradient's may not be known
            if index in self._whole and shape:
                part = tf.reshape(part, shape if owned else (0, *shape[1:]))
            results[index] = part
            begin += n

    def _call(self, what: str, indices: Sequence[int]) -> Call:
        names = [name_of(self.variables[i]) for i in indices]
        label = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
        after = tuple(self.pieces[i].handle for i in indices)
        own = tuple(names) if what == "gradients" else ()  # parameters travel as one tensor
        return Call(self.group, f"{what} of {label}", after, what, own)

    def buckets_with(self, updated: frozenset[int] | None) -> list[SegmentedBucket]:
        """Return the buckets that hold some of the variables, all of them for None.

        Args:
            updated: Positions.
        """
        return [b for b in self.buckets if updated is None or not updated.isdisjoint(b.indices)]

    def publish(self, waits: bool, updated: frozenset[int] | None = None) -> None:
        """Send the own pieces to all ranks and receive theirs, in forward order.

        Args:
            waits: Wait for all of them; otherwise readers do, who must know (`parameters.futures`).
            updated: Positions of variables; buckets without any of them are left out.

        Raises:
            ExchangeError: Communication failed.
        """
        backend = runtime.backend()
        handles = []
        for bucket in self.buckets_with(updated):
            raw = [raw_variable(self.variables[i]) for i in bucket.indices]
            own = [self.pieces[p.variable].value for p in bucket.pieces(self.group.rank)]
            call = self._call("parameters", bucket.indices)
            if tf.executing_eagerly():
                gather_and_assign(backend, own, raw, bucket, call)
            else:
                backend.post_gather(own, raw, bucket, call)
                handles += [variable.handle for variable in raw]
        if waits and handles:
            backend.await_variables(handles)
