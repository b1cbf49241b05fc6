"""ResNet-50: bottleneck blocks in four stages, for large pictures."""

import keras
from keras import layers

# Filters inside the blocks of a stage, and number of blocks.
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
_EXPANSION = 4


def resnet50(input_shape: tuple[int, int, int] = (224, 224, 3), classes: int = 1000) -> keras.Model:
    """Build ResNet-50.

    A block that halves the picture does so in its 3x3 convolution, as is usual today, where the
    paper does so in the 1x1 convolution before it; the number of parameters is the same.

    Args:
        input_shape: Rows, columns (each at least 32) and channels of a picture.
        classes: Number of classes, 1 or more.

    Returns:
        A model from float32 (batch, rows, columns, channels) to logits (batch, classes).
        For 3 channels and 1000 classes it has 25.56 million trainable parameters.

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016, table 1.
    """
    pictures = keras.Input(input_shape, name="pictures")
    x = _conv_norm(pictures, 64, 7, strides=2, name="stem")
    x = layers.ReLU(name="stem_relu")(x)
    x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, (filters, blocks) in enumerate(_STAGES, start=1):
        for block in range(1, blocks + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            x = _bottleneck(x, filters, strides, name=f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(pictures, layers.Dense(classes, name="logits")(x), name="resnet50")


def _bottleneck(x: keras.KerasTensor, filters: int, strides: int, name: str) -> keras.KerasTensor:
    """Return relu(shortcut + three convolutions); the shortcut is projected where shapes differ."""
    shortcut = x
    if strides > 1 or x.shape[-1] != filters * _EXPANSION:
        shortcut = _conv_norm(x, filters * _EXPANSION, 1, strides, name=f"{name}_shortcut")
    for position, (width, size, step) in enumerate(
        ((filters, 1, 1), (filters, 3, strides), (filters * _EXPANSION, 1, 1)), start=1
    ):
        x = _conv_norm(x, width, size, step, name=f"{name}_conv{position}")
        if position < 3:
            x = layers.ReLU(name=f"{name}_relu{position}")(x)
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.ReLU(name=f"{name}_relu")(x)


def _conv_norm(
    x: keras.KerasTensor, filters: int, size: int, strides: int, name: str
) -> keras.KerasTensor:
    conv = layers.Conv2D(
        filters,
        size,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(conv(x))
