"""A `fit` in which some ranks repeat another's samples with weight 0."""

from __future__ import annotations

from tfscale.data.active_ranks import use_active_ranks
from tfscale.data.changes import serve_anew
from tfscale.data.global_batches import GlobalBatches


def begin_with_surplus(data: GlobalBatches) -> None:
    """Let fewer ranks than there are share the batches of the `fit` that begins."""
    use_active_ranks(data)
    serve_anew()
