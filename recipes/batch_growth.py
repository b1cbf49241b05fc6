"""Batch and rate that change while a recipe trains: the methods of [T] chapter 5 as flags."""

import sys
from pathlib import Path
from typing import Any

from absl import flags

import tfscale

FLAGS = flags.FLAGS
flags.DEFINE_integer(
    "adaptive_batch", 0, "Let batch and rate grow with theta up to this batch; 0: do not.",
    lower_bound=0,
)  # fmt: skip
flags.DEFINE_integer(
    "adaptive_interval", 0, "Epochs from one growth to the next; 0: read off theta.", lower_bound=0
)
flags.DEFINE_list("batch_schedule", [], "Batches set beforehand, as in 30:512,60:1024.")
flags.DEFINE_integer(
    "warmup_epochs", 0,
    "With --schedule constant, epochs in which the rate rises from --learning-rate to that of the "
    "batch.", lower_bound=0,
)  # fmt: skip
flags.DEFINE_list("decay_epochs", [], "Epochs, from 0, in which such a rate begins to be a tenth.")


def is_used() -> bool:
    """Whether a callback sets the rate, so that the optimizer must not have a schedule."""
    return bool(FLAGS.adaptive_batch or FLAGS.batch_schedule or _is_scaled())


def callbacks(train: tfscale.data.GlobalBatches, reference_batch: int, folder: Path) -> list[Any]:
    """Return what the flags ask for: at most one callback.

    Args:
        train: What is trained on.
        reference_batch: The batch for which --learning-rate is meant.
        folder: For the record of decisions.
    """
    if sum((bool(FLAGS.adaptive_batch), bool(FLAGS.batch_schedule), _is_scaled())) > 1:
        sys.exit("Only one of --adaptive-batch, --batch-schedule, --warmup-epochs can be followed.")
    decays = [int(epoch) for epoch in FLAGS.decay_epochs]
    if FLAGS.adaptive_batch:
        adaptive = tfscale.callbacks.AdaptiveBatchSize(
            train,
            FLAGS.adaptive_batch,
            interval=FLAGS.adaptive_interval or None,
            learning_rate_rule=FLAGS.scaling,
            decay_epochs=decays,
            log_path=folder / "adaptive.jsonl",
        )
        return [adaptive]
    if FLAGS.batch_schedule:
        pairs = (step.partition(":") for step in FLAGS.batch_schedule)
        sizes = {int(epoch): int(size) for epoch, _, size in pairs}
        return [tfscale.callbacks.BatchSizeSchedule(sizes)]
    if _is_scaled():
        batches = reference_batch, FLAGS.batch_size
        rule, warmup = FLAGS.scaling, FLAGS.warmup_epochs
        return [
            tfscale.callbacks.LearningRateScaling(
                FLAGS.learning_rate, *batches, rule, warmup, decays
            )
        ]
    return []


def _is_scaled() -> bool:
    is_plain = FLAGS.schedule == "constant" and not FLAGS.adaptive_batch
    return is_plain and bool(FLAGS.warmup_epochs or FLAGS.decay_epochs)
