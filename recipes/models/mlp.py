"""The multi-layer perceptron of [S]: dense layers with Gaussian dropout."""

from collections.abc import Sequence

import keras
from keras import layers

MODEL_A = (256, 64)


def mlp(
    hidden: Sequence[int] = MODEL_A,
    input_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    dropout: float = 0.2,
    negative_slope: float = 0.3,
) -> keras.Model:
    """Build the perceptron; the default is "model A".

    Args:
        hidden: Units of each hidden layer.
        input_shape: Rows, columns and channels of a picture.
        classes: Number of classes, 1 or more.
        dropout: Rate p in [0, 1): hidden activations are multiplied in training by Gaussian
            noise of mean 1 and standard deviation sqrt(p / (1 - p)).
        negative_slope: Slope of the activation (leaky ReLU) below 0.

    Returns:
        A model from float32 (batch, rows, columns, channels) to probabilities (batch, classes),
        to be trained with the mean squared error. Model A has 218,058 parameters for 28x28.

    Source: [S] 2.1.
    """
    pictures = keras.Input(input_shape, name="pictures")
    x = layers.Flatten(name="flatten")(pictures)
    for position, units in enumerate(hidden, start=1):
        x = layers.Dense(units, name=f"fc{position}")(x)
        x = layers.LeakyReLU(negative_slope, name=f"activation{position}")(x)
        x = layers.GaussianDropout(dropout, name=f"dropout{position}")(x)
    probabilities = layers.Dense(classes, activation="softmax", name="probabilities")(x)
    return keras.Model(pictures, probabilities, name="mlp")
