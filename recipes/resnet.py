"""Classify small pictures with a ResNet of depth 6n+2 ([T], [L]), on one process or many.

    python recipes/resnet.py --data fashion_mnist --depth 20
    tfscale run -np 2 python recipes/resnet.py --data fashion_mnist --depth 20

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.
"""

from pathlib import Path

import keras
import numpy as np
from absl import app, flags
from keras import layers

import command_line
import tfscale
import tfscale.keras as hvd
from datasets import fashion_mnist
from models.resnet import resnet
from run_folder import RunFolder

FLAGS = flags.FLAGS
flags.DEFINE_enum("data", "fashion_mnist", ["fashion_mnist"], "Data set.")
flags.DEFINE_integer("images", 0, "Training pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_integer("test_images", 0, "Test pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_integer("depth", 20, "Layers: 6n+2.", lower_bound=8)
flags.DEFINE_bool("augment", True, "Shift and mirror the training pictures at random.")
flags.DEFINE_integer("epochs", 10, "Passes over the pictures.", lower_bound=1)
flags.DEFINE_integer("batch_size", 128, "Pictures of a step, all ranks together.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.1, "SGD's rate for a batch of 128.", lower_bound=0.0)
flags.DEFINE_integer("seed", 1, "Of initial weights, order and augmentation.", lower_bound=0)
flags.DEFINE_string("data_dir", ".cache/data", "Where to look for the data set first.")
flags.DEFINE_string("run_name", "resnet", "Name of the folder of results.")
flags.DEFINE_string("run_dir", "runs", "Folder in which that folder is made.")
flags.DEFINE_bool("smoke", False, "Shrink everything: under a minute on two cores.")

DATA_SETS = {"fashion_mnist": fashion_mnist.load}
SMOKE = {"images": 2560, "test_images": 512, "depth": 8, "epochs": 3}


def load_data() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return training and test set: pictures float32 in [0, 1], labels int32."""
    parts = zip(
        DATA_SETS[FLAGS.data](FLAGS.data_dir), (FLAGS.images, FLAGS.test_images), strict=True
    )
    sets: list[tuple[np.ndarray, np.ndarray]] = []
    for data, count in parts:
        pictures, labels = data.pictures[: count or None], data.labels[: count or None]
        sets.append((pictures.astype(np.float32) / 255.0, labels.astype(np.int32)))
    return sets


def build_model(pictures: np.ndarray) -> keras.Model:
    """Return augmentation (in training only), standardisation and the network in one model.

    A saved model thus takes pictures as they are. The augmentation is that of the ResNet paper:
    mirror half of the pictures, and shift by up to four pixels, with black where nothing is.
    """
    rows, columns, channels = pictures.shape[1:]
    inputs = keras.Input((rows, columns, channels), name="pictures")
    x = inputs
    if FLAGS.augment:
        x = layers.RandomFlip("horizontal", seed=FLAGS.seed)(x)
        shift = layers.RandomTranslation(
            4 / rows, 4 / columns, "constant", "nearest", seed=FLAGS.seed + 1
        )
        x = shift(x)
    mean, deviation = float(pictures.mean()), float(pictures.std())
    x = layers.Rescaling(1 / deviation, offset=-mean / deviation, name="standardise")(x)
    network = resnet(FLAGS.depth, (rows, columns, channels))
    return keras.Model(inputs, network(x), name=f"{network.name}_{FLAGS.data}")


def learning_rate(steps: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return the rate of each of `steps` steps: up during the first 5 %, then a half cosine to 0.

    The rate is proportional to the global batch (linear scaling rule, 0.1 for 128 as in the
    ResNet paper), which does not depend on the number of ranks. The warm-up is what the rule
    needs for large batches (Goyal et al. 2017). The paper's two drops by ten belong to 160
    epochs; for ten, a cosine needs no tuning.
    """
    peak = FLAGS.learning_rate * FLAGS.batch_size / 128
    warmup_steps = max(1, steps // 20)
    return keras.optimizers.schedules.CosineDecay(
        peak / 10, max(1, steps - warmup_steps), warmup_target=peak, warmup_steps=warmup_steps
    )


def build_optimizer(steps: int) -> keras.optimizers.Optimizer:
    """Return SGD for a training of `steps` steps; the weights decay, biases and scales do not."""
    optimizer = keras.optimizers.SGD(
        learning_rate(steps), momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    return hvd.DistributedOptimizer(optimizer)


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    hvd.init()
    is_first = hvd.rank() == 0
    keras.utils.set_random_seed(FLAGS.seed)

    (x, y), (x_test, y_test) = load_data()
    train_batches = tfscale.data.GlobalBatches(x, y, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
    test_batches = tfscale.data.GlobalBatches(
        x_test, y_test, batch_size=250 * hvd.size(), shuffle=False, drop_remainder=False
    )
    model = build_model(x)
    model.compile(
        optimizer=build_optimizer(len(x) // FLAGS.batch_size * FLAGS.epochs),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    folder = Path(FLAGS.run_dir) / FLAGS.run_name
    settings = {"recipe": "resnet", "ranks": hvd.size(), **command_line.recipe_settings()}
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        *([RunFolder(folder, settings)] if is_first else []),
    ]
    history = model.fit(
        train_batches,
        validation_data=test_batches,
        epochs=FLAGS.epochs,
        callbacks=callbacks,
        verbose=1 if is_first else 0,
    )
    if is_first:
        model.save(folder / "model.keras")
        accuracy = history.history["val_accuracy"][-1]
        print(f"Test accuracy: {100 * accuracy:.2f} %. Results are in {folder}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
