"""Models of the recipes: parameter counts against the published, shapes, saving."""

import keras
import numpy as np
import pytest
from models.edsr import edsr
from models.lenet import lenet5, torchnet
from models.mlp import mlp
from models.resnet import resnet
from models.resnet50 import resnet50
from models.transformer import transformer
from models.vgg import VGG_16, VGG_A, vgg, vgg_a_of_width

pytestmark = pytest.mark.slow

# Trainable parameters; the published numbers are the rounded ones in the comments, in millions.
COUNTS = {
    # He et al. 2016, table 6: 0.27, 0.85; ResNet-8 by its formula. Batch
    # normalisation's scale and shift are counted, its moving statistics are not.
    "resnet8": (lambda: resnet(8), 75_290),
    "resnet20": (lambda: resnet(20), 269_722),
    "resnet20 for 28x28 grey": (lambda: resnet(20, (28, 28, 1)), 269_722 - 2 * 9 * 16),
    "resnet56": (lambda: resnet(56), 853_018),
    "resnet50": (resnet50, 25_557_032),
    # Lim et al. 2017: the x2 model with 16 blocks, 64 filters and three channels has 1.37; its
    # upsampling, which restoration does not need, is one convolution to four times as many.
    "edsr": (lambda: edsr(blocks=16, filters=64, channels=3), 1_369_859 - (9 * 64 * 256 + 256)),
    "edsr grey": (lambda: edsr(blocks=2, filters=8, channels=1), 5 * (576 + 8) + 80 + 73),
    # Simonyan and Zisserman 2015, table 2: 133 and 138.
    "vgg a": (lambda: vgg(VGG_A), 132_863_336),
    "vgg a for 64x64": (lambda: vgg(VGG_A, (64, 64, 3)), 132_863_336 - 4096 * 512 * (49 - 4)),
    "vgg 16": (lambda: vgg(VGG_16), 138_357_544),
    # [T] 3.4: 48 and 140.
    "vgg a of 128": (lambda: vgg(vgg_a_of_width(128)), 47_609_192),
    "vgg a of 512": (lambda: vgg(vgg_a_of_width(512)), 140_175_848),
    # Added up from LeCun et al. 1998, figure 2, with full connections; PyTorch's tutorial: 62,006.
    "lenet5": (lambda: lenet5((28, 28, 1)), 61_706),
    "lenet5 for 32x32": (lambda: lenet5((32, 32, 3)), 62_006),
    "torchnet": (lambda: torchnet((28, 28, 1)), 61_706),
    "torchnet for 32x32": (lambda: torchnet((32, 32, 3)), 62_006),
    "mlp": (mlp, 785 * 256 + 257 * 64 + 65 * 10),  # 784 to 256 to 64 to 10, with biases
}


def test_transformer_predicts_from_the_tokens_before():
    model = transformer(tokens=11, length=6, blocks=2, width=8, heads=2)
    # Per block: attention 4 * (8 * 8 + 8), two dense layers, two normalizations of 16.
    blocks = 2 * (4 * 72 + 9 * 32 + 33 * 8 + 2 * 16)
    assert model.count_params() == 11 * 8 + 6 * 8 + blocks + 16 + 9 * 11
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9]])
    first, second = model.predict(tokens, verbose=0)
    np.testing.assert_allclose(first[:3], second[:3], atol=1e-6)
    assert np.abs(first[3:] - second[3:]).max(axis=-1).min() > 1e-3
    moved = model.predict(tokens[:, [1, 0, 2, 3, 4, 5]], verbose=0)  # positions count
    assert np.abs(moved[0, 2] - first[2]).max() > 1e-6


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_parameters(name):
    build, expected = COUNTS[name]
    model = build()
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == expected
    n_classes = 1000 if name.startswith(("vgg", "resnet50")) else 10
    assert name.startswith("edsr") or model.output_shape == (None, n_classes)


# Lim et al. 2017, table 1: 43 million. The counts of the authors' code, 40.73, 43.68 and 43.09
# million for x2, x3 and x4, have s*s biases where ours have one (and four times 3 for the mean).
def test_full_edsr_has_the_published_number_of_parameters():
    for scale, published, enlargements in (2, 40.73, (4,)), (3, 43.68, (9,)), (4, 43.09, (4, 4)):
        model = edsr(blocks=32, filters=256, channels=3, scale=scale)
        fewer_biases = sum(256 * (pixels - 1) for pixels in enlargements)
        assert round((model.count_params() + fewer_biases) / 1e6, 2) == published


@pytest.mark.parametrize("scale", [2, 3])
def test_enlarging_is_a_convolution_whose_channels_become_pixels(scale):
    model = edsr(blocks=1, filters=4, channels=1, scale=scale)
    layer = model.get_layer("enlarge1")
    x = np.random.default_rng(0).random((2, 5, 6, 4), np.float32)
    kernel = layer.kernel.numpy()  # (3s, 3s, out, in): row s*(2-d)+i weights pixel i's neighbour d
    blocks = kernel.reshape(3, scale, 3, scale, 4, 4)[::-1, :, ::-1]
    expected = np.empty((2, 5 * scale, 6 * scale, 4), np.float32)
    for i in range(scale):
        for j in range(scale):
            weights = np.swapaxes(blocks[:, i, :, j], -1, -2)
            pixels = keras.ops.conv(x, weights, padding="same")
            expected[:, i::scale, j::scale] = pixels + layer.bias.numpy()
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_edsr_computes_what_the_paper_draws():
    def convolve(x, layer):  # without its activation
        return keras.ops.conv(x, layer.kernel, padding="same") + layer.bias

    x = np.random.default_rng(0).random((1, 8, 8, 1), np.float32)
    model = edsr(blocks=2, filters=4, residual_scaling=0.3)
    layer = model.get_layer
    head = inside = layer("head")(x)
    for block in ("block1", "block2"):
        residual = convolve(inside, layer(f"{block}_conv1"))
        residual = convolve(keras.ops.maximum(residual, 0.0), layer(f"{block}_conv2"))
        inside = inside + 0.3 * residual
    expected = layer("tail")(head + layer("body_end")(inside))
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-6)


def test_mlp_a_has_the_layers_of_its_paper():
    model = mlp()
    kinds = [type(layer).__name__ for layer in model.layers[2:]]
    assert kinds == ["Dense", "LeakyReLU", "GaussianDropout"] * 2 + ["Dense"]
    assert {layer.rate for layer in model.layers if hasattr(layer, "rate")} == {0.2}
    x = np.random.default_rng(0).random((3, 28, 28, 1), np.float32)
    np.testing.assert_allclose(model.predict(x, verbose=0).sum(axis=1), 1.0, rtol=1e-5)
    assert (np.asarray(model(x, training=True)) != model.predict(x, verbose=0)).any()
