"""One line of JSON per epoch of a run with growing batches."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from keras.src.utils import io_utils

from tfscale.comm import runtime
from tfscale.measure.growth import Decision, Measures

logger = logging.getLogger("tfscale")


class AdaptiveRecord:
    """Writes `adaptive.jsonl` on rank 0.

    Args:
        path: The file; None writes nothing.
        verbose: 1 prints what changes.
    """

    def __init__(self, path: str | Path | None, verbose: int = 0) -> None:
        self._verbose = verbose
        self._path = Path(path) if path is not None else None

    def start(self, epoch: int | None) -> None:
        """Begin a file, or go on with the lines of the epochs before.

        Args:
            epoch: First epoch that comes, in a run that goes on; None for a fresh one.
        """
        if self._path is None or runtime.rank() != 0:
            return
        kept = ""
        if epoch is not None and self._path.exists():
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = "".join(line for line in lines if _epoch_of(line) < epoch)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(kept, encoding="utf-8")

    def write(self, line: dict[str, Any], measures: Measures, decision: Decision) -> None:
        """Append the line of an epoch, and say what changes; rank 0 only.

        Args:
            line: What held in the epoch; numbers that are not finite become null.
            measures: What it was judged by.
            decision: What comes.
        """
        if runtime.rank() != 0:
            return
        for reason in decision.reasons:
            logger.info("Epoch %d: %s.", line["epoch"] + 1, reason)
            if self._verbose:
                io_utils.print_msg(f"\nEpoch {line['epoch'] + 1}: {reason}.")
        if self._path is None:
            return
        line = {
            **line,
            "loss": measures.cost,
            "first_loss": measures.first_cost,
            "distance": measures.distance,
            "interval": decision.interval,
            "next_batch_size": decision.batch_size,
            "next_rate_scale": decision.rate_scale,
            "reasons": list(decision.reasons),
        }
        clean = {key: None if _is_not_finite(value) else value for key, value in line.items()}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _epoch_of(line: str) -> float:
    """Return the epoch of a line; that of one cut short is not before any."""
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return math.inf
