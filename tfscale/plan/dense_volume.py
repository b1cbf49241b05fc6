"""Which way of making the gradient of a dense kernel moves fewer values."""

from __future__ import annotations


def is_partial_cheaper(n_in: int, n_out: int, global_batch: int, size: int) -> bool:
    """Return whether exchanging activations and errors moves fewer values than the gradient.

    A rank receives n_in / size columns of the activations and all columns of the errors of the
    whole batch, against its part of the gradients of all ranks; either is times
    (size - 1) / size without what the rank has itself.

    Args:
        n_in: Rows of the kernel.
        n_out: Its columns.
        global_batch: Samples of all ranks together, times positions for inputs of higher rank.
        size: Number of ranks.

    Source: [T] eq. 4.8: N_in K / n + N_out K < N_in N_out.
    """
    return size > 1 and n_in * global_batch + n_out * global_batch * size < n_in * n_out * size
