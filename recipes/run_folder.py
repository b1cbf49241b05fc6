"""What a run leaves behind in `runs/<name>/`: settings, one line per epoch, pictures."""

import json
import time
from pathlib import Path
from typing import Any

import keras

import plots


class RunFolder(keras.callbacks.Callback):
    """Write `run.json`, `metrics.jsonl` and `learning_curve.png` while a model trains.

    Give it to `fit` on rank 0 only and last: it takes part in no exchange, and finds in `logs`
    what the callbacks before it have averaged over the ranks. `metrics.jsonl` has one line per
    epoch, written as soon as the epoch ends: `epoch` (from 1), `seconds` since the start of
    training, `learning_rate`, and every entry of `logs`.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], baselines: dict[str, float] | None = None
    ):
        """Make the folder and write `run.json`.

        Args:
            folder: Made if it is missing; files of an earlier run in it are replaced.
            settings: What the run depends on (flags, number of ranks); JSON types.
            baselines: Value to compare a metric with, drawn as a line: the input's PSNR, say.

        Raises:
            OSError: The folder cannot be written.
        """
        super().__init__()
        self.folder = folder
        self._baselines = baselines or {}
        self._lines: list[dict[str, float]] = []
        self._started_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        content = {**settings, "baselines": self._baselines}
        (folder / "run.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Start the clock and empty `metrics.jsonl`."""
        self._started_s = time.monotonic()
        self._lines.clear()
        (self.folder / "metrics.jsonl").write_text("", encoding="utf-8")

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Append one line to `metrics.jsonl`."""
        line = {
            "epoch": epoch + 1,
            "seconds": round(time.monotonic() - self._started_s, 3),
            "learning_rate": float(self.model.optimizer.learning_rate),
            **{name: float(value) for name, value in (logs or {}).items()},
        }
        self._lines.append(line)
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_end(self, logs: dict | None = None) -> None:
        """Draw `learning_curve.png`."""
        if self._lines:
            path = self.folder / "learning_curve.png"
            plots.learning_curve(self._lines, path, self._baselines)
