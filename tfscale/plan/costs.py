"""What each exchange costs on the wire, in seconds; every function cites its equation.

Legend: n_ranks processes (the papers' P), n_bytes their data size n in bytes, alpha the latency of
a message, beta the seconds per byte.
"""

from __future__ import annotations

import math
from typing import Literal

from tfscale.plan.machines import Link, Machine
from tfscale.plan.specs import BYTES_PER_VALUE

# How whole gradients are summed: "direct" is what tfscale's engine does, "mpi" what MPI's blocking
# allreduce is worth, sums in one thread included.
Algorithm = Literal["direct", "ring", "recursive", "mpi"]
_SHORT_BYTES = 2048  # MPICH's limit for its tree


def transfer_s(n_bytes: float, n_ranks: int, link: Link) -> float:
    """Return the time of an alltoall, a reduce-scatter or an allgather.

    Args:
        n_bytes: What a rank has before it or after it, whichever is more.
        n_ranks: Members.
        link: Between them.

    Source: [T] table 4.1.
    """
    return (n_ranks - 1) * link.latency_s + n_bytes * share(n_ranks) / link.bytes_per_s


def share(n_ranks: int) -> float:
    """Return (n_ranks - 1) / n_ranks: the part of a vector that others have."""
    return (n_ranks - 1) / n_ranks


def sum_s(n_bytes: float, n_ranks: int, machine: Machine) -> float:
    """Return the time of summing the segments that a rank receives, its own included."""
    return n_bytes / machine.reduce_bytes_per_s if n_ranks > 1 else 0.0


def allreduce_s(
    n_bytes: float, n_ranks: int, machine: Machine, algorithm: Algorithm, link: Link | None = None
) -> float:
    """Return the time of summing a vector over all ranks.

    Args:
        n_bytes: The vector.
        n_ranks: Members.
        machine: Where.
        algorithm: "direct" sends each segment to the rank that sums it, [T] eq. 4.9; "ring" sends
            as many messages and bytes, one after another; "recursive" is the better of a binomial
            tree, eq. 4.6, and Rabenseifner's, eq. 4.7; "mpi" adds `mpi_s_per_byte` to it.
        link: Between the members; None: as `machine.link` says.
    """
    if n_ranks == 1:
        return 0.0
    link = link or machine.link(n_ranks)
    beta, rounds = 1 / link.bytes_per_s, math.log2(n_ranks)
    if algorithm in ("direct", "ring"):
        return 2 * transfer_s(n_bytes, n_ranks, link) + sum_s(n_bytes, n_ranks, machine)
    halved = 2 * rounds * link.latency_s + 2 * share(n_ranks) * n_bytes * beta
    tree = rounds * (link.latency_s + n_bytes * beta)
    if algorithm == "mpi":
        return min(halved, tree) + n_bytes * machine.mpi_s_per_byte
    return min(halved, tree) + share(n_ranks) * n_bytes / machine.reduce_bytes_per_s


def sharded_s(n_bytes: float, n_ranks: int, machine: Machine) -> tuple[float, float, float]:
    """Return the times of the alltoall of gradients, their sum, and the allgather of parameters.

    Source: [T] eq. 4.9.
    """
    each = transfer_s(n_bytes, n_ranks, machine.link(n_ranks))
    return each, sum_s(n_bytes, n_ranks, machine), each


def activation_bytes(n_values: int, batch: float) -> float:
    """Return the bytes of activations or errors of `n_values` per row for `batch` rows."""
    return BYTES_PER_VALUE * n_values * batch


def partial_s(
    dense: tuple[int, int], batch: float, n_ranks: int, machine: Machine
) -> tuple[float, float, float]:
    """Return the times of a dense layer whose ranks each compute a part of its gradient.

    Args:
        dense: (n_in, n_out) of the kernel.
        batch: Rows of all ranks together.
        n_ranks: Members.
        machine: Where.

    Returns:
        Seconds of the alltoall of activations (eq. 4.2: a rank's n_in * batch / n_ranks values are
        spread), of the allgather of errors (eq. 4.3), and of the allgather of weights (eq. 4.4).

    Source: [T] eqs. 4.2 to 4.5.
    """
    n_in, n_out = dense
    link = machine.link(n_ranks)
    return (
        transfer_s(activation_bytes(n_in, batch / n_ranks), n_ranks, link),
        transfer_s(activation_bytes(n_out, batch), n_ranks, link),
        transfer_s(BYTES_PER_VALUE * n_in * n_out, n_ranks, link),
    )


def replicated_s(
    dense: tuple[int, int], batch: float, n_ranks: int, machine: Machine
) -> tuple[float, float]:
    """Return the times of gathering a dense layer's activations and errors on every rank.

    Args:
        dense: (n_in, n_out) of the kernel.
        batch: Rows of all ranks together.
        n_ranks: Members.
        machine: Where.

    Source: [T] 3.3.3: (N_in + N_out) * K values.
    """
    link = machine.link(n_ranks)
    n_in, n_out = dense
    return (
        transfer_s(activation_bytes(n_in, batch), n_ranks, link),
        transfer_s(activation_bytes(n_out, batch), n_ranks, link),
    )


def average_s(
    n_bytes: float,
    group_size: int,
    n_groups: int,
    machine: Machine,
    algorithm: Algorithm = "recursive",
) -> float:
    """Return the time of averaging parameters across groups.

    Args:
        n_bytes: What each rank averages: all parameters, or its 1 / group_size of them.
        group_size: Ranks of a group, [L]'s K.
        n_groups: Groups, [L]'s P.
        machine: Where.
        algorithm: See `allreduce_s`.

    Source: [L] eq. 7; eq. 5 with the number of groups in its second logarithm.
    """
    link = machine.link_across(group_size, n_groups)
    return allreduce_s(n_bytes, n_groups, machine, algorithm, link)


def interval_s(
    n_bytes: float, group_size: int, n_groups: int, interval: int, machine: Machine
) -> tuple[float, float]:
    """Return communication per step of local SGD with whole and with sharded averaging.

    Args:
        n_bytes: Bytes of the parameters.
        group_size: Ranks of a group.
        n_groups: Groups.
        interval: Steps from one averaging to the next.
        machine: Where.

    Returns:
        [L] eq. 5 and the sum of eqs. 6 to 8, both per step instead of per epoch.
    """
    inside = allreduce_s(n_bytes, group_size, machine, "recursive")
    whole = average_s(n_bytes, group_size, n_groups, machine) / interval
    each = transfer_s(n_bytes, group_size, machine.link(group_size))
    part = average_s(n_bytes / group_size, group_size, n_groups, machine) / interval
    return inside + whole, 2 * each + part
