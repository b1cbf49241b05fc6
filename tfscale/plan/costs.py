"""Times of computation and communication on a machine, by the equations of [T] and [L]."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tfscale.config import PlanError
from tfscale.plan.buckets import BYTES_PER_VALUE
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import LayerTimes, Link, Machine

# Algorithms that sum whole gradients, see `allreduce_s`.
Algorithm = Literal["direct", "recursive", "mpi"]
# As in custom_ops/comm/reduction.cc.
_FEW_RANKS, _FEW_RANKS_BYTES = 8, 32 * 1024
_SHARED_HOST_BYTES, _MESSAGE_BYTES, _RADIX = 4096, 5000, 4
# A longer latency is a distance, which messages to one rank share. A shorter one keeps its sender
# busy.
_LONGEST_BUSY_S = 100e-6


def transfer_s(n_bytes: float, n_ranks: int, machine: Machine, chunk_bytes: int = 0) -> float:
    """Return the time of an alltoall, a reduce-scatter or an allgather, [T] table 4.1.

    `n_bytes` is the size of a rank's input or output, whichever is larger. Between hosts, what a
    rank sends to another one is cut into messages of at most `chunk_bytes`, if that is not 0.
    """
    seconds_per_byte = share(n_ranks) / machine.link(n_ranks).bytes_per_s
    is_cut = chunk_bytes > 0 and machine.latency_s <= _LONGEST_BUSY_S
    n_more = max(0, math.ceil(n_bytes / n_ranks / chunk_bytes) - 1) if is_cut else 0
    more_s = n_more * (machine.n_hosts(n_ranks) - 1) * machine.latency_s
    return machine.messages_s(n_ranks) + more_s + n_bytes * seconds_per_byte


class Relayed(NamedTuple):
    """Messages and bytes of one rank in an allreduce that sends whole vectors, or relays them."""

    n_messages: int
    sent_bytes: float
    summed_bytes: float


def relayed(n_bytes: float, n_ranks: int, n_hosts: int) -> Relayed | None:
    """Return the messages and bytes of a short allreduce; None if segments go to their owners.

    The choice is that of `BestWay` in custom_ops/comm/reduction.cc, whose constants do not depend
    on the machine: few messages for short vectors, few bytes for long ones.
    """
    has_few = n_ranks <= _FEW_RANKS  # each sends its vector to every other one
    rounds = n_ranks - 1 if has_few else math.ceil(math.log2(n_ranks))
    whole = Relayed(rounds, (n_ranks - 1) * n_bytes, n_ranks * n_bytes)
    if has_few:
        return whole if n_bytes * n_ranks <= _FEW_RANKS_BYTES else None
    if n_hosts < n_ranks:
        return whole if n_bytes <= _SHARED_HOST_BYTES else None
    n_messages, n_blocks = _alltoall(n_ranks)
    n_messages, n_blocks = n_messages + rounds, n_blocks + n_ranks - 1
    # The engine chooses by the bytes of a segment; it sends whole values.
    segment = math.ceil(n_bytes / n_ranks)
    block = math.ceil(n_bytes / n_ranks / BYTES_PER_VALUE) * BYTES_PER_VALUE
    of_whole = whole.n_messages * _MESSAGE_BYTES + whole.sent_bytes
    of_parts = n_messages * _MESSAGE_BYTES + n_blocks * segment
    of_direct = 2 * (n_ranks - 1) * (_MESSAGE_BYTES + segment)
    if of_whole <= min(of_parts, of_direct):
        return whole
    parts = Relayed(n_messages, n_blocks * block, n_ranks * block)
    return parts if of_parts <= of_direct else None


@functools.cache
def _alltoall(n_ranks: int) -> tuple[int, int]:
    """Return messages and blocks that a rank sends in a relayed alltoall.

    A block is sent once per digit, other than zero, of the number of ranks between its first and
    its last rank, to the base `_RADIX`.
    """
    n_messages, n_blocks, stride = 0, 0, 1
    while stride < n_ranks:
        n_messages += min(_RADIX - 1, (n_ranks - 1) // stride)
        n_blocks += sum(1 for i in range(n_ranks) if i // stride % _RADIX)
        stride *= _RADIX
    return n_messages, n_blocks


def share(n_ranks: int) -> float:
    """Return (n_ranks - 1) / n_ranks: the fraction of a vector that other ranks have."""
    return (n_ranks - 1) / n_ranks


def allreduce_s(
    n_bytes: float, n_ranks: int, machine: Machine, algorithm: Algorithm, link: Link | None = None
) -> float:
    """Return the time of summing a vector over all ranks.

    The engine's algorithm "direct" sends each segment to the rank that sums it, [T] eq. 4.9; for
    short vectors see `relayed`;
    "recursive" is the faster of a binomial tree, eq. 4.6, and Rabenseifner's algorithm, eq. 4.7;
    "mpi" is MPI's blocking allreduce: the same with `mpi_s_per_byte` for its sums in one thread.
    `link` is `machine.link` by default.
    """
    if n_ranks == 1:
        return 0.0
    link = link or machine.link(n_ranks)
    beta, rounds = 1 / link.bytes_per_s, math.log2(n_ranks)
    if algorithm == "direct":
        n_hosts = machine.n_hosts(n_ranks)
        short = relayed(n_bytes, n_ranks, n_hosts)
        if short is None:
            sent_s = 2 * transfer_s(n_bytes, n_ranks, machine)
            return sent_s + n_bytes / machine.reduce_bytes_per_s
        # What is relayed is not combined on hosts: their ranks share the link.
        is_shared = 1 < n_hosts < n_ranks
        rate = machine.bytes_per_s / machine.ranks_per_host if is_shared else link.bytes_per_s
        messages_s = short.n_messages * link.latency_s
        if n_ranks <= _FEW_RANKS:  # to each rank of this host, and to each of the others
            n_here = math.ceil(n_ranks / n_hosts)
            messages_s = (n_ranks - n_here) * link.latency_s + machine.messages_s(n_here)
        sent_s = messages_s + short.sent_bytes / rate
        return sent_s + short.summed_bytes / machine.reduce_bytes_per_s
    halved = 2 * rounds * link.latency_s + 2 * share(n_ranks) * n_bytes * beta
    tree = rounds * (link.latency_s + n_bytes * beta)
    if algorithm == "mpi":
        return min(halved, tree) + n_bytes * machine.mpi_s_per_byte
    return min(halved, tree) + share(n_ranks) * n_bytes / machine.reduce_bytes_per_s


# Each value a layer writes is written and read once in the forward pass; back-propagation reads it
# again and writes and reads its gradient.
_FORWARD_PASSES, _BACKWARD_PASSES = 2, 3
_MOST_OF_LAYER = 0.8  # largest part of a layer's back-propagation that is its weight gradient


@dataclass(frozen=True)
class Scenario:
    """A training step: model, machine, number of ranks and samples."""

    table: LayerTable
    machine: Machine
    n_ranks: int
    global_batch: int  # samples of all ranks per step; if fewer than ranks, some repeat samples
    n_slots: int = 1  # values of optimizer state per parameter: 0 SGD, 1 momentum, 2 Adam

    def __post_init__(self) -> None:
        if self.n_ranks < 1 or self.global_batch < 1 or self.n_slots < 0:
            raise PlanError(
                "n_ranks and global_batch must be 1 or more. Received: "
                f"n_ranks={self.n_ranks}, global_batch={self.global_batch}, "
                f"n_slots={self.n_slots}."
            )

    @property
    def local_batch(self) -> int:
        """Samples of the rank that has most of them."""
        return -(-self.global_batch // self.n_ranks)

    @property
    def gathered_batch(self) -> int:
        """Samples of all ranks together, repeated ones included."""
        return max(self.global_batch, self.n_ranks)

    def transfer_s(self, n_bytes: float, chunk_bytes: int = 0) -> float:
        """Return the time of an alltoall or an allgather among all ranks."""
        return transfer_s(n_bytes, self.n_ranks, self.machine, chunk_bytes)

    def sum_s(self, n_bytes: float) -> float:
        """Return the time of summing the segments that a rank receives, including its own."""
        return n_bytes / self.machine.reduce_bytes_per_s if self.n_ranks > 1 else 0.0

    def dense_rows(self, layer_index: int) -> tuple[tuple[int, int], int]:
        """Return (n_in, n_out) of a dense kernel, and the number of its input rows on all ranks."""
        layer = self.table.layers[layer_index]
        return layer.dense or (0, 0), self.gathered_batch * layer.rows

    def _product_s(self, flops: float, batch: float) -> float:
        """Return the time of matrix products of `flops` operations per sample."""
        return flops * (batch + self.machine.half_batch) / self.machine.flops_per_s

    def _traffic_s(self, layer: Layer, passes: int) -> float:
        n_bytes = BYTES_PER_VALUE * layer.values * self.local_batch * passes
        return n_bytes / self.machine.memory_bytes_per_s

    def forward_s(self, layer_index: int) -> float:
        """Return the time of a layer's forward pass."""
        layer = self.table.layers[layer_index]
        measured = self._measured()
        if measured is not None:
            return measured.forward_s[layer.name] * self._scale(measured.batch)
        products = self._product_s(layer.flops, self.local_batch)
        return products + self._traffic_s(layer, _FORWARD_PASSES)

    def backward_s(self, layer_index: int) -> tuple[float, float]:
        """Return the times of a layer's input gradients and of its weight gradients."""
        layer = self.table.layers[layer_index]
        products = self._product_s(layer.flops, self.local_batch)
        traffic = self._traffic_s(layer, _BACKWARD_PASSES)
        inputs_s = traffic + (products if layer_index > 0 else 0.0)
        weights_s = products if layer.weights else 0.0
        measured = self._measured()
        if measured is None:
            return inputs_s, weights_s
        total = measured.backward_s[layer.name] * self._scale(measured.batch)
        part = weights_s / (inputs_s + weights_s) if inputs_s + weights_s > 0 else 0.0
        if layer.name in measured.gradient_s and total > 0:
            own_s = measured.gradient_s[layer.name][1] * self._scale(measured.batch)
            part = min(_MOST_OF_LAYER, own_s / total)
        return total * (1 - part), total * part

    def rest_s(self) -> float:
        """Return the part of a step's time that belongs to no layer."""
        measured = self._measured()
        rest = 0.0 if measured is None else measured.rest_s * self._scale(measured.batch)
        return self.machine.step_s + rest

    def gradient_s(self, layer_index: int, batch: float, part: float = 1.0) -> float:
        """Return the time of a dense layer's weight gradient for a batch, or of a part of it."""
        layer = self.table.layers[layer_index]
        n_in, n_out = layer.dense or (0, 0)
        measured = self._measured()
        if measured is not None and layer.name in measured.gradient_s:
            rows, _, whole_s, part_s = measured.gradient_s[layer.name]
            # `part_s` was measured for 1 / ranks of the kernel.
            part_s *= part * rows / (measured.batch * layer.rows)
            half = self.machine.half_batch
            scale = (batch * layer.rows + half) / (rows + half)
            return scale * (whole_s if part == 1.0 else min(whole_s, part_s))
        return part * self._product_s(2.0 * n_in * n_out * layer.rows, batch)

    def update_s(self, n_values: float) -> float:
        """Return the time of an update: reads gradient, parameter, slots; writes the latter two."""
        accesses = 3 + 2 * self.n_slots
        return BYTES_PER_VALUE * accesses * n_values / self.machine.memory_bytes_per_s

    def compute_s(self) -> float:
        """Return the time of a step of one rank without exchange and update."""
        places = range(len(self.table.layers))
        return self.rest_s() + sum(self.forward_s(i) + sum(self.backward_s(i)) for i in places)

    def _measured(self) -> LayerTimes | None:
        times = self.machine.layer_times.get(self.table.name)
        if times is not None and (reason := times.misfit(self.table)):
            raise PlanError(
                f"machine must hold times of this model. Received: {self.table.name} with "
                f"{self.table.n_values} trainable values, and {reason}. Measure again with "
                "tfscale tune links, or name models apart."
            )
        return times

    def _scale(self, batch: int) -> float:
        half = self.machine.half_batch
        return (self.local_batch + half) / (batch + half)
