"""What is known of a gradient before training: enough to plan its exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

BYTES_PER_VALUE = 4  # of float32, which gradients and parameters travel as unless compressed

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class GradientSpec:
    """One dense gradient.

    Attributes:
        name: Path of the variable, such as "dense/kernel".
        shape: Its shape.
        dtype: Name of the dtype that travels.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return _BYTES[self.dtype]

    @property
    def n_bytes(self) -> int:
        """Bytes on the wire, before any collective's own factor."""
        return math.prod(self.shape) * self.item_bytes
