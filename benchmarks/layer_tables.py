"""The times of layers that `benchmarks.layer_times` has measured, without importing TensorFlow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("layer_times.json")


def read() -> dict[str, dict[str, Any]]:
    """Return the tables by model, empty before any was measured."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def gradient_bytes(model: str) -> int:
    """Return the bytes of a model's gradients in float32."""
    layers = read()[model]["layers"]
    return 4 * sum(math.prod(shape) for layer in layers for shape in layer["weights"])
