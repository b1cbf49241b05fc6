"""Record of theta and its parts while a model trains."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

from tfscale.callbacks.base import Callback
from tfscale.callbacks.epoch_measures import EpochBatch, EpochMeasures
from tfscale.comm import runtime
from tfscale.config import ConfigError, check_integer
from tfscale.data.dataset_batches import DatasetBatches
from tfscale.data.global_batches import GlobalBatches
from tfscale.files import append_json_lines, read_json_lines, write_json_lines
from tfscale.fit.preparation import build
from tfscale.internals.keras import is_built, steps_until
from tfscale.internals.traits import Phase
from tfscale.measure import theta
from tfscale.measure.growth import theta_of

logger = logging.getLogger("tfscale")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Steps so far, and the sum of their losses."""

    steps: int = 0
    loss_sum: float = 0.0


class ThetaMonitor(Callback):
    """Record theta while a model trains, without changing anything.

    theta is (F_0 - F) / ||w_0 - w||. F is the mean training loss of the updates since the last
    record, averaged over ranks; F_0 and w_0 are as in `AdaptiveBatchSize`. Rank 0 writes a line of
    `theta.jsonl` for each record, and `theta.md` and `theta.png` when training ends; `tfscale
    report DIRECTORY` writes these again from the lines. Logs of an epoch get `theta`, and
    `theta_peak_update`, the update with the largest theta so far.

    Collective: all ranks must pass it to `fit`.

    Args:
        directory: Folder of the files.
        every_n_updates: Updates from one record to the next; None records at the ends of epochs.
        has_norms: Also record the norm of the mean gradient and the gradient noise scale. This
            needs two ranks, `GlobalBatches` and an exchange that sums whole gradients.

    Source: [T] eq. 5.4, figures 5.2 to 5.6.

    Examples:
        >>> tfscale.init()
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        >>> monitor = tfscale.callbacks.ThetaMonitor("theta")
        >>> options = dict(batch_size=2, epochs=3, callbacks=[monitor], verbose=0)
        >>> history = model.fit(np.zeros((4, 3)), np.ones((4, 1)), **options)
        >>> [round(theta, 2) for theta in history.history["theta"]]
        [0.5, 1.12, 1.17]
    """

    phase = Phase.MEASURE
    compared = ("every_n_updates", "has_norms")

    def __init__(
        self, directory: str | Path, every_n_updates: int | None = None, has_norms: bool = False
    ) -> None:
        super().__init__()
        self.directory = Path(directory)
        if every_n_updates is not None:
            check_integer("every_n_updates", every_n_updates, 1)
        self.every_n_updates = every_n_updates
        self.has_norms = has_norms
        self._measures = EpochMeasures(has_noise_scale=has_norms)

    def set_model(self, model: Any) -> None:
        """Prepare the model, and measure gradient norms in its optimizer if they are wanted."""
        super().set_model(model)
        self._measures.watch(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a record, or continue that of a backup."""
        super().on_train_begin(logs)
        data = self.session.data
        if self.has_norms and not isinstance(data, GlobalBatches):
            raise ConfigError(
                "has_norms=True compares gradients of ranks with as many samples each. Received: "
                f"data={type(data).__name__}. Use tfscale.data.GlobalBatches, or has_norms=False."
            )
        if not is_built(self.model):  # the first parameters must be known
            build(self.model)
        self._measures.start()
        self._total = self._at_epoch_begin = self._at_last_record = Progress()
        self._n_updates = self._count()  # at the last record
        state = self.take_backup()
        self._peak: dict[str, Any] | None = state.get("peak")
        self._theta = state.get("theta", math.nan)
        self._size: int | None = state.get("size")  # of the batches since the last record
        if state:
            self._measures.restore(state["measures"], state.get("arrays", []))
            self._total = self._at_epoch_begin = Progress(*state["pending"])
            self._n_updates = state["n_updates"]
        if runtime.rank() == 0:
            path = self.directory / theta.FILE_NAME
            kept = read_json_lines(path) if state else []
            write_json_lines(path, [row for row in kept if row["update"] <= self._n_updates])

    def _count(self) -> int:
        return int(self.model.optimizer.iterations)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the steps of the epoch from here."""
        super().on_epoch_begin(epoch, logs)
        self._at_epoch_begin = self._total

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the first parameters."""
        super().on_train_batch_begin(batch, logs)
        self._measures.begin_batch(self.model, is_first=False)
        size = getattr(self.session.data, "batch_size", None)
        if self._size not in (None, size):  # norms of gradients of two sizes cannot be added
            self._measures.forget_norms()
        self._size = size

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record theta if it is due."""
        super().on_train_batch_end(batch, logs)
        if self.is_void:
            return
        self._measures.end_batch(logs)
        # Of the epoch; the loss in the logs is their mean.
        n = steps_until(self.model, batch, self.params)
        begin, loss = self._at_epoch_begin, float((logs or {})["loss"])
        self._total = Progress(begin.steps + n, begin.loss_sum + n * loss)
        interval = self.every_n_updates
        if interval and self._count() // interval > self._n_updates // interval:
            self._record()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record theta if it is due, and add it to the logs."""
        super().on_epoch_end(epoch, logs)
        if self.is_void:
            return
        if not self.every_n_updates:
            self._record()
        self._at_epoch_begin = self._total
        if logs is not None and self._peak is not None:
            logs["theta"] = self._theta  # AdaptiveBatchSize may replace it
            logs["theta_peak_update"] = self._peak["update"]

    def _record(self) -> None:
        """Measure since the last record; rank 0 writes a line. Collective."""
        total, last = self._total, self._at_last_record
        self._at_last_record, self._n_updates = total, self._count()
        data = self.session.data
        is_known = isinstance(data, GlobalBatches | DatasetBatches)
        size = data.batch_size if is_known else None
        has_surplus = is_known and data.has_surplus_ranks
        batch = EpochBatch(size or runtime.size(), None, has_surplus)
        loss = (total.loss_sum - last.loss_sum) / (total.steps - last.steps)
        measures = self._measures.end_epoch(self.model, {"loss": loss}, batch)
        self._theta = theta_of(measures.first_cost, measures.cost, measures.distance)
        row = {
            "update": self._n_updates,
            "epoch": self.epoch,
            "batch_size": size,
            "theta": self._theta,
        }
        measured = dataclasses.asdict(measures)
        row |= {"loss": measured.pop("cost"), "first_loss": measured.pop("first_cost")}
        row |= {name: measured[name] for name in ("distance", "gradient_norm", "noise_scale")}
        self._peak = theta.peak_of([row if self._peak is None else self._peak, row])
        if runtime.rank() == 0:
            append_json_lines(self.directory / theta.FILE_NAME, [row])

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write table and picture on rank 0."""
        super().on_train_end(logs)
        if runtime.rank() == 0:
            logger.info("%s", theta.write_report(self.directory))

    def backup_state(self) -> dict[str, Any]:
        """Return the state that later records depend on, for checkpoints."""
        measures, origin = self._measures.state()
        # Since the last record: negative if that was made within the epoch.
        begin, last = self._at_epoch_begin, self._at_last_record
        pending = [begin.steps - last.steps, begin.loss_sum - last.loss_sum]
        state = {"measures": measures, "arrays": origin, "n_updates": self._n_updates}
        state |= {"peak": self._peak, "theta": self._theta, "size": self._size}
        return {**state, "pending": pending}
