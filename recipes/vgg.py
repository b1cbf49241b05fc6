r"""Classify pictures with a VGG ([T] chapters 3 and 4), on one process or many.

    python recipes/vgg.py --data cifar10 --model a --dense 512,512
    tfscale run -np 8 python recipes/vgg.py --data imagenet --data-dir ImageNet --model a \
        --batch-size 256 --epochs 74 --exchange chunked:replicated_dense=2
    tfscale run -np 2 python recipes/vgg.py --data generated --model 16 --report

`a` and `16` are those of Simonyan and Zisserman 2015; `128`, `256` and `512` are VGG-A with so many
filters in each convolution; `small` has three convolutions of 32, 64 and 128, `tiny` half as many.
Small pictures take up to five halvings: stages that they cannot take are left out, so 28x28 ones
get four.

SGD with momentum 0.9, a rate of 0.01 for a batch of 256, dropout 0.5, as in the paper. Weights
decay as in Keras: w -= rate * decay * w in each step, besides the momentum. The paper adds
decay * w to the gradient instead, and with a momentum of 0.9 a gradient counts 1 / (1 - 0.9) = 10
times in the end. Its 5e-4 is therefore the default of 5e-3 here.

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.
"""

from typing import Any

import keras
from absl import app, flags
from keras import layers

import command_line
import datasets
import momentum
import tfscale
import tfscale.keras as hvd
import training
from datasets import imagenet
from models.vgg import VGG_16, VGG_A, VGG_SMALL, VGG_TINY, vgg, vgg_a_of_width

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.adopt_module_key_flags(momentum)
flags.DEFINE_string("data", "imagenet", f"imagenet, {', '.join(datasets.IN_MEMORY)}, or HDF5 file.")
flags.DEFINE_integer(
    "images", 0, "Training pictures to use; 0 means all, as imagenet does.", lower_bound=0
)
flags.DEFINE_integer(
    "test_images", 0, "Test pictures to use; 0 means all, as imagenet does.", lower_bound=0
)
flags.DEFINE_enum("model", "a", ["a", "16", "128", "256", "512", "small", "tiny"], "Which VGG.")
flags.DEFINE_list("dense", ["4096", "4096"], "Units of the hidden dense layers.")
flags.DEFINE_float("dropout", 0.5, "Rate after them.", lower_bound=0.0)
flags.DEFINE_float(
    "weight_decay", 5e-3,
    "Of Keras, outside of the momentum; 5e-3 equals the L2 of 5e-4 of Simonyan and Zisserman 2015.",
    lower_bound=0.0,
)  # fmt: skip
flags.DEFINE_float(
    "stop_at", 0.0, "Stop after the epoch that reaches this validation accuracy; 0: never.",
    lower_bound=0.0, upper_bound=1.0,
)  # fmt: skip
training.set_defaults(epochs=10, batch_size=256, learning_rate=0.01)

BATCH = 256
SMOKE = {
    "data": "generated",
    "images": 320,
    "test_images": 128,
    "model": "128",
    "dense": ["128", "128"],
    "dropout": 0.0,
    "batch_size": 16,
    "learning_rate": 0.16,
    "epochs": 4,
}


def build_model(shape: tuple[int, int, int], classes: int, *, is_centred: bool) -> keras.Model:
    """Return the network, after a centring of pixels where the data does not do it."""
    known = {"a": VGG_A, "16": VGG_16, "small": VGG_SMALL, "tiny": VGG_TINY}
    stages = known.get(FLAGS.model) or vgg_a_of_width(int(FLAGS.model))
    fitting = [stage for n, stage in enumerate(stages, 1) if min(shape[:2]) >> n]
    dense = [int(units) for units in FLAGS.dense]
    network = vgg(fitting, shape, dense, classes, FLAGS.dropout)
    if is_centred:
        return training.with_float_outputs(network)
    inputs = keras.Input(shape, name="pictures")
    outputs = network(layers.Rescaling(1 / 64, offset=-2.0, name="centre")(inputs))
    return training.with_float_outputs(keras.Model(inputs, outputs, name=network.name))


def load() -> tuple[Any, Any, keras.Model]:
    """Return training data, test data and the network."""
    if FLAGS.data == "imagenet":
        command_line.refuse("ImageNet is used whole.", {"images": 0, "test_images": 0})
        data = imagenet.load(FLAGS.data_dir, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
        return data.train, data.valid, build_model((224, 224, 3), data.classes, is_centred=True)
    sets = datasets.load(FLAGS.data, FLAGS.data_dir)
    train = tfscale.data.GlobalBatches(
        *sets.train.first(FLAGS.images), batch_size=FLAGS.batch_size, seed=FLAGS.seed
    )
    test = tfscale.data.GlobalBatches(
        *sets.test.first(FLAGS.test_images),
        batch_size=64 * hvd.size(),
        shuffle=False,
    )
    shape = sets.train.pictures.shape[1:]
    return train, test, build_model(shape, sets.classes, is_centred=False)


def build_optimizer(steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Return SGD or LARS; the weights decay, biases do not."""
    rate = training.learning_rate(BATCH, steps_per_epoch)
    decay = {"weight_decay": FLAGS.weight_decay, "undecayed": ("bias",)}
    return training.distributed(momentum.optimizer(rate, **decay))


def early_stopping() -> keras.callbacks.Callback:
    """Return what ends training once validation accuracy has not risen for --patience epochs."""
    return keras.callbacks.EarlyStopping("val_accuracy", patience=FLAGS.patience, mode="max")


class StopAt(keras.callbacks.Callback):
    """Ends training after the epoch that reaches --stop-at."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Look at the mean over ranks, which all of them have."""
        if (logs or {}).get("val_accuracy", 0.0) >= FLAGS.stop_at:
            self.model.stop_training = True


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    train, test, model = load()
    model.compile(
        optimizer=build_optimizer(len(train)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    watch = StopAt() if FLAGS.stop_at else None
    metrics = training.fit(model, train, test, BATCH, stop=early_stopping, watch=watch)
    training.save(model)
    if is_first:
        accuracy = metrics["val_accuracy"]
        print(f"Test accuracy: {100 * accuracy:.2f} %. Results are in {training.run_folder()}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
