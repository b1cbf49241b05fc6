"""GlobalBatches as several ranks see them, in one process."""

import numpy as np

from tfscale.data import GlobalBatches


def as_rank(data, rank=0, size=1):
    """Let `data` serve a rank of a job that does not exist."""
    data._rank_and_size = (rank, size)
    return data


def make(samples, rank=0, size=1, **options):
    x = np.arange(samples, dtype="float32")
    return as_rank(GlobalBatches(x, -x, **options), rank, size)


def served(data):
    return [tuple(x.astype(int)) for x, _ in data]


def require_shared_out(ranks, alone, epoch, served, drop, is_training):
    """Require the union over ranks to be what one process serves: each sample at most once."""
    for data in (*ranks, alone):
        data.epoch = epoch
    pieces, batches = [served(data) for data in ranks], served(alone)
    for step, batch in enumerate(batches):
        own = [steps[step] for steps in pieces if step < len(steps)]
        assert sum(own, start=()) == batch and all(own)
        if is_training or len(batch) == alone.batch_size:
            assert {len(piece) for piece in own} == {len(batch) / len(ranks)}
    n_steps = {len(steps) for steps in pieces}
    assert max(n_steps) == len(batches) and len(n_steps) == 1 + (min(n_steps) < len(batches))
    assert is_training <= (len(n_steps) == 1)
    samples = sum(batches, start=())
    n_kept = alone.samples - alone.samples % alone.batch_size * drop
    assert len(set(samples)) == len(samples) == n_kept
    return samples
