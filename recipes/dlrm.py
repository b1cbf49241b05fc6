"""Predict clicks from 13 numbers and 26 categories, with one table whose rows the ranks share.

    python recipes/dlrm.py
    tfscale run -np 4 python recipes/dlrm.py --ids 1000000    # each rank holds a quarter of 1.6 GB

The rows of all categories are in one `tfscale.layers.ShardedEmbedding`, so a step exchanges three
messages for them. The last lines are samples per second, and the memory of each rank.

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.
"""

import resource
import time

import keras
from absl import app, flags

import command_line
import tfscale
import tfscale.keras as hvd
import training
from datasets import clicks
from models.dlrm import dlrm

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.DEFINE_integer("examples", 262_144, "Training examples.", lower_bound=1)
flags.DEFINE_integer("ids", 100_000, "Ids of each category.", lower_bound=1)
flags.DEFINE_integer("width", 16, "Values per id.", lower_bound=1)
training.set_defaults(epochs=2, batch_size=4096, learning_rate=0.1, schedule="constant")

BATCH = 4096
SMOKE = {"examples": 5120, "ids": 2000, "epochs": 4, "batch_size": 256, "learning_rate": 1.6}


class Clock(keras.callbacks.Callback):
    """Measures the last epoch, without validation."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Start."""
        self._begin_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Keep the time since the start."""
        self.seconds = time.perf_counter() - self._begin_s


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    sets = [clicks.load(n, FLAGS.ids, seed) for seed, n in enumerate((FLAGS.examples, 16_384))]
    size = {"batch_size": FLAGS.batch_size, "seed": FLAGS.seed}
    train = tfscale.data.GlobalBatches(*sets[0], **size)
    valid = tfscale.data.GlobalBatches(*sets[1], batch_size=1024 * hvd.size(), shuffle=False)
    n_rows = clicks.CATEGORIES * FLAGS.ids
    table = tfscale.layers.ShardedEmbedding(n_rows, FLAGS.width, name="table")
    model = training.with_float_outputs(dlrm(table, FLAGS.ids, FLAGS.width))
    rate = training.learning_rate(BATCH, len(train))
    clock = Clock()
    model.compile(
        optimizer=training.distributed(keras.optimizers.Adagrad(rate)),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)],
    )
    metrics = training.fit(model, train, valid, BATCH, watch=clock)
    training.save(model)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    peaks_mb = tfscale.allgather_object(peak_mb)
    if is_first:
        print(f"{len(train) * FLAGS.batch_size / clock.seconds:.0f} samples/s.")
        print(f"MB of memory, by rank: {', '.join(map(str, peaks_mb))}.")
        accuracy = metrics["val_accuracy"]
        print(f"Accuracy: {100 * accuracy:.2f} %. Results are in {training.run_folder()}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
