"""How far apart the groups of local SGD are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfscale.callbacks.base import Callback
from tfscale.comm import runtime
from tfscale.files import append_json_line, read_json_lines, write_json_lines
from tfscale.internals.keras import steps_until


class ModelDistance(Callback):
    """Record the distance between the groups' models and their average, at each average.

    D is the mean over groups of `||W_i - mean(W)||`, taken just before averaging. It is measured in
    the averaging step itself; one number for each group travels besides. The last one of an epoch
    is added to the epoch's logs as `model_distance`; an epoch without an average adds none. Of
    several averages within one execution (`steps_per_execution`) the last one is recorded. Under
    `average="gradients"`, where no mean of models is formed, the distance is that to the model
    with which all groups go on; with plain SGD inside that is their mean.

    Args:
        directory: Rank 0 writes `distance.jsonl` there, a line with "step" and "distance" for each
            average; None writes nothing. A `fit` that goes on in a later epoch, or amid the first,
            keeps the lines of the steps before.

    Attributes:
        distances: Pairs of step and distance, of this `fit`. Steps are counted from 1 over the
            whole run, where `fit` knows how many an epoch has; else over this `fit`.

    Source: [L] eq. 9.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__()
        self.directory = Path(directory) if directory is not None else None
        self.distances: list[tuple[int, float]] = []
        self._n_steps = self._n_before = self._n_steps_before = self._n_averages = 0
        self._is_new = True  # no step was made in this `fit`

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a new record."""
        super().on_train_begin(logs)
        self.distances, self._n_steps, self._n_averages = [], 0, self._count()
        self._is_new = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect averages of this epoch."""
        super().on_epoch_begin(epoch, logs)
        if self._is_new:
            self._n_steps = epoch * int((self.params or {}).get("steps") or 0)
        self._n_before, self._n_steps_before = len(self.distances), self._n_steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Take down the distance, if this step has averaged."""
        super().on_train_batch_end(batch, logs)
        self._n_steps = self._n_steps_before + steps_until(self.model, batch)
        if self._is_new and self.directory is not None and runtime.rank() == 0:
            _keep_lines(self.directory, self._n_steps - self.model.steps_per_execution)
        self._is_new = False
        n_averages, before = self._count(), self._n_averages
        self._n_averages = n_averages
        if n_averages == before:
            return
        distance = float(self.session.group_average.distance.numpy())
        self.distances.append((self._n_steps, distance))
        if self.directory is not None and runtime.rank() == 0:
            line = {"step": self._n_steps, "distance": distance}
            append_json_line(self.directory / "distance.jsonl", line)

    def _count(self) -> int:
        return (
            0
            if self.session.group_average is None
            else int(self.session.group_average.n_averages.numpy())
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the last distance to the logs."""
        super().on_epoch_end(epoch, logs)
        if len(self.distances) > self._n_before and logs is not None:
            logs["model_distance"] = self.distances[-1][1]


def _keep_lines(directory: Path, n_steps: int) -> None:
    """Keep what an earlier `fit` has written of the first steps of the run."""
    path = directory / "distance.jsonl"
    write_json_lines(path, [line for line in read_json_lines(path) if line["step"] <= n_steps])
