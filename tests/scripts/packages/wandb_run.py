"""Training recorded by Weights & Biases."""

import keras
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger, WandbModelCheckpoint

inputs = np.random.normal(size=(53, 6))
targets = inputs @ np.random.normal(size=(6, 2))

run = wandb.init(project="regression", config={"units": 8})
model = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(wandb.config.units), keras.layers.Dense(2)]
)
model.compile("adam", "mse", metrics=["mae"])
model.fit(
    inputs,
    targets,
    batch_size=8,
    epochs=2,
    validation_split=0.2,
    verbose=2,
    callbacks=[WandbMetricsLogger(), WandbModelCheckpoint("model-{epoch}.keras")],
)
results = model.evaluate(inputs, targets, verbose=0)
wandb.log({"final loss": results[0]})
print("results:", results)
run.finish()
