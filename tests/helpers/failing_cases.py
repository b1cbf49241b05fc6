"""Functions that fail in the ways that `spawn` must survive."""

import tfscale


def fails_on_one_rank() -> None:
    """Raise on rank 1 while the others wait for it."""
    if tfscale.rank() == 1:
        raise ValueError("this rank does not come")
    tfscale.barrier()


def works() -> None:
    """Need all ranks."""
    tfscale.barrier()
