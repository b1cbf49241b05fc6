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
import training
from datasets import phantom
from metrics import psnr
from models.edsr import edsr

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.DEFINE_enum("data", "phantom", ["phantom"], "Data set.")
flags.DEFINE_integer("images", 1600, "Training pictures.", lower_bound=1)
flags.DEFINE_integer("patches_per_image", 4, "32x32 patches cut from each.", lower_bound=1)
flags.DEFINE_integer("validation_images", 8, "Whole validation pictures.", lower_bound=1)
flags.DEFINE_integer("blocks", 16, "Residual blocks.", lower_bound=1)
flags.DEFINE_integer("filters", 64, "Channels of each block.", lower_bound=1)
training.set_defaults(epochs=6, batch_size=16, learning_rate=2e-3)

BATCH = 16
SMOKE = {
    "images": 200,
    "patches_per_image": 4,
    "validation_images": 2,
    "blocks": 4,
    "filters": 16,
    "epochs": 3,
}


def show_restored(model: keras.Model, valid: phantom.Pairs, path: Path) -> None:
    """Draw patches of the first three validation pictures: middle, top and bottom of the head."""
    restored = model.predict(valid.corrupted[:3], batch_size=1, verbose=0)
    rows = []
    for i, (top, left) in zip(range(len(restored)), ((80, 80), (10, 80), (150, 80)), strict=False):
        patch = np.s_[i, top : top + 96, left : left + 96]
        rows.append(plots.Restoration(valid.corrupted[patch], restored[patch], valid.truth[patch]))
    plots.restorations(rows, path)


def build_model(steps_per_epoch: int) -> keras.Model:
    """Return EDSR, compiled."""
    model = training.with_float_outputs(edsr(blocks=FLAGS.blocks, filters=FLAGS.filters))
    rate = training.learning_rate(BATCH, steps_per_epoch)
    model.compile(
        optimizer=training.distributed(keras.optimizers.Adam(rate)),
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


def early_stopping() -> keras.callbacks.Callback:
    """Return the stop rule of [T] 5.4.1: no 0.1 dB more in --patience (there 50) epochs."""
    return keras.callbacks.EarlyStopping(
        "val_psnr", min_delta=0.1, patience=FLAGS.patience, mode="max"
    )


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    sizes = FLAGS.images, FLAGS.patches_per_image, FLAGS.validation_images
    train, valid = phantom.load(*sizes, seed=FLAGS.seed, cache_dir=FLAGS.data_dir)
    train_batches = tfscale.data.GlobalBatches(
        train.corrupted, train.truth, batch_size=FLAGS.batch_size, seed=FLAGS.seed
    )
    valid_batches = tfscale.data.GlobalBatches(  # Whole pictures are large: one per rank.
        valid.corrupted, valid.truth, batch_size=hvd.size(), shuffle=False, drop_remainder=False
    )
    model = build_model(len(train_batches))
    input_psnr = float(np.mean(psnr(valid.truth, valid.corrupted)))
    baselines = {"psnr": input_psnr}
    history = training.fit(
        model, train_batches, valid_batches, BATCH, baselines=baselines, stop=early_stopping
    )
    if is_first:
        folder = training.run_folder()
        write_results(model, valid, folder)
        restored = history["val_psnr"][-1]
        print(
            f"Validation PSNR: input {input_psnr:.2f} dB, restored {restored:.2f} dB "
            f"({restored - input_psnr:+.2f} dB). Results are in {folder}."
        )


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
