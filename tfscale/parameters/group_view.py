"""The average of the groups' models as a copy, beside the models that go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfscale import runtime
from tfscale.backends.base import Call, ReduceOp, Scaling


def average_models(optimizer: Any) -> list[np.ndarray]:
    """Average over groups what each rank updates, and show the average in the model. Collective.

    Args:
        optimizer: A DistributedOptimizer whose groups train apart.

    Returns:
        This rank's own values; `set_own` puts them back.

    Raises:
        ExchangeError: Communication failed.
    """
    average = optimizer.group_average
    own = [np.array(v.numpy()) for v in average.targets]
    scaling = Scaling(1.0, 1.0 / average.across.size)
    for variable in average.targets:
        call = Call(average.across, f"average of {variable.path}")
        value = tf.convert_to_tensor(variable.value)
        (mean,) = runtime.backend().allreduce([value], call, ReduceOp.SUM, scaling)
        variable.assign(mean)
    optimizer.show_own()
    return own
