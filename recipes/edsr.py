"""Restore noisy pictures with EDSR-16 ([T] chapter 5), on one process or many.

    python recipes/edsr.py --data phantom --filters 32 --images 400
    tfscale run -np 2 python recipes/edsr.py --data phantom --filters 32 --images 400

The corruption is Gaussian noise of standard deviation 25/255, see `datasets/phantom.py`. The
model trains on 32x32 patches and is validated on whole 256x256 pictures. `runs/<name>/` then
holds model.keras, metrics.jsonl, learning_curve.png, restored.png and run.json.
"""

from pathlib import Path

import keras
import numpy as np
from absl import app, flags

import command_line
import plots
import tfscale
import tfscale.keras as hvd
from datasets import phantom
from metrics import psnr
from models.edsr import edsr
from run_folder import RunFolder

FLAGS = flags.FLAGS
flags.DEFINE_enum("data", "phantom", ["phantom"], "Data set.")
flags.DEFINE_integer("images", 1600, "Training pictures.", lower_bound=1)
flags.DEFINE_integer("patches_per_image", 4, "32x32 patches cut from each.", lower_bound=1)
flags.DEFINE_integer("validation_images", 8, "Whole validation pictures.", lower_bound=1)
flags.DEFINE_integer("blocks", 16, "Residual blocks.", lower_bound=1)
flags.DEFINE_integer("filters", 64, "Channels of each block.", lower_bound=1)
flags.DEFINE_integer("epochs", 6, "Passes over the patches.", lower_bound=1)
flags.DEFINE_integer("batch_size", 16, "Patches of a step, all ranks together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 2e-3, "Adam's rate for a batch of 16.", lower_bound=0.0)
flags.DEFINE_integer("seed", 1, "Of data, initial weights and order.", lower_bound=0)
flags.DEFINE_string("data_dir", ".cache/data", "Where generated pictures are kept.")
flags.DEFINE_string("run_name", "edsr", "Name of the folder of results.")
flags.DEFINE_string("run_dir", "runs", "Folder in which that folder is made.")
flags.DEFINE_bool("smoke", False, "Shrink everything: under a minute on two cores.")

SMOKE = {
    "images": 200,
    "patches_per_image": 4,
    "validation_images": 2,
    "blocks": 4,
    "filters": 16,
    "epochs": 3,
}


def learning_rate(steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return the rate of each of `steps` steps: up during the first 5 %, then a half cosine to 0.

    The rate is proportional to the global batch (linear scaling rule), which does not depend on
    the number of ranks: the same flags train the same model on any number of them. Large batches
    need the warm-up, because the rule does not hold while weights change fast; small ones lose
    nothing by it. The papers' constant rate of 1e-4 for a batch of 16 belongs to a thousand
    epochs. A few epochs need a higher one that ends at 0: after six (32 filters, 400
    pictures) a peak of 2e-3 gave 38.6 dB, 1e-3 gave 36.8 dB.
    """
    peak = FLAGS.learning_rate * FLAGS.batch_size / 16
    warmup_steps = max(1, steps // 20)
    return keras.optimizers.schedules.CosineDecay(
        peak / 10, max(1, steps - warmup_steps), warmup_target=peak, warmup_steps=warmup_steps
    )


def show_restored(model: keras.Model, valid: phantom.Pairs, path: Path) -> None:
    """Draw patches of the first three validation pictures: middle, top and bottom of the head."""
    restored = model.predict(valid.corrupted[:3], batch_size=1, verbose=0)
    rows = []
    for i, (top, left) in zip(range(len(restored)), ((80, 80), (10, 80), (150, 80)), strict=False):
        patch = np.s_[i, top : top + 96, left : left + 96]
        rows.append(plots.Restoration(valid.corrupted[patch], restored[patch], valid.truth[patch]))
    plots.restorations(rows, path)


def build_model(steps: int) -> keras.Model:
    """Return EDSR, compiled for a training of `steps` steps."""
    model = edsr(blocks=FLAGS.blocks, filters=FLAGS.filters)
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate(steps))),
        loss="mean_absolute_error",  # As in the EDSR paper: sharper than the squared error.
        metrics=[psnr],
    )
    return model


def write_results(model: keras.Model, valid: phantom.Pairs, folder: Path) -> None:
    """Write the restored patches and the model; called by rank 0 only."""
    show_restored(model, valid, folder / "restored.png")
    # Compiled without our metric, the file loads anywhere; the optimizer's state stays.
    model.compile(optimizer=model.optimizer, loss=model.loss)
    model.save(folder / "model.keras")


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    hvd.init()
    is_first = hvd.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)

    sizes = FLAGS.images, FLAGS.patches_per_image, FLAGS.validation_images
    train, valid = phantom.load(*sizes, seed=FLAGS.seed, cache_dir=FLAGS.data_dir)
    train_batches = tfscale.data.GlobalBatches(
        train.corrupted, train.truth, batch_size=FLAGS.batch_size, seed=FLAGS.seed
    )
    valid_batches = tfscale.data.GlobalBatches(  # Whole pictures are large: one per rank.
        valid.corrupted, valid.truth, batch_size=hvd.size(), shuffle=False, drop_remainder=False
    )
    model = build_model(len(train.truth) // FLAGS.batch_size * FLAGS.epochs)

    input_psnr = float(np.mean(psnr(valid.truth, valid.corrupted)))
    folder = Path(FLAGS.run_dir) / FLAGS.run_name
    settings = {"recipe": "edsr", "ranks": hvd.size(), **command_line.recipe_settings()}
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        *([RunFolder(folder, settings, {"psnr": input_psnr})] if is_first else []),
    ]
    history = model.fit(
        train_batches,
        validation_data=valid_batches,
        epochs=FLAGS.epochs,
        callbacks=callbacks,
        verbose=1 if is_first else 0,
    )
    if is_first:
        write_results(model, valid, folder)
        restored = history.history["val_psnr"][-1]
        print(
            f"Validation PSNR: input {input_psnr:.2f} dB, restored {restored:.2f} dB "
            f"({restored - input_psnr:+.2f} dB). Results are in {folder}."
        )


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
