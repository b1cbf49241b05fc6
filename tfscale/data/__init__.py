"""Global batches, of which each rank serves a slice without communication.

Examples:
    >>> tfscale.init()
    >>> x, y = np.zeros((8, 3)), np.arange(8)
    >>> data = tfscale.data.GlobalBatches(x, y, batch_size=4, shuffle=False)
    >>> [labels.tolist() for _, labels in data]  # [[0, 1], [4, 5]] on rank 0 of 2
    [[0, 1, 2, 3], [4, 5, 6, 7]]
"""

from typing import TYPE_CHECKING, Any

from tfscale.data.global_batches import GlobalBatches
from tfscale.missing import lookup

__all__ = ["GlobalBatches"]

if not TYPE_CHECKING:  # other names are errors for type checkers, too

    def __getattr__(name: str) -> Any:
        return lookup(f"data.{name}")
