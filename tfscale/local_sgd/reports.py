"""Distances of the groups' models, wishes to stop and digests: a sum over ranks per average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.comm import runtime
from tfscale.comm.backends.base import Group
from tfscale.config import settings

_EXACT = (1 << 52) - 1  # the bits of a digest that a float64 holds exactly


class AverageReport:
    """One vector of float64 for each average, which is summed over all ranks.

    It has the squared distances of each group from the average, a number per layer, which are the
    sums of its ranks' parts. One more number counts the ranks that want to stop. If ranks compare
    averages, a digest of each rank follows.

    Attributes:
        layers: Paths of the layers whose parameters are averaged, equal on all ranks.
        size: The length of the vector.
        distance: Mean over groups of the distance between a group's parameters and the average,
            measured at the last average ([L] eq. 9).
        layer_distances: The same for the parameters of each layer.
        wants_to_stop: Set on a rank that wants to stop training; sent with the next average.
        must_stop: Whether some rank wanted to stop at the last average; equal on all ranks.
        n_averages: Averages taken in steps so far.
    """

    def __init__(
        self, across: Group, layers: Sequence[str], owners: Sequence[str], is_counted: bool
    ) -> None:
        """Create the variables, in the state just after an average.

        Args:
            across: This rank and the ranks of other groups that update the same variables.
            layers: See above.
            owners: Of these, the one of each variable that this rank averages.
            is_counted: Whether the distances of this rank count for its group. Of several ranks
                that update the same variables one does.
        """
        self._across, self._is_counted = across, is_counted
        self.layers = list(layers)
        numbers = {layer: number for number, layer in enumerate(layers)}
        self._numbers = [numbers[owner] for owner in owners]
        self._n_distances = across.size * len(layers)
        # Digests of what averages have given since the last report are equal on ranks at one
        # position.
        self._compares = settings().compare_averages
        self.size = self._n_distances + 1 + (runtime.size() if self._compares else 0)
        with tf.init_scope():
            self.distance = tf.Variable(0.0, dtype=tf.float64, trainable=False)
            zeros = np.zeros(len(layers))
            self.layer_distances = tf.Variable(zeros, dtype=tf.float64, trainable=False)
            self.wants_to_stop = tf.Variable(False, trainable=False)
            self.must_stop = tf.Variable(False, trainable=False)
            self.n_averages = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._digest = tf.Variable(0, dtype=tf.int64, trainable=False)

    def note(self, averaged: Sequence[Any]) -> None:
        """Add the bits of what an average has given to the digest, if ranks compare it."""
        for value in averaged if self._compares else ():
            self._digest.assign(31 * self._digest + digest_of(value))

    def squares_of(self, part: Sequence[int], changes: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the squared norm of each layer's changes, as float64.

        Each change is summed in its own dtype, or float32 if that has fewer bits: a copy in float64
        would cost more than all else in an average.

        Args:
            part: Positions of the variables whose changes are given.
            changes: One for each of them.
        """
        wide = [c if c.dtype.size >= tf.float32.size else tf.cast(c, tf.float32) for c in changes]
        squares = [2.0 * tf.cast(tf.nn.l2_loss(change), tf.float64) for change in wide]
        return self.by_layer(part, squares)

    def by_layer(self, part: Sequence[int], squares: Any) -> tf.Tensor:
        """Return the sum of squares for each layer, given one for each variable of a part."""
        numbers = tf.constant([self._numbers[i] for i in part], tf.int32)
        squares = tf.convert_to_tensor(squares, tf.float64)
        return tf.math.unsorted_segment_sum(squares, numbers, len(self.layers))

    def vector(self, squares: tf.Tensor) -> tf.Tensor:
        """Return what this rank adds to the sum, given its squared distances by layer."""
        counted = squares if self._is_counted else tf.zeros_like(squares)
        group = tf.one_hot(self._across.rank, self._across.size, dtype=tf.float64)
        of_groups = tf.reshape(group[:, None] * counted[None, :], [-1])
        parts = [of_groups, [tf.cast(self.wants_to_stop, tf.float64)]]
        if self._compares:
            own = tf.one_hot(runtime.rank(), runtime.size(), dtype=tf.float64)
            parts.append(own * tf.cast(self._digest & _EXACT, tf.float64))
            self._digest.assign(0)
        return tf.concat(parts, axis=0)

    def distances_in(self, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the mean distance of groups in a sum, of all layers together and of each."""
        shape = [self._across.size, len(self.layers)]
        squares = tf.reshape(sums[: self._n_distances], shape)
        whole = tf.reduce_mean(tf.sqrt(tf.reduce_sum(squares, axis=1)))
        return whole, tf.reduce_mean(tf.sqrt(squares), axis=0)

    def take(self, sums: tf.Tensor) -> tf.Tensor:
        """Count an average, and keep what its sum says."""
        distance, of_layers = self.distances_in(sums)
        self.distance.assign(distance)
        self.layer_distances.assign(of_layers)
        self.must_stop.assign(sums[self._n_distances] > 0)
        checks = []
        if self._compares:
            ranks = self._across.ranks
            digests = tf.gather(sums[self._n_distances + 1 :], ranks)
            text = (
                "TFSCALE_FAILED: An average must give equal bits on ranks "
                f"{', '.join(map(str, ranks))}. Received: digests that differ, with "
                "TFSCALE_COMPARE_AVERAGES=1."
            )
            checks.append(
                tf.debugging.Assert(tf.reduce_all(digests == digests[0]), [text, digests])
            )
        with tf.control_dependencies([c for c in checks if c is not None]):
            self.n_averages.assign_add(1)
        return tf.zeros([], tf.float64)

    def forget_stops(self) -> None:
        """Begin an interval in which no rank has wanted to stop."""
        self.wants_to_stop.assign(False)
        self.must_stop.assign(False)

    def record(self) -> dict[str, Any]:
        """Return the distances of the last average, for JSON."""
        layers = dict(zip(self.layers, self.layer_distances.numpy().tolist(), strict=True))
        return {"distance": float(self.distance.numpy()), "layers": layers}


def digest_of(value: Any) -> tf.Tensor:
    """Return an int64 that depends on each bit of a float tensor and on the order of its elements.

    It does not depend on the order in which TensorFlow adds up.
    """
    bits = {2: tf.int16, 4: tf.int32, 8: tf.int64}
    flat = tf.reshape(tf.convert_to_tensor(value), [-1])
    numbers = tf.cast(tf.bitcast(flat, bits[flat.dtype.size]), tf.int64)
    places = tf.range(tf.size(numbers, tf.int64), dtype=tf.int64)
    return tf.reduce_sum((numbers + 1) * (2 * places + 1))
