"""The random numbers that Python and numpy draw for this process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def read_random_state() -> dict[str, Any]:
    """Return the states of both global generators, as JSON."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on with what `read_random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
