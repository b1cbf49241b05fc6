"""LeNet-5 and TorchNet: the two small convolutional networks of [F]."""

import keras
from keras import layers

_SIZE = 32  # Rows and columns both were made for; 28x28 pictures get a border.


def lenet5(input_shape: tuple[int, int, int] = (28, 28, 1), classes: int = 10) -> keras.Model:
    """Build LeNet-5: three convolutions, two poolings, two dense layers.

    As [F] trains it: every map of a convolution sees all maps before it, pooling takes the
    maximum and activations are rectified. The original pools by weighted averages, connects the
    second convolution sparsely and ends in radial units.

    Args:
        input_shape: 28 or 32 rows, as many columns, and the channels of a picture.
        classes: Number of classes, 1 or more.

    Returns:
        A model from float32 (batch, rows, columns, channels) to logits (batch, classes). With
        one channel and ten classes it has 61,706 parameters.

    Raises:
        ValueError: The pictures have another size.

    Source: LeCun et al., "Gradient-based learning applied to document recognition", 1998,
        figure 2; [F] "Methodology".
    """
    pictures, x = _padded_input(input_shape)
    for position, filters in enumerate((6, 16), start=1):
        x = layers.Conv2D(filters, 5, activation="relu", name=f"conv{position}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{position}")(x)
    x = layers.Conv2D(120, 5, activation="relu", name="conv3")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(84, activation="relu", name="fc1")(x)
    return keras.Model(pictures, layers.Dense(classes, name="logits")(x), name="lenet5")


def torchnet(input_shape: tuple[int, int, int] = (32, 32, 3), classes: int = 10) -> keras.Model:
    """Build TorchNet, the network of PyTorch's tutorial: two convolutions, three dense layers.

    Args:
        input_shape: 28 or 32 rows, as many columns, and the channels of a picture.
        classes: Number of classes, 1 or more.

    Returns:
        A model from float32 (batch, rows, columns, channels) to logits (batch, classes). With
        three channels and ten classes it has 62,006 parameters.

    Raises:
        ValueError: The pictures have another size.

    Source: [F] "Methodology", and the tutorial "Neural networks" of PyTorch that it names.
    """
    pictures, x = _padded_input(input_shape)
    for position, filters in enumerate((6, 16), start=1):
        x = layers.Conv2D(filters, 5, activation="relu", name=f"conv{position}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{position}")(x)
    x = layers.Flatten(name="flatten")(x)
    for position, units in enumerate((120, 84), start=1):
        x = layers.Dense(units, activation="relu", name=f"fc{position}")(x)
    return keras.Model(pictures, layers.Dense(classes, name="logits")(x), name="torchnet")


def _padded_input(input_shape: tuple[int, int, int]) -> tuple[keras.KerasTensor, ...]:
    """Return the input and the same with a border that makes it 32x32."""
    rows, columns, _ = input_shape
    border, odd = divmod(_SIZE - rows, 2)
    if rows != columns or odd or border not in (0, 2):
        raise ValueError(
            "The pictures must have 28x28 or 32x32 pixels. "
            f"Received: input_shape={input_shape}. Resize them."
        )
    pictures = keras.Input(input_shape, name="pictures")
    return pictures, layers.ZeroPadding2D(border, name="border")(pictures)
