"""A tf.data pipeline with cache, shuffle, map, repeat and prefetch, and a scheduled AdamW."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)
IMAGE, CLASSES, BATCH = 16, 5, 24

labels = np.random.randint(CLASSES, size=250)
images = np.random.randint(0, 120, size=(250, IMAGE, IMAGE, 3), dtype="uint8")
for image, label in zip(images, labels, strict=True):
    image[3 * label : 3 * label + 3, :, label % 3] += 100


def preprocess(image, label):
    image = tf.image.convert_image_dtype(image, tf.float32)
    return tf.image.per_image_standardization(image), tf.one_hot(label, CLASSES)


train_ds = (
    tf.data.Dataset.from_tensor_slices((images[:200], labels[:200]))
    .cache()
    .shuffle(200, reshuffle_each_iteration=True)
    .map(preprocess, num_parallel_calls=tf.data.AUTOTUNE)
    .batch(BATCH)
    .repeat()
    .prefetch(tf.data.AUTOTUNE)
)
val_ds = tf.data.Dataset.from_tensor_slices((images[200:], labels[200:]))
val_ds = val_ds.map(preprocess).batch(BATCH).prefetch(tf.data.AUTOTUNE)

model = keras.Sequential(
    [
        keras.Input(shape=(IMAGE, IMAGE, 3)),
        layers.Conv2D(8, 3, strides=2, use_bias=False),
        layers.BatchNormalization(),
        layers.ReLU(max_value=6),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.GroupNormalization(4),
        layers.Flatten(),
        layers.Dense(CLASSES, activation="softmax"),
    ]
)
epochs, steps = 4, -(-200 // BATCH)
schedule = keras.optimizers.schedules.CosineDecay(
    1e-3, decay_steps=(epochs - 1) * steps, warmup_target=1e-2, warmup_steps=steps
)
model.compile(
    optimizer=keras.optimizers.AdamW(schedule, weight_decay=1e-4, global_clipnorm=1.0),
    loss=keras.losses.CategoricalCrossentropy(label_smoothing=0.1),
    metrics=["accuracy", keras.metrics.Recall(top_k=2, name="top_2")],
)
model.fit(train_ds, steps_per_epoch=steps, epochs=epochs, validation_data=val_ds, verbose=2)
results = model.evaluate(val_ds, return_dict=True, verbose=0)
print({name: f"{value:.6f}" for name, value in results.items()})
print("learning rate at the end:", float(model.optimizer.learning_rate))
model.save("pipeline.keras")
