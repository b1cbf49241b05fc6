"""Layers whose variables are divided among the ranks.

Examples:
    >>> tfscale.init()
    >>> table = tfscale.layers.ShardedEmbedding(10, 4)
    >>> table(np.array([[1, 2, 3]])).shape
    TensorShape([1, 3, 4])
"""

from tfscale.layers.sharded_embedding import ShardedEmbedding

__all__ = ["ShardedEmbedding"]
