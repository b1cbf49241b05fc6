"""Batch and rate that change while a recipe trains: the methods of [T] chapter 5 as flags."""

import sys
from pathlib import Path
from typing import Any

from absl import flags

import tfscale
import tfscale.keras as hvd

FLAGS = flags.FLAGS
flags.DEFINE_integer(
    "adaptive_batch", 0,
    "Let batch and rate grow with theta up to this batch, without --schedule; 0: do not.",
    lower_bound=0,
)  # fmt: skip
flags.DEFINE_integer(
    "adaptive_interval", 0,
    "With --adaptive-batch, epochs from one growth to the next; 0: read off theta.", lower_bound=0,
)  # fmt: skip
flags.DEFINE_enum(
    "adaptive_signal", "theta", ["theta", "noise_scale"],
    "With --adaptive-batch, what lets the batch grow.",
)  # fmt: skip
flags.DEFINE_list(
    "batch_schedule", [], "Batches set beforehand, at a constant rate, as in 30:512,60:1024."
)
flags.DEFINE_enum(
    "adaptive_rule", "robust", ["robust", "thesis", "peak", "seesaw"],
    "With --adaptive-batch, how the interval is read off theta, or that the batch grows in "
    "--decay-epochs instead (docs/adaptive-batch.md).",
)  # fmt: skip
flags.DEFINE_float(
    "adaptive_decay", 0.1,
    "With --adaptive-batch, the first of --decay-epochs sets the rate to this share of the initial "
    "one; later ones multiply by it.", lower_bound=0.0, upper_bound=1.0,
)  # fmt: skip
flags.DEFINE_enum(
    "adaptive_ranks", "all", ["all", "grow"],
    "With --adaptive-batch; grow: a batch of less than two samples per rank uses fewer ranks.",
)  # fmt: skip
flags.DEFINE_integer(
    "theta_every", 0, "Record theta every n updates (docs/adaptive-batch.md); 0: do not.",
    lower_bound=0,
)  # fmt: skip
flags.DEFINE_bool(
    "theta_norms",
    False,
    "With --theta-every, also record gradient norms and the noise scale, on two ranks or more.",
)
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
    _check()
    decays = [int(epoch) for epoch in FLAGS.decay_epochs]
    if FLAGS.adaptive_batch:
        adaptive = tfscale.callbacks.AdaptiveBatchSize(
            train,
            FLAGS.adaptive_batch,
            interval=FLAGS.adaptive_interval or None,
            rule=FLAGS.adaptive_rule,
            signal=FLAGS.adaptive_signal,
            learning_rate_rule=FLAGS.scaling,
            decay=FLAGS.adaptive_decay,
            decay_epochs=decays,
            active_ranks=FLAGS.adaptive_ranks,
            log_path=folder / "adaptive.jsonl",
        )
        return [adaptive]
    if FLAGS.batch_schedule:
        pairs = (step.partition(":") for step in FLAGS.batch_schedule)
        sizes = {int(epoch): int(size) for epoch, _, size in pairs}
        return [tfscale.callbacks.BatchSizeSchedule(sizes)]
    if _is_scaled():
        batches = reference_batch, own_batch()
        rule, warmup = FLAGS.scaling, FLAGS.warmup_epochs
        return [
            tfscale.callbacks.LearningRateScaling(
                FLAGS.learning_rate, *batches, rule, warmup, decays
            )
        ]
    return []


def own_batch() -> int:
    """Return the samples of an update; ranks that train on their own have batches of their own."""
    return FLAGS.batch_size // (hvd.size() if FLAGS.average_every else 1)


def _check() -> None:
    chosen = ("adaptive_batch", "batch_schedule", "warmup_epochs")
    if sum(bool(FLAGS[name].value) for name in chosen) > 1:
        sys.exit("Only one of --adaptive-batch, --batch-schedule, --warmup-epochs can be followed.")
    if FLAGS.batch_schedule and FLAGS.decay_epochs:
        sys.exit("With --batch-schedule the rate is fixed: leave --decay-epochs out.")
    is_ignored = FLAGS.schedule != "constant" and not FLAGS.adaptive_batch
    if is_ignored and (FLAGS.warmup_epochs or FLAGS.decay_epochs):
        sys.exit(
            "--warmup-epochs and --decay-epochs change a rate that is constant otherwise. "
            f"Received: --schedule {FLAGS.schedule}. Add --schedule constant."
        )


def _is_scaled() -> bool:
    is_plain = FLAGS.schedule == "constant" and not FLAGS.adaptive_batch
    return is_plain and bool(FLAGS.warmup_epochs or FLAGS.decay_epochs)
