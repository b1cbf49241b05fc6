"""Files of a run in `runs/<name>/`: settings, one line per epoch, pictures."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

import plots
from tfscale.files import read_json_lines, write_atomically


class RunFolder(keras.callbacks.Callback):
    """Write `run.json`, `metrics.jsonl` and `learning_curve.png` while a model trains.

    Give it to `fit` on rank 0 only: it takes part in no exchange, and finds in `logs` what
    tfscale's callbacks have averaged over the ranks. `metrics.jsonl` has one line per epoch,
    written as soon as the epoch ends: `epoch` (from 1), `seconds` of training and validation so
    far, `train_seconds` of this epoch without validation, `learning_rate`, `batch_size`, and every
    entry of `logs`. When training ends, `run.json` gets `seconds` as well.

    A `fit` that begins after the first epoch appends to the lines of the earlier run.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        baselines: Mapping[str, float] | None = None,
        data: Any = None,
    ):
        """Make the folder and write `run.json`.

        Args:
            folder: Made if it is missing; files of an earlier run in it are replaced.
            settings: What the run depends on (flags, number of ranks); JSON types.
            baselines: Value to compare a metric with, drawn as a line: the input's PSNR, say.
            data: `GlobalBatches` whose batch size is to be noted, or None.

        Raises:
            OSError: The folder cannot be written.
        """
        super().__init__()
        self.folder = folder
        self._data = data
        self._baselines = dict(baselines or {})
        self._settings = {**settings, "baselines": self._baselines}
        self._lines: list[dict[str, float]] = []
        self._started_s = self._epoch_began_s = self._train_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._write_settings(self._settings)

    @property
    def last(self) -> dict[str, float]:
        """The line of the last epoch, of an earlier run if this one trained none."""
        return self._lines[-1] if self._lines else {}

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Read what an earlier run has written; the first epoch says what of it holds."""
        self._lines = read_json_lines(self.folder / "metrics.jsonl")
        self._started_s = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Start the clocks; in the first epoch, forget what is trained again."""
        self._epoch_began_s = time.monotonic()
        self._train_s = 0.0
        self._batch_size = getattr(self._data, "batch_size", 0)
        if not self._started_s:
            self._lines = [line for line in self._lines if line["epoch"] <= epoch]
            before_s = self._lines[-1]["seconds"] if self._lines else 0.0
            self._started_s = self._epoch_began_s - before_s
            text = "".join(json.dumps(line) + "\n" for line in self._lines)
            write_atomically(self.folder / "metrics.jsonl", text)

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Stop the clock of the epoch: validation is not training."""
        self._train_s = self._train_s or time.monotonic() - self._epoch_began_s

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Append one line to `metrics.jsonl`."""
        self.on_test_begin()
        line = {
            "epoch": epoch + 1,
            "seconds": round(time.monotonic() - self._started_s, 3),
            "train_seconds": round(self._train_s, 3),
            "learning_rate": float(self.model.optimizer.learning_rate),
            **({} if self._data is None else {"batch_size": self._batch_size}),
            **{name: float(value) for name, value in (logs or {}).items()},
        }
        self._lines.append(line)
        with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_end(self, logs: dict | None = None) -> None:
        """Say in `run.json` that the run is whole, then draw `learning_curve.png`."""
        if self._lines:
            self._write_settings({**self._settings, "seconds": self._lines[-1]["seconds"]})
            path = self.folder / "learning_curve.png"
            with plots.failure_is_a_warning(path):
                plots.learning_curve(self._lines, path, self._baselines)

    def _write_settings(self, content: dict[str, Any]) -> None:
        write_atomically(self.folder / "run.json", json.dumps(content, indent=2) + "\n")
