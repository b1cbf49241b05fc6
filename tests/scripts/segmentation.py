"""Segmentation with a small U-shaped network: classes of pixels, some of which do not count."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(6)
SIDE, CLASSES = 16, 3


def make_scenes(count):
    """A disc or a square on noise; masks with a class per pixel, and weights of pixels."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    images = np.random.normal(scale=0.4, size=(count, SIDE, SIDE, 1)).astype("float32")
    masks = np.zeros((count, SIDE, SIDE), "int32")
    for image, mask in zip(images, masks, strict=True):
        row, column = np.random.randint(4, SIDE - 4, size=2)
        kind = np.random.randint(1, CLASSES)
        away = np.abs(rows - row), np.abs(columns - column)
        inside = np.hypot(*away) < 4 if kind == 1 else np.maximum(*away) < 4
        mask[inside] = kind
        image[inside] += 1.0
    weights = np.where(np.random.random(masks.shape) < 0.1, 0.0, 1.0 + masks)
    return images, masks, weights


def down(x, filters):
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    return x, layers.MaxPooling2D(2)(x)


inputs = keras.Input(shape=(SIDE, SIDE, 1))
first, x = down(inputs, 8)
second, x = down(x, 12)
x = layers.Conv2DTranspose(12, 3, strides=2, padding="same", activation="relu")(x)
x = layers.Concatenate()([x, second])
x = layers.UpSampling2D(2, interpolation="bilinear")(x)
x = layers.Concatenate()([x, first])
outputs = layers.Conv2D(CLASSES, 1, activation="softmax")(x)
model = keras.Model(inputs, outputs)

images, masks, weights = make_scenes(150)
model.compile(
    optimizer=keras.optimizers.Lion(2e-3),
    loss="sparse_categorical_crossentropy",
    metrics=[keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="iou")],
    weighted_metrics=["accuracy"],
    steps_per_execution=2,
)
model.fit(
    images[:120],
    masks[:120],
    sample_weight=weights[:120],
    batch_size=16,
    epochs=4,
    validation_data=(images[120:], masks[120:], weights[120:]),
    validation_freq=2,
    verbose=2,
)
print(model.evaluate(images[120:], masks[120:], batch_size=11, return_dict=True, verbose=0))
found = model.predict(images[120:], verbose=0).argmax(axis=-1)
print("pixels of each class:", np.bincount(found.ravel(), minlength=CLASSES))
np.save("masks.npy", found)
model.save("segmentation.keras")
