"""Layer tables of the papers' models, for images of any size.

Sources: [T] 3.4 and 4.5 (VGG, ResNet-50), [T] ch. 5 and [L] IV (ResNet-20, EDSR).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfscale.config import PlanError
from tfscale.plan.layers import Layer, LayerTable

Stages = Sequence[Sequence[int]]
VGG_A: Stages = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG_16: Stages = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def dense(name: str, n_in: int, n_out: int) -> Layer:
    """Return a dense layer with bias."""
    weights = ((f"{name}/kernel", n_in * n_out), (f"{name}/bias", n_out))
    return Layer(name, weights, 2.0 * n_in * n_out, n_out, (n_in, n_out))


def conv(
    name: str, size: int, channels: tuple[int, int], rows: int, has_bias: bool = True
) -> Layer:
    """Return a convolution: `size` x `size` kernel, (in, out) channels, `rows` x `rows` outputs."""
    n_in, n_out = channels
    kernel = size * size * n_in * n_out
    bias = ((f"{name}/bias", n_out),) if has_bias else ()
    values = rows * rows * n_out
    return Layer(name, ((f"{name}/kernel", kernel), *bias), 2.0 * kernel * rows * rows, values)


def norm(name: str, channels: int, rows: int) -> Layer:
    """Return a batch normalisation with the activation after it."""
    weights = ((f"{name}/gamma", channels), (f"{name}/beta", channels))
    values = 2 * rows * rows * channels
    return Layer(name, weights, 5.0 * values, values)


def vgg(name: str, stages: Stages, rows: int = 224, hidden: int = 4096) -> LayerTable:
    """Return a VGG: stages of 3x3 convolutions that end in a pooling, then three dense layers."""
    layers, channels = [], 3
    for stage, filters in enumerate(stages, start=1):
        for number, n_out in enumerate(filters, start=1):
            layers.append(conv(f"conv{stage}_{number}", 3, (channels, n_out), rows))
            channels = n_out
        rows //= 2
    flat = rows * rows * channels
    layers += [dense("fc1", flat, hidden), dense("fc2", hidden, hidden)]
    return LayerTable(name, (*layers, dense("logits", hidden, 1000)))


def resnet50(rows: int = 224) -> LayerTable:
    """Return ResNet-50 with its 161 parameters."""
    rows //= 2
    layers = [conv("stem", 7, (3, 64), rows, False), norm("stem_norm", 64, rows)]
    rows, channels = rows // 2, 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(1, blocks + 1):
            before = rows
            rows = rows // 2 if stage > 1 and block == 1 else rows
            name = f"stage{stage}_block{block}"
            if block == 1:
                layers += _conv_norm(f"{name}_shortcut", 1, (channels, 4 * width), rows)
            layers += _conv_norm(f"{name}_conv1", 1, (channels, width), before)
            layers += _conv_norm(f"{name}_conv2", 3, (width, width), rows)
            layers += _conv_norm(f"{name}_conv3", 1, (width, 4 * width), rows)
            channels = 4 * width
    return LayerTable("resnet50", (*layers, dense("logits", channels, 1000)))


def _conv_norm(name: str, size: int, channels: tuple[int, int], rows: int) -> list[Layer]:
    return [conv(name, size, channels, rows, False), norm(f"{name}_norm", channels[1], rows)]


def resnet20(rows: int = 32) -> LayerTable:
    """Return ResNet-20 for small images."""
    layers, channels = _conv_norm("stem", 3, (3, 16), rows), 16
    for stage, width in enumerate((16, 32, 64), start=1):
        rows = rows // 2 if stage > 1 else rows
        for block in range(1, 4):
            name = f"stage{stage}_block{block}"
            layers += _conv_norm(f"{name}_conv1", 3, (channels, width), rows)
            layers += _conv_norm(f"{name}_conv2", 3, (width, width), rows)
            channels = width
    return LayerTable("resnet20", (*layers, dense("logits", 64, 10)))


def edsr(blocks: int = 32, filters: int = 256, channels: int = 3, rows: int = 48) -> LayerTable:
    """Return EDSR without its upsampling tail, for patches of `rows` x `rows`."""
    layers = [conv("head", 3, (channels, filters), rows)]
    layers += [
        conv(f"block{block}_conv{i}", 3, (filters, filters), rows)
        for block in range(1, blocks + 1)
        for i in (1, 2)
    ]
    layers += [conv("body_end", 3, (filters, filters), rows)]
    return LayerTable(f"edsr{blocks}", (*layers, conv("tail", 3, (filters, channels), rows)))


def _widened(width: int) -> Stages:
    return tuple(tuple(width for _ in stage) for stage in VGG_A)


# Keys are the names that `tfscale plan --model` accepts.
PUBLISHED: dict[str, Callable[[], LayerTable]] = {
    "vgg-a": lambda: vgg("vgg-a", VGG_A),
    "vgg16": lambda: vgg("vgg16", VGG_16),
    "vgg-128": lambda: vgg("vgg-128", _widened(128)),
    "vgg-256": lambda: vgg("vgg-256", _widened(256)),
    "vgg-512": lambda: vgg("vgg-512", _widened(512)),
    "resnet50": resnet50,
    "resnet20": resnet20,
    "edsr": edsr,
    "edsr16": lambda: edsr(16, 64, 1, 32),
}


def published(name: str) -> LayerTable:
    """Return a model of the papers by its key in `PUBLISHED`; raises a PlanError for others."""
    if name not in PUBLISHED:
        raise PlanError(
            f"model must be one of {', '.join(PUBLISHED)}. Received: model={name!r}. Pass a file "
            "or module:function for a model of your own."
        )
    return PUBLISHED[name]()
