"""Checkpoints: their files and content, writing in the background, and resuming.

Examples:
    >>> tfscale.init()
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    >>> checkpoint = tfscale.callbacks.Checkpoint("run", every_n_steps=2)
    >>> data = tfscale.data.GlobalBatches(np.zeros((4, 3)), np.ones((4, 1)), batch_size=1)
    >>> history = model.fit(data, callbacks=[checkpoint], verbose=0)
    >>> [(found.step, found.size) for found in tfscale.checkpoints.list_checkpoints("run")]
    [(4, 1), (2, 1)]
"""

from tfscale.checkpoints.files import Found, list_checkpoints

__all__ = ["Found", "list_checkpoints"]
