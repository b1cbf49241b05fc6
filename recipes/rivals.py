"""Horovod in the recipes, to compare with: `--exchange horovod`."""

import sys
from collections.abc import Sequence
from typing import Any

import keras


def with_horovod(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer, which first averages each gradient over the ranks by Horovod's allreduce.

    Horovod has no optimizer for Keras 3 (its own synchronises nothing there); its op does the same
    in the place where the optimizer gets the gradients. Horovod fuses them as it does by default.

    Raises:
        SystemExit: Horovod is not installed.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        sys.exit(
            f"--exchange horovod needs Horovod. Received: {error}. Install it: `make horovod`."
        )
    hvd.init()

    class Averaging(type(optimizer)):  # type: ignore[misc]
        def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            averaged = [
                hvd.allreduce(gradient, op=hvd.Average, name=f"gradient{i}")
                for i, gradient in enumerate(grads)
            ]
            return super().apply(averaged, trainable_variables)

    return Averaging.from_config(optimizer.get_config())
