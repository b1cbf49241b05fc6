"""Classify digits with the perceptron of [S], on one process or many.

    python recipes/mlp.py --data mnist
    tfscale run -np 2 python recipes/mlp.py --data mnist                      # gradient sharing
    tfscale run -np 2 python recipes/mlp.py --data mnist --average-every 1    # parameter averaging

As in the report: SGD, squared error, batches of 64, 20 epochs. Its fixed rate of 0.01 is, in its
published program, for half the squared error summed over outputs and over the batch; for Keras's
mean over ten outputs and the batch of 64 that is 0.01 * 64 * 10 / 2 = 3.2, and it grows with the
batch. For parameter averaging every process has batches of 64 of its own: pass `--batch-size` 64
times the number of ranks.

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.
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
from datasets.pictures import LabelledPictures
from models.mlp import mlp

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.DEFINE_string("data", "mnist", f"Data set: {', '.join(datasets.IN_MEMORY)}, or HDF5 file.")
flags.DEFINE_integer("images", 0, "Training pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_integer("test_images", 0, "Test pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_list("hidden", ["256", "64"], "Units of the hidden layers.")
training.set_defaults(epochs=20, batch_size=64, learning_rate=3.2, schedule="constant")

BATCH = 64
SMOKE = {"images": 2560, "test_images": 512, "epochs": 3, "batch_size": 128, "learning_rate": 0.5}


def with_one_hot(data: LabelledPictures, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures and targets (count, classes): the mean squared error needs numbers."""
    return data.pictures, np.eye(classes, dtype=np.float32)[data.labels]


def build_model(shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Return the perceptron after a division by 255: it takes pictures as they are."""
    inputs = keras.Input(shape, name="pictures")
    network = mlp([int(units) for units in FLAGS.hidden], shape, classes)
    outputs = network(layers.Rescaling(1 / 255, name="to_unit_range")(inputs))
    return training.with_float_outputs(keras.Model(inputs, outputs, name=network.name))


def early_stopping() -> keras.callbacks.Callback:
    """Return what ends training after --patience epochs without a lower validation loss."""
    return keras.callbacks.EarlyStopping("val_loss", patience=FLAGS.patience)


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    sets = datasets.load(FLAGS.data, FLAGS.data_dir)
    x, y = with_one_hot(sets.train.first(FLAGS.images), sets.classes)
    train = tfscale.data.GlobalBatches(x, y, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
    test = tfscale.data.GlobalBatches(
        *with_one_hot(sets.test.first(FLAGS.test_images), sets.classes),
        batch_size=250 * hvd.size(),
        shuffle=False,
    )
    model = build_model(x.shape[1:], sets.classes)
    rate = training.learning_rate(BATCH, len(train))
    model.compile(
        optimizer=training.distributed(keras.optimizers.SGD(rate)),
        loss="mean_squared_error",
        metrics=["accuracy"],
    )
    metrics = training.fit(model, train, test, BATCH, stop=early_stopping)
    training.save(model)
    if is_first:
        accuracy = metrics["val_accuracy"]
        print(f"Test accuracy: {100 * accuracy:.2f} %. Results are in {training.run_folder()}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
