"""Mixed precision: the policy is set once; the optimizer scales the loss by itself."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(11)
keras.mixed_precision.set_global_policy("mixed_float16")

x = np.random.normal(size=(300, 20)).astype("float32")
y = (x[:, :5].sum(axis=1) + 0.3 * np.random.normal(size=300) > 0).astype("int32")

inputs = keras.Input(shape=(20,))
h = layers.Dense(32, name="dense_1")(inputs)
h = layers.BatchNormalization()(h)
h = layers.Activation("relu")(h)
h = layers.Dense(32, activation="tanh", name="dense_2")(h)
h = layers.Dense(2, name="logits")(h)
outputs = layers.Activation("softmax", dtype="float32", name="probabilities")(h)
model = keras.Model(inputs, outputs)
for layer in model.layers:
    print(layer.name, layer.compute_dtype, "variables in", layer.variable_dtype)

model.compile(
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
model.fit(x, y, batch_size=40, epochs=4, validation_split=0.15, verbose=2)
print("steps:", int(model.optimizer.iterations))

loss, accuracy = model.evaluate(x, y, batch_size=64, verbose=0)
print(f"loss: {loss:.4f} accuracy: {accuracy:.4f}")
print("probabilities:", model.predict(x[:1], verbose=0)[0].dtype)
model.save("mixed.keras")
