"""Classify small pictures with a ResNet of depth 6n+2 ([T], [L]), on one process or many.

    python recipes/resnet.py --data fashion_mnist --depth 20
    tfscale run -np 2 python recipes/resnet.py --data fashion_mnist --depth 20

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.

Rates: 0.1 for a batch of 128 as in He et al. 2016. Their two drops by ten (`--schedule steps`)
belong to 160 epochs; for ten, a cosine needs no tuning.
"""

import keras
import numpy as np
from absl import app, flags
from keras import layers

import command_line
import datasets
import tfscale
import tfscale.keras as hvd
import training
from datasets.pictures import LabelledPictures, augmented_batches
from models.resnet import resnet

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.DEFINE_string(
    "data", "fashion_mnist", f"Data set: {', '.join(datasets.IN_MEMORY)}, or an HDF5 file."
)
flags.DEFINE_integer("images", 0, "Training pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_integer("test_images", 0, "Test pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_integer("depth", 20, "Layers: 6n+2.", lower_bound=8)
flags.DEFINE_bool("augment", True, "Shift and mirror the training pictures at random.")
training.set_defaults(epochs=10, batch_size=128, learning_rate=0.1)

BATCH = 128  # For which the rate is meant.
SMOKE = {"images": 2560, "test_images": 512, "depth": 8, "epochs": 3}


def train_batches(data: LabelledPictures) -> tfscale.data.GlobalBatches:
    """Return the training pictures, augmented as in the ResNet paper if asked for."""
    if FLAGS.augment:
        return augmented_batches(data, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
    return tfscale.data.GlobalBatches(*data, batch_size=FLAGS.batch_size, seed=FLAGS.seed)


def build_model(pictures: np.ndarray, classes: int) -> keras.Model:
    """Return standardisation and the network in one model: it takes pictures as they are."""
    inputs = keras.Input(pictures.shape[1:], name="pictures")
    mean, deviation = float(pictures.mean()), float(pictures.std())
    x = layers.Rescaling(1 / deviation, offset=-mean / deviation, name="standardise")(inputs)
    network = resnet(FLAGS.depth, pictures.shape[1:], classes)
    return training.with_float_outputs(keras.Model(inputs, network(x), name=network.name))


def build_optimizer(steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Return SGD; the weights decay, biases and scales do not."""
    rate = training.learning_rate(BATCH, steps_per_epoch)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    return training.distributed(optimizer)


def early_stopping() -> keras.callbacks.Callback:
    """Return what ends training once validation accuracy has not risen for --patience epochs."""
    return keras.callbacks.EarlyStopping("val_accuracy", patience=FLAGS.patience, mode="max")


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    sets = datasets.load(FLAGS.data, FLAGS.data_dir)
    train = train_batches(sets.train.first(FLAGS.images))
    test = tfscale.data.GlobalBatches(
        *sets.test.first(FLAGS.test_images),
        batch_size=250 * hvd.size(),
        shuffle=False,
        drop_remainder=False,
    )
    model = build_model(sets.train.pictures, sets.classes)
    model.compile(
        optimizer=build_optimizer(len(train)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = training.fit(model, train, test, BATCH, stop=early_stopping)
    if is_first:
        folder = training.run_folder()
        model.save(folder / "model.keras")
        accuracy = history["val_accuracy"][-1]
        print(f"Test accuracy: {100 * accuracy:.2f} %. Results are in {folder}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
