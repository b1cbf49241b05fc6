"""Image classification with augmentation layers and a small residual network."""

import keras
import numpy as np
from keras import layers

NUM_CLASSES = 3
IMAGE_SHAPE = (24, 24, 3)


def make_images(count):
    """Pictures of a bar, a square or a ring on a noisy background."""
    labels = np.random.randint(NUM_CLASSES, size=count)
    images = np.random.uniform(0, 80, size=(count, *IMAGE_SHAPE))
    for image, label in zip(images, labels, strict=True):
        row, column = np.random.randint(2, 12, size=2)
        if label == 0:
            image[row : row + 3, column : column + 10] += 150
        else:
            image[row : row + 9, column : column + 9] += 150
        if label == 2:
            image[row + 2 : row + 7, column + 2 : column + 7] -= 150
    return np.clip(images, 0, 255).astype("uint8"), labels


augmentation = keras.Sequential(
    [
        layers.RandomFlip("horizontal"),
        layers.RandomTranslation(0.1, 0.1),
        layers.RandomBrightness(0.1),
        layers.RandomContrast(0.2),
    ],
    name="augmentation",
)


def residual_block(x, filters):
    shortcut = layers.Conv2D(filters, 1, strides=2)(x)
    x = layers.Conv2D(filters, 3, strides=2, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return layers.ReLU()(layers.Add()([x, shortcut]))


inputs = keras.Input(shape=IMAGE_SHAPE)
x = augmentation(inputs)
x = layers.Rescaling(1.0 / 255)(x)
x = layers.Conv2D(8, 3, padding="same")(x)
x = residual_block(x, 12)
x = layers.SpatialDropout2D(0.1)(x)
x = residual_block(x, 16)
x = layers.GlobalAveragePooling2D()(x)
x = layers.Dropout(0.3)(x)
outputs = layers.Dense(NUM_CLASSES, activation="softmax")(x)
model = keras.Model(inputs, outputs)
model.summary()

x_train, y_train = make_images(330)
x_test, y_test = make_images(75)

model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x_train, y_train, batch_size=32, epochs=5, validation_split=0.15, verbose=2)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test loss: {loss:.4f}, test accuracy: {accuracy:.4f}")
model.save("augmented_classifier.keras")
