"""Most callbacks of Keras in one fit, and one of the user's own."""

import json

import keras
import numpy as np
from keras import callbacks, layers

keras.utils.set_random_seed(17)
x = np.random.normal(size=(270, 8)).astype("float32")
y = np.tanh(x @ np.random.normal(size=(8, 1))) + 0.1 * np.random.normal(size=(270, 1))


class WeightNorms(callbacks.Callback):
    """Writes a line of JSON per epoch, and lowers the learning rate when the loss rises."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.last = float("inf")
        self.batches = 0

    def on_train_begin(self, logs=None):
        self.file = open(self.path, "w")  # noqa: SIM115

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        norm = float(sum(np.square(w).sum() for w in self.model.get_weights()) ** 0.5)
        entry = {"epoch": epoch, "norm": round(norm, 7), "batches": self.batches}
        self.file.write(json.dumps(entry) + "\n")
        if logs["val_loss"] > self.last:
            self.model.optimizer.learning_rate = 0.5 * logs["learning_rate"]
            print(f"the loss rose in epoch {epoch + 1}")
        self.last = logs["val_loss"]

    def on_train_end(self, logs=None):
        self.file.close()
        print("batches seen:", self.batches)


def schedule(epoch, rate):
    return rate if epoch < 2 else rate * 0.8


model = keras.Sequential(
    [
        keras.Input(shape=(8,)),
        layers.Dense(16, activation="tanh"),
        layers.BatchNormalization(),
        layers.Dense(1),
    ]
)
model.compile(keras.optimizers.SGD(0.3, momentum=0.8), loss="mse", metrics=["mae"])
say = callbacks.LambdaCallback(
    on_epoch_begin=lambda epoch, logs: print(f"-- epoch {epoch + 1} begins"),
    on_train_end=lambda logs: print("-- training ends"),
)
history = model.fit(
    x,
    y,
    batch_size=40,
    epochs=14,
    validation_split=0.2,
    verbose=2,
    callbacks=[
        callbacks.BackupAndRestore("backup"),
        callbacks.TerminateOnNaN(),
        callbacks.LearningRateScheduler(schedule, verbose=1),
        callbacks.ReduceLROnPlateau(factor=0.5, patience=1, min_delta=5e-3, verbose=1),
        callbacks.EarlyStopping(patience=2, min_delta=0.01, restore_best_weights=True, verbose=1),
        callbacks.ModelCheckpoint("model-{epoch:02d}-{val_loss:.4f}.keras", save_best_only=True),
        callbacks.ModelCheckpoint("last.weights.h5", save_weights_only=True, save_freq="epoch"),
        callbacks.CSVLogger("log.csv"),
        callbacks.TensorBoard("logs"),
        say,
        WeightNorms("norms.jsonl"),
    ],
)
print("learning rates:", [f"{rate:.6f}" for rate in history.history["learning_rate"]])
print("evaluate:", model.evaluate(x, y, verbose=0))
