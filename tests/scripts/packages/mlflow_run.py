"""Training recorded by MLflow; only rank 0 opens the run."""

import contextlib

import keras
import mlflow
import numpy as np
from mlflow.tensorflow.callback import MlflowCallback, MlflowModelCheckpointCallback

import tfscale

inputs = np.random.normal(size=(53, 6))
targets = inputs @ np.random.normal(size=(6, 2))

model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])
model.compile("adam", "mse", metrics=["mae"])
is_first = not tfscale.is_initialized() or tfscale.rank() == 0
with mlflow.start_run() if is_first else contextlib.nullcontext():
    model.fit(
        inputs,
        targets,
        batch_size=8,
        epochs=2,
        validation_split=0.2,
        verbose=2,
        callbacks=[MlflowCallback(), MlflowModelCheckpointCallback(monitor="loss")],
    )
    results = model.evaluate(inputs, targets, verbose=0)
    if is_first:
        mlflow.log_metric("final_loss", results[0])
print("results:", results)
if is_first:
    runs = mlflow.search_runs(output_format="list")
    print("runs:", len(runs), runs[0].data.metrics["final_loss"], runs[0].data.metrics["val_mae"])
