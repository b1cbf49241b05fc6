"""EDSR: residual blocks without batch normalisation, for restoration and super-resolution."""

import keras
from keras import layers

# Factors by which the tail enlarges, one after the other.
_ENLARGEMENTS: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (3,), 4: (2, 2)}


def edsr(
    *,
    blocks: int = 16,
    filters: int = 64,
    channels: int = 1,
    residual_scaling: float = 0.1,
    scale: int = 1,
) -> keras.Model:
    """Build EDSR; with `scale=1` without its upsampling tail, as [T] restores pictures.

    Every convolution is 3x3 with padding, so the model trains on patches and restores whole
    pictures. It has (2*blocks + 1) convolutions of `filters` to `filters` channels, one before
    and one after them.

    The paper enlarges by a 3x3 convolution to s*s times the channels, whose outputs become the
    s*s pixels of a block (s = 2 or 3; twice for a scale of 4). That is a transposed convolution
    of size 3s and stride s with the same weights in another order (Shi et al., "Is the
    deconvolution layer the same as a convolutional layer?", 2016), which Keras has: the model
    loads without code of ours. Only the biases are fewer, one for all pixels of a block.

    Args:
        blocks: Residual blocks, 1 or more; EDSR-16 has 16, the full EDSR 32.
        filters: Channels inside, 1 or more; EDSR-16 has 64, the full EDSR 256.
        channels: Channels of the pictures, 1 or more.
        residual_scaling: Factor on the output of each block, which keeps wide models stable.
        scale: Rows of the output per row of the input: 1, 2, 3 or 4.

    Returns:
        A model from float32 (batch, rows, columns, channels) to (batch, scale*rows,
        scale*columns, channels).

    Raises:
        ValueError: `scale` is another one.

    Source: Lim et al., "Enhanced deep residual networks for single image super-resolution",
        CVPR workshops 2017, figures 2 and 3; EDSR-16 for restoration: [T] ch. 5.
    """
    if scale not in _ENLARGEMENTS:
        raise ValueError(f"scale must be 1, 2, 3 or 4. Received: scale={scale}.")
    picture = keras.Input((None, None, channels), name="corrupted")
    head = _conv(filters, "head")(picture)
    x = head
    for block in range(1, blocks + 1):
        x = _residual_block(x, filters, residual_scaling, name=f"block{block}")
    x = layers.Add(name="long_skip")([_conv(filters, "body_end")(x), head])
    for number, factor in enumerate(_ENLARGEMENTS[scale], start=1):
        enlarge = layers.Conv2DTranspose(
            filters, 3 * factor, factor, padding="same", name=f"enlarge{number}"
        )
        x = enlarge(x)
    return keras.Model(picture, _conv(channels, "tail")(x), name=f"edsr{blocks}")


def _residual_block(
    x: keras.KerasTensor, filters: int, residual_scaling: float, name: str
) -> keras.KerasTensor:
    """Return x + residual_scaling * conv(relu(conv(x)))."""
    residual = _conv(filters, f"{name}_conv1", activation="relu")(x)
    residual = _conv(filters, f"{name}_conv2")(residual)
    residual = layers.Rescaling(residual_scaling, name=f"{name}_scaling")(residual)
    return layers.Add(name=f"{name}_add")([x, residual])


def _conv(filters: int, name: str, activation: str | None = None) -> layers.Conv2D:
    return layers.Conv2D(filters, 3, padding="same", activation=activation, name=name)
