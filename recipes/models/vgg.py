"""VGG: convolutions between poolings, then wide dense layers that hold most parameters."""

from collections.abc import Sequence

import keras
from keras import layers

# Filters of the convolutions between two poolings.
VGG_A = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG_16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
# Of no paper: for small pictures, and minutes instead of hours.
VGG_SMALL = ((32,), (64,), (128,))
VGG_TINY = ((16,), (32,), (64,))


def vgg_a_of_width(filters: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of VGG-A with as many filters in each convolution.

    VGG-128, VGG-256 and VGG-512, which have 48, 76 and 140 million parameters, are those of
    `filters` 128, 256 and 512.

    Source: [T] 3.4.
    """
    return tuple((filters,) * len(convolutions) for convolutions in VGG_A)


def vgg(
    stages: Sequence[Sequence[int]] = VGG_A,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    dense: Sequence[int] = (4096, 4096),
    classes: int = 1000,
    dropout: float = 0.5,
) -> keras.Model:
    """Build a VGG: 3x3 convolutions, each stage ending in 2x2 maximum pooling, then dense layers.

    Args:
        stages: Filters of each convolution of each stage, such as `VGG_A` and `VGG_16`.
        input_shape: Rows, columns (each at least 2 to the number of stages) and channels.
        dense: Units of the hidden dense layers.
        classes: Number of classes, 1 or more.
        dropout: Rate after each hidden dense layer, in [0, 1).

    Returns:
        A model from float32 (batch, rows, columns, channels) to logits (batch, classes).
        For 224x224x3, VGG-A has 133 and VGG-16 138 million parameters.

    Source: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image
        recognition", ICLR 2015, table 1.
    """
    pictures = keras.Input(input_shape, name="pictures")
    x = pictures
    for stage, convolutions in enumerate(stages, start=1):
        for position, filters in enumerate(convolutions, start=1):
            x = layers.Conv2D(
                filters,
                3,
                padding="same",
                activation="relu",
                kernel_initializer="he_normal",
                name=f"conv{stage}_{position}",
            )(x)
        x = layers.MaxPooling2D(2, name=f"pool{stage}")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate(dense, start=1):
        x = layers.Dense(
            units, activation="relu", kernel_initializer="he_normal", name=f"fc{position}"
        )(x)
        x = layers.Dropout(dropout, name=f"dropout{position}")(x)
    depth = sum(len(convolutions) for convolutions in stages) + len(dense) + 1
    return keras.Model(pictures, layers.Dense(classes, name="logits")(x), name=f"vgg{depth}")
