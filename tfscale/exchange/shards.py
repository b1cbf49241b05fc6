"""A rank's pieces of parameters: variables besides the model's, gathered after updates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Call, Changes, Group
from tfscale.comm.compression import Compression, LossyCompressor
from tfscale.config import ConfigError
from tfscale.internals.keras import raw_variable
from tfscale.internals.optimizers import piece_of
from tfscale.plan.segments import Piece, SegmentedBucket


class Shards:
    """Pieces of a model's variables, in buckets.

    Every variable that is cut has a piece, which is empty if other ranks own all of the variable.
    So an optimizer that is built on the targets has its slots in the order of one that is built on
    the variables.

    Attributes:
        variables: The model's, in forward order; positions are those of the plan's table.
        targets: Updated by this rank, one for each variable: its piece, flat or, if one rank owns
            the whole variable, of the variable's shape; the variable itself if it is not cut.
        pieces: The pieces among `targets`, by position.
        group: The ranks that share the variables.
        rounds: Whether traced steps gather changes in fewer bits. Then a piece holds exact values,
            of which the variable, equal on all ranks, lacks what is not sent yet.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        segments: Sequence[SegmentedBucket],
        whole: Collection[int],
        group: Group,
        compression: Any = Compression.none,
    ) -> None:
        """Copy this rank's pieces of variables that are equal on all ranks.

        `whole` has the positions of variables that one rank must own entirely.
        """
        self.variables = list(variables)
        self.group = group
        self.segments = segments
        self._compression = compression
        self.rounds = getattr(compression, "bits", 32) < 32
        self._positions = {id(v): i for i, v in enumerate(self.variables)}
        self._owned = {p.variable: p for b in self.segments for p in b.pieces(group.rank)}
        cut = sorted(i for bucket in self.segments for i in bucket.indices)
        self._whole = frozenset(whole).intersection(cut)
        self.pieces: dict[int, keras.Variable] = {}
        with tf.init_scope():
            for i in cut:
                value = self.part(i, self.variables[i].numpy())
                self.pieces[i] = piece_of(self.variables[i], value, i in self._whole)
        self.targets = [self.pieces.get(i, v) for i, v in enumerate(self.variables)]

    @property
    def cut(self) -> list[keras.Variable]:
        """The model's variables that are cut."""
        return [self.variables[i] for i in self.pieces]

    def owned(self, index: int) -> Piece | None:
        """Return the range that this rank owns of a variable that is cut, or None."""
        return self._owned.get(index)

    def is_whole(self, index: int) -> bool:
        """Return whether one rank owns all of a variable that is cut."""
        return index in self._whole

    def is_empty(self, index: int) -> bool:
        """Return whether other ranks own all of a variable."""
        return index in self.pieces and index not in self._owned

    def position(self, variable: Any) -> int:
        """Return the position of a variable."""
        if id(variable) not in self._positions:
            raise ConfigError(
                "variables must be those that the optimizer was built for. Received: "
                f"{name_of(variable)}. Compile the model again after changing what is trainable."
            )
        return self._positions[id(variable)]

    def part(self, index: int, value: Any) -> Any:
        """Return this rank's part of a value of a variable's shape, in the shape of its piece."""
        owned = self._owned.get(index)
        if index in self._whole and len(value.shape) > 0:
            # Empty in all dimensions: Keras adds (0, n) as it adds a bias, which fails.
            return value if owned else value[(slice(0, 0),) * len(value.shape)]
        flat = tf.reshape(value, [-1]) if tf.is_tensor(value) else np.reshape(value, -1)
        return flat[owned.start : owned.stop] if owned else flat[:0]

    def shaped(self, index: int, flat: tf.Tensor) -> tf.Tensor:
        """Reshape the flat elements that this rank owns of a variable to the shape of its piece."""
        shape = tuple(self.variables[index].shape)  # a gradient's may not be known
        if index not in self._whole or not shape:
            return flat
        return tf.reshape(flat, shape if self._owned.get(index) else (0,) * len(shape))

    def refresh(self, variable: keras.Variable, value: Any, before: Any) -> None:
        """Update this rank's piece after an assignment, equal on all ranks, to its variable.

        Where a value is as it was `before`, what is not sent yet is kept; not for None.
        """
        index = self.position(variable)
        if not self._owned.get(index):
            return
        piece = self.pieces[index]
        owned = self.part(index, tf.cast(value, piece.dtype))
        if self.rounds and before is not None:
            owned = tf.where(owned == self.part(index, before), piece.value, owned)
        piece.assign(owned)

    def call(self, what: str, indices: Sequence[int]) -> Call:
        """Return label and order of a collective for some variables' gradients or parameters."""
        names = [name_of(self.variables[i]) for i in indices]
        after = tuple(self.pieces[i].handle for i in indices)
        # Parameters are sent as one tensor.
        gradient_names = tuple(names) if what == "gradients" else ()
        return Call(self.group, f"{what} of {label_of(names)}", after, what, gradient_names)

    def buckets_with(self, updated: Collection[int] | None) -> list[SegmentedBucket]:
        """Return the buckets with any of the given positions; all buckets for None."""
        return [
            b for b in self.segments if updated is None or not set(b.indices).isdisjoint(updated)
        ]

    def publish(
        self, waits: bool = True, updated: Collection[int] | None = None, bits: Any = None
    ) -> None:
        """Send this rank's pieces to all ranks and receive theirs, in forward order. Collective.

        Without `waits`, readers must wait (`optimizer.futures`). Buckets without a position in
        `updated` are left out. A traced step sends changes of the variables that the compression
        fits, with `bits` per value or, for None, those of the compression; eager calls send values.
        """
        backend = runtime.backend()
        handles = []
        for bucket in self.buckets_with(updated):
            raw = [raw_variable(self.variables[i]) for i in bucket.indices]
            owned = [self.pieces[p.variable].value for p in bucket.pieces(self.group.rank)]
            call = self.call("parameters", bucket.indices)
            if tf.executing_eagerly():
                backend.gather_and_assign(owned, raw, bucket, call)
                continue
            backend.post_gather(owned, raw, bucket, call, self._changes(bucket, bits))
            handles += [variable.handle for variable in raw]
        if waits and handles:
            backend.await_variables(handles)

    def _changes(self, bucket: SegmentedBucket, bits: Any) -> Changes | None:
        how = self._compression
        if not self.rounds:
            return None
        fits = how.fits if isinstance(how, LossyCompressor) else lambda _, dtype: dtype == "float32"
        return Changes(
            how.bits if bits is None else bits,
            how.block,
            tuple(fits(s, bucket.dtype) for s in bucket.shapes),
        )

    def publish_exact(self) -> None:
        """Give the variables the exact values of all ranks' pieces. Collective, not in a step."""
        if self.rounds:
            self.publish()


def name_of(variable: Any) -> str:
    """Return the path of a variable, or the name of a tensor that is a source of a tape."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "gradient"))


def label_of(names: Sequence[str]) -> str:
    """Return a short text for several names."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
