"""Metrics of the papers that Keras lacks."""

from collections.abc import Callable

import keras
from keras import ops


def psnr(y_true: keras.KerasTensor, y_pred: keras.KerasTensor) -> keras.KerasTensor:
    """Peak signal-to-noise ratio of each picture, in dB; the peak is 1.0.

    Passed to `compile(metrics=[psnr])`, Keras keeps the sum over pictures and their number, so
    that the ranks' states add up to exactly what one process would report.

    As super-resolution papers do, the restored picture is limited to the range of pictures
    first, and the value is taken per picture, then averaged. Unlike them, no border is cut off
    and nothing is rounded to 8 bits. A mean squared error below 1e-10 counts as 1e-10 (100 dB).

    Args:
        y_true: (batch, rows, columns, channels), in [0, 1].
        y_pred: Same shape.

    Returns:
        (batch,): 10*log10(1 / mean squared error of the picture).

    Source: Lim et al., "Enhanced deep residual networks", CVPR workshops 2017, section 4.
    """
    error = ops.clip(y_pred, 0.0, 1.0) - ops.cast(y_true, y_pred.dtype)
    mean_squared = ops.mean(ops.square(error), axis=(1, 2, 3))
    return -10.0 * ops.log10(ops.maximum(mean_squared, 1e-10))


def psnr_of_enlarged(scale: int) -> Callable[..., keras.KerasTensor]:
    """Return the PSNR by which super-resolution is compared on DIV2K; named `psnr` too.

    Restored pictures are rounded to 8 bits, and 6 + scale pixels of each border are left out.

    Args:
        scale: By how much pictures are enlarged.

    Source: Lim et al., "Enhanced deep residual networks", CVPR workshops 2017, section 4.2 (the
        border), and the authors' code (rounding).
    """
    border = 6 + scale

    def enlarged_psnr(y_true: keras.KerasTensor, y_pred: keras.KerasTensor) -> keras.KerasTensor:
        rounded = ops.round(ops.clip(y_pred, 0.0, 1.0) * 255.0) / 255.0
        inner = (slice(None), slice(border, -border), slice(border, -border))
        return psnr(y_true[inner], rounded[inner])

    enlarged_psnr.__name__ = "psnr"
    return enlarged_psnr
