"""Read batches with a PyDataset of one's own: files on disk, shuffled after every epoch."""

import math

import keras
import numpy as np
from keras import layers


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, batch_size, augment=False, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.augment = augment
        self.order = np.arange(len(x))

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __getitem__(self, index):
        chosen = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        x = self.x[chosen]
        if self.augment and index % 2:
            x = x[:, :, ::-1]
        return x, self.y[chosen]

    def on_epoch_end(self):
        self.order = np.random.permutation(self.order)


rng = np.random.default_rng(8)
labels = rng.integers(0, 3, size=190)
images = rng.normal(scale=0.5, size=(190, 12, 12, 1)).astype("float32")
for image, label in zip(images, labels, strict=True):
    image[4 * label : 4 * label + 4] += 0.5

train = Batches(images[:150], labels[:150], batch_size=20, augment=True, workers=1)
val = Batches(images[150:], labels[150:], batch_size=25)

model = keras.Sequential(
    [
        keras.Input(shape=(12, 12, 1)),
        layers.SeparableConv2D(8, 3, padding="same"),
        layers.BatchNormalization(),
        layers.ReLU(),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        layers.Dense(3),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adamax(0.02),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
)
history = model.fit(train, validation_data=val, epochs=4, verbose=2)
print("best validation accuracy:", max(history.history["val_acc"]))
print("evaluate:", model.evaluate(val, verbose=0))
print("rows predicted:", model.predict(val, verbose=0).shape)
model.save("from_batches.keras")
