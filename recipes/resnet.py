r"""Classify pictures with a ResNet ([T], [L]), on one process or many.

    python recipes/resnet.py --data fashion_mnist --depth 20
    tfscale run -np 2 python recipes/resnet.py --data fashion_mnist --depth 20
    tfscale run -np 8 python recipes/resnet.py --data imagenet --data-dir ImageNet --depth 50 \
        --batch-size 256 --epochs 90 --schedule constant --decay-epochs 30,60,80

Small pictures get a ResNet of depth 6n+2 for 32x32, ImageNet gets ResNet-50. `runs/<name>/` then
holds model.keras, metrics.jsonl, learning_curve.png and run.json.

Rates: 0.1 for a batch of 128 (ImageNet: 256), as in He et al. 2016. [T] 5.4.3 divides it by ten
after 80 and 120 of 140 epochs: `--schedule constant --decay-epochs 80,120`. For ten epochs, the
default, a cosine needs no tuning.

Weights decay as in Keras: w -= rate * decay * w in each step, besides the momentum. The paper adds
decay * w to the gradient instead, and with a momentum of 0.9 a gradient counts 1 / (1 - 0.9) = 10
times in the end. Its 1e-4 is therefore the default of 1e-3 here.
"""

import sys
from typing import Any

import keras
import numpy as np
from absl import app, flags
from keras import layers

import command_line
import datasets
import momentum
import tfscale
import tfscale.keras as hvd
import training
from datasets import imagenet
from datasets.pictures import LabelledPictures, augmented_batches
from models.resnet import resnet
from models.resnet50 import resnet50

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.adopt_module_key_flags(momentum)
flags.DEFINE_string(
    "data", "fashion_mnist", f"{', '.join(datasets.IN_MEMORY)}, imagenet, or an HDF5 file."
)
flags.DEFINE_integer(
    "images", 0, "Training pictures to use; 0 means all, as imagenet does.", lower_bound=0
)
flags.DEFINE_integer(
    "test_images", 0, "Test pictures to use; 0 means all, as imagenet does.", lower_bound=0
)
flags.DEFINE_integer("depth", 20, "Layers: 6n+2; with imagenet 50.", lower_bound=8)
flags.DEFINE_bool(
    "augment", True, "Shift and mirror the training pictures at random, as imagenet does."
)
flags.DEFINE_float(
    "weight_decay", 1e-3,
    "Of Keras, outside of the momentum; 1e-3 equals the L2 of 1e-4 of He et al. 2016.",
    lower_bound=0.0,
)  # fmt: skip
training.set_defaults(epochs=10, batch_size=128, learning_rate=0.1)

SMOKE = {"images": 2560, "test_images": 512, "depth": 8, "epochs": 3}


def train_batches(data: LabelledPictures) -> tfscale.data.GlobalBatches:
    """Return the training pictures, augmented as in the ResNet paper if asked for."""
    if FLAGS.augment:
        return augmented_batches(data, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
    return tfscale.data.GlobalBatches(*data, batch_size=FLAGS.batch_size, seed=FLAGS.seed)


def build_model(pictures: np.ndarray, classes: int) -> keras.Model:
    """Return standardisation and a small network in one model: it takes pictures as they are."""
    inputs = keras.Input(pictures.shape[1:], name="pictures")
    mean, deviation = float(pictures.mean()), float(pictures.std())
    x = layers.Rescaling(1 / deviation, offset=-mean / deviation, name="standardise")(inputs)
    network = resnet(FLAGS.depth, pictures.shape[1:], classes)
    return training.with_float_outputs(keras.Model(inputs, network(x), name=network.name))


def load_small() -> tuple[Any, Any, keras.Model]:
    """Return training data, test data and the network for small pictures."""
    sets = datasets.load(FLAGS.data, FLAGS.data_dir)
    test = tfscale.data.GlobalBatches(
        *sets.test.first(FLAGS.test_images),
        batch_size=250 * hvd.size(),
        shuffle=False,
    )
    train = train_batches(sets.train.first(FLAGS.images))
    return train, test, build_model(sets.train.pictures, sets.classes)


def load_imagenet() -> tuple[Any, Any, keras.Model]:
    """Return training data, validation data and ResNet-50."""
    ignored = {"images": 0, "test_images": 0, "augment": True}
    command_line.refuse("ImageNet is used whole, and always augmented.", ignored)
    if FLAGS.depth != 50:
        sys.exit(f"ImageNet is for ResNet-50. Received: --depth={FLAGS.depth}. Pass --depth 50.")
    data = imagenet.load(FLAGS.data_dir, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
    model = training.with_float_outputs(resnet50(classes=data.classes))
    return data.train, data.valid, model


def build_optimizer(batch: int, steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Return SGD or LARS; the weights decay, biases and scales do not."""
    rate = training.learning_rate(batch, steps_per_epoch)
    decay = {"weight_decay": FLAGS.weight_decay, "undecayed": ("gamma", "beta", "bias")}
    return training.distributed(momentum.optimizer(rate, nesterov=True, **decay))


def early_stopping() -> keras.callbacks.Callback:
    """Return what ends training once validation accuracy has not risen for --patience epochs."""
    return keras.callbacks.EarlyStopping("val_accuracy", patience=FLAGS.patience, mode="max")


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    is_small = FLAGS.data != "imagenet"
    batch = 128 if is_small else 256  # For which the rate is meant.
    train, test, model = load_small() if is_small else load_imagenet()
    model.compile(
        optimizer=build_optimizer(batch, len(train)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    metrics = training.fit(model, train, test, batch, stop=early_stopping)
    training.save(model)
    if is_first:
        accuracy = metrics["val_accuracy"]
        print(f"Test accuracy: {100 * accuracy:.2f} %. Results are in {training.run_folder()}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
