"""Data with a NaN in one step of the last rank."""

import numpy as np

from tests.helpers.equality import BATCH
from tests.parallel import sharded_model

BAD = 2  # this step is bad on the last rank


def data():
    """All global batches; in the bad step the last rank's part, the last one, holds a NaN."""
    x, y = sharded_model.data()
    bad = x.copy()
    bad[BATCH * (BAD + 1) - 1] = np.nan
    return bad, x, y
