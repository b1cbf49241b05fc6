"""The warm-up of the learning rate for large batches."""

from __future__ import annotations

from typing import Any

from tfscale.callbacks.learning_rate import LearningRateScheduleCallback
from tfscale.comm import runtime
from tfscale.internals.keras import print_msg


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate linearly from `initial_lr / factor` to `initial_lr`.

    In batch b of epoch e the multiplier is `(x * (factor - 1) / warmup_epochs + 1) / factor` with
    x = e + (b + 1) / steps_per_epoch, so that the last batch of the warm-up gets `initial_lr`.
    Under `steps_per_execution` the rate changes once per execution, to that of its first batch, and
    is `initial_lr` once the last epoch of the warm-up has ended.
    By default the factor is the number of ranks, so with one process the rate is `initial_lr`
    throughout. For local SGD with G groups pass `initial_lr=G * lr, factor=G`, or the square root
    of G in both places.

    Args:
        initial_lr: Learning rate after the warm-up, already scaled by the number of ranks.
        warmup_epochs: Length of the warm-up in epochs, greater than 0.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: Batches per epoch; by default what `fit` knows.
        verbose: 1 writes a line on rank 0 when the warm-up is over.
        factor: By how much the rate rises; None for the number of ranks.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        factor: float | None = None,
    ) -> None:
        def multiplier(epoch: float) -> float:
            total = runtime.size() if factor is None else factor
            reached = epoch + 1.0 / self._steps()
            return (reached * (total - 1) / warmup_epochs + 1.0) / total

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """End the warm-up, if this was its last epoch."""
        if epoch + 1 == self.end_epoch and self.model.steps_per_execution > 1:
            # Its last batch had the rate of the first one of its execution.
            self._set_rate_of_batch(self._steps() - 1)
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and runtime.rank() == 0:
            print_msg(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )
