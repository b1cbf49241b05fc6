"""The average of the groups' models as a copy, beside the models that go on."""

from __future__ import annotations

from typing import Any

import numpy as np


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
    average.average_now()
    optimizer.show_own()
    return own
