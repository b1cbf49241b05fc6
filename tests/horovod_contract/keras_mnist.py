"""A script as users of Horovod write it. The test changes one line: the import of hvd."""

import os
import sys

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

BATCH_SIZE = 32
EPOCHS = 4
FOLDER = sys.argv[1]

hvd.init()

# One GPU per process, its memory taken as needed.
gpus = tf.config.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")


def load_digits(count, seed):
    """Ten blurred shapes of 28 x 28 with noise; the same on every process."""
    shapes = np.kron(np.random.default_rng(0).uniform(size=(10, 7, 7)) > 0.5, np.ones((1, 4, 4)))
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, size=count)
    pictures = shapes[labels] + random.normal(scale=0.6, size=(count, 28, 28))
    return pictures[..., np.newaxis].astype("float32"), labels.astype("int64")


x, y = load_digits(2048, seed=1)
x_test, y_test = load_digits(512, seed=2)
dataset = tf.data.Dataset.from_tensor_slices((x, y))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(1024).batch(BATCH_SIZE)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# The global batch grows with the number of processes, and the learning rate with it.
scaled_rate = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.Adam(scaled_rate),
    backward_passes_per_step=1,
    average_aggregated_gradients=True,
)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"]
)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_rate, warmup_epochs=2, verbose=1),
    keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=10, verbose=1),
]
if hvd.rank() == 0:
    path = os.path.join(FOLDER, "checkpoint-{epoch}.keras")
    callbacks.append(keras.callbacks.ModelCheckpoint(path))

model.fit(
    dataset,
    steps_per_epoch=len(x) // BATCH_SIZE // hvd.size(),
    callbacks=callbacks,
    epochs=EPOCHS,
    verbose=2 if hvd.rank() == 0 else 0,
)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}", flush=True)
