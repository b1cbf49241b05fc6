"""One line of JSON per epoch of a run with growing batches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from keras.src.utils import io_utils

from tfscale.comm import runtime
from tfscale.files import append_json_line, read_json_lines, write_json_lines
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
        lines = [] if epoch is None else read_json_lines(self._path)
        write_json_lines(self._path, [line for line in lines if line["epoch"] < epoch])

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
        more = {
            "loss": measures.cost,
            "first_loss": measures.first_cost,
            "distance": measures.distance,
            "interval": decision.interval,
            "next_batch_size": decision.batch_size,
            "next_rate_scale": decision.rate_scale,
            "reasons": list(decision.reasons),
        }
        append_json_line(self._path, {**line, **more})
