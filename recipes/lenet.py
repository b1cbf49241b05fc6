"""Classify digits or small pictures with LeNet-5 or TorchNet as [F] does, on one process or many.

    python recipes/lenet.py --data mnist
    tfscale run -np 2 python recipes/lenet.py --data cifar10 --model torchnet --epochs 100

As in the paper: SGD with a rate of 0.001 and a Nesterov momentum of 0.9, the same for batches
of 16 to 512; at most 20 epochs (100 for CIFAR-10); the end comes after 10 epochs without a lower
validation loss. The paper gives each process a fixed share of the data and shuffles inside it:
`--shuffle shards`. Ours is `--shuffle global`.

`runs/<name>/` then holds model.keras, metrics.jsonl, learning_curve.png and run.json.
"""

import keras
from absl import app, flags
from keras import layers

import command_line
import datasets
import momentum
import tfscale
import tfscale.keras as hvd
import training
from datasets.shards import ORDERS, FixedShards
from models.lenet import lenet5, torchnet

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(training)
flags.adopt_module_key_flags(momentum)
flags.DEFINE_string("data", "mnist", f"Data set: {', '.join(datasets.IN_MEMORY)}, or HDF5 file.")
flags.DEFINE_integer("images", 0, "Training pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_integer("test_images", 0, "Test pictures to use; 0 means all.", lower_bound=0)
flags.DEFINE_enum("model", "lenet5", ["lenet5", "torchnet"], "Network.")
flags.DEFINE_enum("shuffle", "global", ["global", *ORDERS], "Over all data, or inside of shares.")
training.set_defaults(
    epochs=20, batch_size=16, learning_rate=1e-3, schedule="constant", scaling="none", patience=10
)

BATCH = 16
SMOKE = {"images": 2560, "test_images": 512, "epochs": 3, "batch_size": 128, "learning_rate": 0.05}
NETWORKS = {"lenet5": lenet5, "torchnet": torchnet}


def build_model(shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Return the network after a division by 255: it takes pictures as they are."""
    inputs = keras.Input(shape, name="pictures")
    network = NETWORKS[FLAGS.model](shape, classes)
    outputs = network(layers.Rescaling(1 / 255, name="to_unit_range")(inputs))
    return training.with_float_outputs(keras.Model(inputs, outputs, name=network.name))


def early_stopping() -> keras.callbacks.Callback:
    """Return the paper's stop rule: no lower validation loss for --patience epochs."""
    return keras.callbacks.EarlyStopping("val_loss", patience=FLAGS.patience)


def main(_: list[str]) -> None:
    """Train, and leave the results in the run's folder."""
    is_first = training.start()
    sets = datasets.load(FLAGS.data, FLAGS.data_dir)
    data = sets.train.first(FLAGS.images)
    if FLAGS.shuffle == "global":
        train = tfscale.data.GlobalBatches(*data, batch_size=FLAGS.batch_size, seed=FLAGS.seed)
    else:
        train = FixedShards(data, FLAGS.batch_size, FLAGS.seed, FLAGS.shuffle)
    test = tfscale.data.GlobalBatches(
        *sets.test.first(FLAGS.test_images),
        batch_size=250 * hvd.size(),
        shuffle=False,
    )
    model = build_model(data.pictures.shape[1:], sets.classes)
    rate = training.learning_rate(BATCH, len(train))
    model.compile(
        optimizer=training.distributed(momentum.optimizer(rate, nesterov=True)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    metrics = training.fit(model, train, test, BATCH, stop=early_stopping)
    training.save(model)
    if is_first:
        accuracy = metrics["val_accuracy"]
        print(f"Test accuracy: {100 * accuracy:.2f} %. Results are in {training.run_folder()}.")


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.flags_parser(SMOKE))
