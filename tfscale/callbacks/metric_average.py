"""Metrics of all ranks together in the logs of `fit` and `evaluate`."""

from __future__ import annotations

from typing import Any

import keras

from tfscale.callbacks.base import Callback
from tfscale.callbacks.metric_states import Snapshot, average_logs, scalars, take_snapshot
from tfscale.comm import runtime
from tfscale.fit.session import running_session
from tfscale.internals.keras import give_back_results, replace_results

VALIDATION = "val_"


class MetricAverageCallback(Callback):
    """Put metrics of all ranks' data into `logs`, in place.

    The states of metrics are reduced over ranks and the results recomputed, so that accuracy,
    AUC, precision and loss are those of one process that sees all samples, whatever the sizes of
    the ranks' shares. States are added up; a metric whose states do not add says so with an
    attribute `tfscale_reduce`, one of `"mean"`, `"max"` and `"min"`. Numbers that no metric
    made are averaged, each rank counting the same.

    One kind of state does not know its samples: the losses of single outputs, which Keras shows
    for models with several, count each batch alike, whatever its size, unless that is known
    beforehand (with `tfscale.data.GlobalBatches` it never is). Their sum, `loss`, counts samples.

    Callbacks that use metrics (EarlyStopping, ReduceLROnPlateau, ModelCheckpoint) and callbacks
    that call `evaluate` themselves come after it. Within `fit` ranks communicate when the steps of
    an epoch are over and at no other time, so one rank may evaluate alone as long as it keeps the
    results out of the logs. `model.evaluate(..., callbacks=[MetricAverageCallback()])` returns the
    metrics of all ranks.

    Collective: all ranks must pass it, at the same place.

    Args:
        device: Ignored; kept for scripts written for Horovod.

    Raises:
        ExchangeError: At the end of an epoch, on all ranks, naming a key that only some have.
    """

    averages_metrics = True

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device
        self._snapshots: dict[str, Snapshot] = {}
        self._is_fitting = False
        self._epoch_logs: dict[str, Any] = {}

    def set_model(self, model: keras.Model) -> None:
        """Begin a `fit` or an `evaluate` of its own."""
        super().set_model(model)
        self._is_fitting = False
        give_back_results(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the logs of an earlier `fit`."""
        super().on_train_begin(logs)
        self._epoch_logs = {}
        give_back_results(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Forget the states of the epoch before."""
        super().on_epoch_begin(epoch, logs)
        self._is_fitting = True
        self._snapshots = {}

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Save the training states; outside of `fit`, replace the coming results."""
        super().on_test_begin(logs)
        if runtime.size() == 1:
            return
        if self._is_fitting:
            # The model resets its metrics next.
            self._snapshots.setdefault("", take_snapshot(self.model))
        else:
            around = running_session()
            if around is None or not around.is_void:  # no rank would answer there
                self._replace_results()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the validation states."""
        super().on_test_end(logs)
        if runtime.size() > 1 and self._is_fitting:
            self._snapshots[VALIDATION] = take_snapshot(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put the metrics of all ranks into the logs."""
        super().on_epoch_end(epoch, logs)
        self._is_fitting = False
        if runtime.size() == 1 or logs is None:
            return
        if self.is_void:
            logs.update(self._epoch_logs)
            return
        self._snapshots.setdefault("", take_snapshot(self.model))
        average_logs(self.model, logs, self._snapshots)
        self._epoch_logs = dict(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Put the metrics of all ranks into the logs."""
        super().on_train_end(logs)
        if logs is not None:
            # Keras hands out the last epoch's logs again, as they were before on_epoch_end.
            logs.update({key: self._epoch_logs.get(key, value) for key, value in logs.items()})

    def _replace_results(self) -> None:
        """Let the results of the running `evaluate` be those of all ranks."""
        model = self.model

        def of_all_ranks(results: Any) -> dict[str, Any]:
            logs = scalars(results)
            average_logs(model, logs, {"": take_snapshot(model)})
            return logs

        replace_results(model, of_all_ranks)
