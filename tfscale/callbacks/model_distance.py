"""How far apart the groups of local SGD are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tfscale import runtime
from tfscale.callbacks.base import Callback
from tfscale.data.continued_epoch import steps_until


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
            average; None writes nothing. A run that goes on from a backup keeps the lines up to it.

    Attributes:
        distances: Pairs of step (counted from 1 over the whole run) and distance.

    Source: [L] eq. 9.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__()
        self.directory = Path(directory) if directory is not None else None
        self.distances: list[tuple[int, float]] = []
        self._n_steps = self._n_before = self._n_steps_before = self._n_averages = 0
        self._epoch = -1
        self._backup: dict[str, Any] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a new record, or go on with that of a backup."""
        super().on_train_begin(logs)
        known, self._backup = self._backup or {"distances": [], "n_steps": 0}, None
        self.distances = [(step, distance) for step, distance in known["distances"]]
        self._n_steps, self._n_averages = known["n_steps"], self._count()
        if self.directory is not None and runtime.rank() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "distance.jsonl").write_text("".join(map(_line, self.distances)))

    def backup_state(self) -> dict[str, Any]:
        """Return the record, and the steps before the present epoch and in all."""
        steps = {"n_steps": self._n_steps, "before_epoch": self._n_steps_before}
        return {"distances": self.distances, "epoch": self._epoch, **steps}

    def restore_state(self, state: dict[str, Any], epoch: int) -> None:
        """Go on from a backup when training begins; steps of a broken epoch are counted again."""
        is_amid = epoch == state["epoch"]
        n_steps = state["before_epoch"] if is_amid else state["n_steps"]
        self._backup = {"distances": state["distances"], "n_steps": n_steps}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Expect averages of this epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        self._n_before, self._n_steps_before = len(self.distances), self._n_steps

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Take down the distance, if this step has averaged."""
        super().on_train_batch_end(batch, logs)
        self._n_steps = self._n_steps_before + steps_until(self.model, batch)
        n_averages, before = self._count(), self._n_averages
        self._n_averages = n_averages
        if n_averages == before:
            return
        distance = float(self._average.distance.numpy())
        self.distances.append((self._n_steps, distance))
        if self.directory is not None and runtime.rank() == 0:
            with (self.directory / "distance.jsonl").open("a") as file:
                file.write(_line(self.distances[-1]))

    @property
    def _average(self) -> Any:
        return getattr(self.model.optimizer, "group_average", None)

    def _count(self) -> int:
        return 0 if self._average is None else int(self._average.n_averages.numpy())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the last distance to the logs."""
        super().on_epoch_end(epoch, logs)
        if len(self.distances) > self._n_before and logs is not None:
            logs["model_distance"] = self.distances[-1][1]


def _line(entry: tuple[int, float]) -> str:
    step, distance = entry
    return json.dumps({"step": step, "distance": distance}) + "\n"
