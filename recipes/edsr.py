r"""Restore noisy pictures, or enlarge small ones, with EDSR ([T] chapter 5).

    python recipes/edsr.py --data phantom --filters 32 --images 400
    tfscale run -np 2 python recipes/edsr.py --data phantom --filters 32 --images 400
    tfscale run -np 4 python recipes/edsr.py --data div2k --data-dir DIV2K --scale 2 \
        --blocks 32 --filters 256 --schedule constant --learning-rate 1e-4 \
        --epochs 2000 --patience 50

Phantom: the corruption is Gaussian noise of standard deviation 25/255, the middle one of the
usual levels (Zhang et al., "Beyond a Gaussian denoiser", IEEE TIP 2017; `datasets/phantom.py` has
the reasons). The model trains on 32x32 patches and is validated on whole 256x256 pictures. DIV2K:
random 48x48 squares of pictures shrunk by bicubic filtering, validated on whole pictures.

The papers' rate of 1e-4 for a batch of 16 belongs to a thousand epochs. Few epochs need a higher
one that ends at 0.

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png, run.json, and for Phantom
restored.png.
"""

from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
from absl import app, flags
from keras import layers

import command_line
import plots
import tfscale
import tfscale.keras as hvd
import training
from datasets import div2k, phantom
from metrics import psnr, psnr_of_enlarged
from models.edsr import edsr

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.DEFINE_enum("data", "phantom", ["phantom", "div2k"], "Data set.")
flags.DEFINE_integer("scale", 2, "DIV2K: how much to enlarge.", lower_bound=2, upper_bound=4)
flags.DEFINE_integer("images", 1600, "Phantom: training pictures.", lower_bound=1)
flags.DEFINE_integer("patches_per_image", 0, "In an epoch; 0: 4, for DIV2K 1.", lower_bound=0)
flags.DEFINE_integer("validation_images", 8, "Phantom: validation pictures.", lower_bound=1)
flags.DEFINE_integer("blocks", 16, "Residual blocks.", lower_bound=1)
flags.DEFINE_integer("filters", 64, "Channels of each block.", lower_bound=1)
training.set_defaults(epochs=6, batch_size=16, learning_rate=2e-3)

BATCH = 16
SMOKE = {"images": 200, "validation_images": 2, "blocks": 4, "filters": 16, "epochs": 3}


class Data(NamedTuple):
    """Pictures for training and validation.

    Attributes:
        train: Pairs (corrupted, truth) of patches.
        valid: The same of whole pictures.
        pairs: Validation pictures as arrays, where they are few.
        baselines: PSNR without a model, where it is known.
    """

    train: tfscale.data.GlobalBatches
    valid: tfscale.data.GlobalBatches
    pairs: phantom.Pairs | None
    baselines: dict[str, float]


def load_phantom() -> Data:
    """Make noisy pictures."""
    command_line.refuse("Phantom is restored, not enlarged.", {"scale": None})
    sizes = FLAGS.images, FLAGS.patches_per_image or 4, FLAGS.validation_images
    train, valid = phantom.load(*sizes, seed=FLAGS.seed, cache_dir=FLAGS.data_dir)
    return Data(
        tfscale.data.GlobalBatches(
            train.corrupted, train.truth, batch_size=FLAGS.batch_size, seed=FLAGS.seed
        ),
        tfscale.data.GlobalBatches(  # Whole pictures are large: one per rank.
            valid.corrupted,
            valid.truth,
            batch_size=hvd.size(),
            shuffle=False,
        ),
        valid,
        {"psnr": float(np.mean(psnr(valid.truth, valid.corrupted)))},
    )


def load_div2k() -> Data:
    """Open small and large pictures."""
    whole = "DIV2K is used as a whole."
    command_line.refuse(whole, {"images": None, "validation_images": None})
    options = {"batch_size": FLAGS.batch_size, "seed": FLAGS.seed}
    squares = FLAGS.patches_per_image or 1
    data = div2k.load(FLAGS.data_dir, FLAGS.scale, squares_per_image=squares, **options)
    return Data(data.train, data.valid, None, {})


def build_network() -> keras.Model:
    """Return EDSR for the data; in colour it works on pictures less their mean colour."""
    size = {"blocks": FLAGS.blocks, "filters": FLAGS.filters}
    if FLAGS.data == "phantom":
        return edsr(**size)
    network = edsr(**size, channels=3, scale=FLAGS.scale)
    pictures = keras.Input((None, None, 3), name="small")
    less = layers.Rescaling(1.0, offset=[-mean for mean in div2k.MEAN], name="less_mean")
    more = layers.Rescaling(1.0, offset=list(div2k.MEAN), name="plus_mean")
    return keras.Model(pictures, more(network(less(pictures))), name=network.name)


def build_model(steps_per_epoch: int) -> keras.Model:
    """Return EDSR, compiled."""
    model = training.with_float_outputs(build_network())
    rate = training.learning_rate(BATCH, steps_per_epoch)
    measure = psnr if FLAGS.data == "phantom" else psnr_of_enlarged(FLAGS.scale)
    model.compile(
        optimizer=training.distributed(keras.optimizers.Adam(rate)),
        loss="mean_absolute_error",  # As in the EDSR paper: sharper than the squared error.
        metrics=[measure],
    )
    return model


def show_restored(model: keras.Model, valid: phantom.Pairs, path: Path) -> None:
    """Draw patches of the first three validation pictures: middle, top and bottom of the head."""
    restored = model.predict(valid.corrupted[:3], batch_size=1, verbose=0)
    rows = []
    for i, (top, left) in zip(range(len(restored)), ((80, 80), (10, 80), (150, 80)), strict=False):
        patch = np.s_[i, top : top + 96, left : left + 96]
        rows.append(plots.Restoration(valid.corrupted[patch], restored[patch], valid.truth[patch]))
    with plots.failure_is_a_warning(path):
        plots.restorations(rows, path)


def early_stopping() -> keras.callbacks.Callback:
    """Return the stop rule of [T] 5.4.1: no 0.1 dB more in --patience (there 50) epochs."""
    return keras.callbacks.EarlyStopping(
        "val_psnr", min_delta=0.1, patience=FLAGS.patience, mode="max"
    )


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    data = {"phantom": load_phantom, "div2k": load_div2k}[FLAGS.data]()
    model = build_model(len(data.train))
    metrics = training.fit(
        model, data.train, data.valid, BATCH, baselines=data.baselines, stop=early_stopping
    )
    folder = training.run_folder()
    if is_first:
        given, restored = data.baselines.get("psnr"), metrics["val_psnr"]
        gain = "" if given is None else f", input {given:.2f} dB ({restored - given:+.2f} dB)"
        print(f"Validation PSNR: restored {restored:.2f} dB{gain}. Results are in {folder}.")
    if is_first and data.pairs is not None:
        show_restored(model, data.pairs, folder / "restored.png")
    # Compiled without our metric, the file loads anywhere; the optimizer's state stays.
    model.compile(optimizer=model.optimizer, loss=model.loss)
    training.save(model)


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
