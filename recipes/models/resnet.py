"""ResNet for small pictures (CIFAR, Fashion-MNIST): depth 6n+2, three stages."""

import keras
from keras import layers

_STAGE_FILTERS = (16, 32, 64)


def resnet(
    depth: int = 20, input_shape: tuple[int, int, int] = (32, 32, 3), classes: int = 10
) -> keras.Model:
    """Build the ResNet of depth 6n+2 with parameter-free shortcuts.

    Args:
        depth: 6n+2 with n >= 1 blocks per stage: 8, 20, 32, 44, 56, 110.
        input_shape: Rows, columns (each at least 4) and channels of a picture.
        classes: Number of classes, 1 or more.

    Returns:
        A model from float32 (batch, rows, columns, channels) to logits (batch, classes).
        ResNet-20 for 32x32x3 has 0.27 million parameters.

    Raises:
        ValueError: `depth` is not 6n+2.

    Source: He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2,
        shortcut option A.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(
            "The depth of a ResNet for small pictures must be 6n+2 with n >= 1. "
            f"Received: depth={depth}. Use 8, 20, 32, 44, 56 or 110."
        )
    pictures = keras.Input(input_shape, name="pictures")
    x = _conv_norm(pictures, _STAGE_FILTERS[0], strides=1, name="stem")
    x = layers.ReLU(name="stem_relu")(x)
    for stage, filters in enumerate(_STAGE_FILTERS, start=1):
        for block in range(1, blocks + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            x = _block(x, filters, strides, name=f"stage{stage}_block{block}")
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(classes, kernel_initializer="he_normal", name="logits")(x)
    return keras.Model(pictures, logits, name=f"resnet{depth}")


def _block(x: keras.KerasTensor, filters: int, strides: int, name: str) -> keras.KerasTensor:
    """Return relu(shortcut + two convolutions); the shortcut has no parameters (option A)."""
    shortcut = x
    if strides > 1:
        shortcut = layers.MaxPooling2D(1, strides, name=f"{name}_every_other_pixel")(x)
        new_channels = filters - x.shape[-1]
        shortcut = keras.ops.pad(shortcut, [[0, 0], [0, 0], [0, 0], [0, new_channels]])
    x = _conv_norm(x, filters, strides, name=f"{name}_conv1")
    x = layers.ReLU(name=f"{name}_relu1")(x)
    x = _conv_norm(x, filters, 1, name=f"{name}_conv2")
    x = layers.Add(name=f"{name}_add")([x, shortcut])
    return layers.ReLU(name=f"{name}_relu2")(x)


def _conv_norm(x: keras.KerasTensor, filters: int, strides: int, name: str) -> keras.KerasTensor:
    conv = layers.Conv2D(
        filters,
        3,
        strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=name,
    )
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm")(conv(x))
