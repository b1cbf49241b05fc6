"""Keep the best model of a run."""

from __future__ import annotations

from tfscale.callbacks.model_checkpoint import ModelCheckpoint


class BestModelCheckpoint(ModelCheckpoint):
    """Write the model whenever the monitored quantity improves; rank 0 writes.

    All ranks take the same decisions, given logs equal on all ranks: `MetricAverageCallback`
    comes first.

    Args:
        monitor: Key of the logs to watch.
        verbose: 1 writes a line for each decision.
        mode: `"min"`, `"max"` or `"auto"`, which infers the direction from the metric.
        save_freq: `"epoch"` or a number of batches.
        filepath: Path ending in `.keras`; may contain `{epoch}` and keys of the logs.
        initial_value_threshold: Only better values than this one are saved.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best_model.keras",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
            initial_value_threshold=initial_value_threshold,
        )
