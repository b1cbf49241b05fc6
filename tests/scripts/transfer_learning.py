"""Transfer learning: train on four classes, reuse the frozen body on two others, then fine-tune."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(7)


def make_stripes(count, num_classes):
    """Grey pictures of stripes; the class is their direction and distance."""
    labels = np.random.randint(num_classes, size=count)
    rows, columns = np.mgrid[0:20, 0:20]
    phases = np.random.uniform(0, 6, size=count)
    images = [
        np.sin((rows if label % 2 else columns) * (0.6 + 0.4 * (label // 2)) + phase)
        for label, phase in zip(labels, phases, strict=True)
    ]
    noise = np.random.normal(scale=0.8, size=(count, 20, 20))
    return (np.stack(images) + noise)[..., None].astype("float32"), labels


def make_body():
    body = keras.Sequential(name="body")
    body.add(keras.Input(shape=(20, 20, 1)))
    for filters in (8, 16):
        body.add(layers.Conv2D(filters, 3, padding="same"))
        body.add(layers.BatchNormalization(momentum=0.9))
        body.add(layers.Activation("relu"))
        body.add(layers.MaxPooling2D())
    body.add(layers.GlobalAveragePooling2D())
    return body


# Step 1: the source task, with many pictures.
x_source, y_source = make_stripes(410, 4)
body = make_body()
source_model = keras.Sequential([body, layers.Dense(4, activation="softmax")])
source_model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
source_model.fit(x_source, y_source, batch_size=64, epochs=3, verbose=2)
body.save_weights("body.weights.h5")

# Step 2: a new head on a frozen body.
x_target, y_target = make_stripes(90, 6)
keep = y_target >= 4
x_target, y_target = x_target[keep], y_target[keep] - 4

pretrained = make_body()
pretrained.load_weights("body.weights.h5")
pretrained.trainable = False
inputs = keras.Input(shape=(20, 20, 1))
features = pretrained(inputs, training=False)
outputs = layers.Dense(1)(features)
model = keras.Model(inputs, outputs)
model.summary(show_trainable=True)

model.compile(
    optimizer=keras.optimizers.Adam(0.05),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
print("Training the head")
model.fit(x_target, y_target, batch_size=11, epochs=3, verbose=2)

# Step 3: fine-tune everything at a low learning rate.
pretrained.trainable = True
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
)
print("Fine-tuning")
model.fit(x_target, y_target, batch_size=11, epochs=2, verbose=2)
print("trainable weights:", len(model.trainable_weights))
model.save("fine_tuned.keras")
