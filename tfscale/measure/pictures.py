"""Files of findings: JSON, and pictures where matplotlib is installed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def write_findings(
    folder: str | Path, name: str, content: dict[str, Any], draw: Callable[[Path], None]
) -> None:
    """Write `name`.json into a folder, which is made, and `name`.png if it can be drawn.

    Args:
        folder: Where.
        name: Of both files.
        content: What JSON holds; numbers that are not finite become null.
        draw: Called with the path of the picture.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(content), indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    if has_matplotlib():
        draw(folder / f"{name}.png")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
