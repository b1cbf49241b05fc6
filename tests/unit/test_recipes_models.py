"""Models of the recipes: parameter counts against the published, shapes, saving."""

import sys
from pathlib import Path

import keras
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

from models.edsr import edsr
from models.lenet import lenet5, torchnet
from models.mlp import mlp
from models.resnet import resnet
from models.resnet50 import resnet50
from models.vgg import VGG_16, VGG_A, vgg, vgg_a_of_width

pytestmark = pytest.mark.slow


def _trainable_parameters(model):
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


# He et al. 2016, table 6, in millions to two digits; exact: batch normalisation's scale and shift
# counted, its moving statistics not. ResNet-8 is not in the table: 0.08 is by its formula.
@pytest.mark.parametrize(
    ("depth", "exact", "published"),
    [
        (8, 75_290, 0.08),
        (20, 269_722, 0.27),
        (32, 464_154, 0.46),
        (44, 658_586, 0.66),
        (56, 853_018, 0.85),
    ],
)
def test_resnet_has_the_published_number_of_parameters(depth, exact, published):
    count = _trainable_parameters(resnet(depth))
    assert count == exact
    assert round(count / 1e6, 2) == published


def test_resnet_for_28x28_grey_pictures_differs_in_its_first_convolution_only():
    assert _trainable_parameters(resnet(20, (28, 28, 1))) == 269_722 - 2 * 9 * 16


def test_resnet_depth_counts_weighted_layers():
    model = resnet(20)
    weighted = [
        la for la in model.layers if isinstance(la, keras.layers.Conv2D | keras.layers.Dense)
    ]
    assert len(weighted) == 20


@pytest.mark.parametrize("depth", [2, 7, 21])
def test_resnet_refuses_other_depths(depth):
    with pytest.raises(ValueError, match=rf"must be 6n\+2 .*Received: depth={depth}\. Use 8, 20"):
        resnet(depth)


def _edsr_parameters(blocks, filters, channels):
    inner = (2 * blocks + 1) * (9 * filters * filters + filters)
    return inner + (9 * channels * filters + filters) + (9 * filters * channels + channels)


@pytest.mark.parametrize(("blocks", "filters", "channels"), [(16, 64, 1), (16, 32, 1), (2, 8, 3)])
def test_edsr_parameters(blocks, filters, channels):
    model = edsr(blocks=blocks, filters=filters, channels=channels)
    assert model.count_params() == _edsr_parameters(blocks, filters, channels)


def test_edsr_baseline_has_the_published_number_of_parameters():
    # The x2 model with 16 blocks, 64 filters and three channels is published with 1.37 million;
    # its upsampling, which restoration does not need, is one convolution to four times as many.
    upsampling = 9 * 64 * 256 + 256
    count = edsr(blocks=16, filters=64, channels=3).count_params() + upsampling
    assert count == 1_369_859


# Lim et al. 2017, table 1: 43 million. The counts of the authors' code, 40.73, 43.68 and 43.09
# million for x2, x3 and x4, have s*s biases where ours have one (and four times 3 for the mean).
@pytest.mark.parametrize(
    ("scale", "published", "enlargements"), [(2, 40.73, (4,)), (3, 43.68, (9,)), (4, 43.09, (4, 4))]
)
def test_full_edsr_has_the_published_number_of_parameters(scale, published, enlargements):
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


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
def test_edsr_enlarges_pictures_of_any_size(scale):
    model = edsr(blocks=1, filters=4, channels=3, scale=scale)
    result = model.predict(np.zeros((1, 7, 9, 3), np.float32), verbose=0)
    assert result.shape == (1, 7 * scale, 9 * scale, 3)


def test_edsr_refuses_other_scales():
    with pytest.raises(ValueError, match="1, 2, 3 or 4. Received: scale=5"):
        edsr(scale=5)


def test_edsr_takes_pictures_of_any_size():
    model = edsr(blocks=1, filters=4)
    for shape in ((2, 32, 32, 1), (1, 40, 56, 1)):
        assert model.predict(np.zeros(shape, np.float32), verbose=0).shape == shape


def _convolve(x, layer):
    """Apply the layer's kernel and bias without its activation."""
    return keras.ops.conv(x, layer.kernel, padding="same") + layer.bias


def test_edsr_computes_what_the_paper_draws():
    x = np.random.default_rng(0).random((1, 8, 8, 1), np.float32)
    model = edsr(blocks=2, filters=4, residual_scaling=0.3)
    layer = model.get_layer
    head = inside = layer("head")(x)
    for block in ("block1", "block2"):
        residual = _convolve(inside, layer(f"{block}_conv1"))
        residual = _convolve(keras.ops.maximum(residual, 0.0), layer(f"{block}_conv2"))
        inside = inside + 0.3 * residual
    expected = layer("tail")(head + layer("body_end")(inside))
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(lambda: edsr(blocks=2, filters=4), (2, 16, 16, 1)), (lambda: resnet(8), (2, 32, 32, 3))],
    ids=["edsr", "resnet"],
)
def test_a_saved_model_computes_the_same(model, shape, tmp_path):
    model = model()
    model.save(tmp_path / "model.keras")
    x = np.random.default_rng(0).random(shape, np.float32)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


# Simonyan and Zisserman 2015, table 2: 133 and 138 million; exact: added up from table 1.
@pytest.mark.parametrize(
    ("stages", "exact", "published"), [(VGG_A, 132_863_336, 133), (VGG_16, 138_357_544, 138)]
)
def test_vgg_has_the_published_number_of_parameters(stages, exact, published):
    model = vgg(stages)
    assert model.count_params() == exact
    assert round(exact / 1e6) == published


# [T] 3.4: 48, 76 and 140 million.
@pytest.mark.parametrize(
    ("filters", "exact", "published"),
    [(128, 47_609_192, 48), (256, 76_400_360, 76), (512, 140_175_848, 140)],
)
def test_vggs_of_one_width_have_the_published_number_of_parameters(filters, exact, published):
    assert vgg(vgg_a_of_width(filters)).count_params() == exact
    assert round(exact / 1e6) == published


def test_vgg_a_for_64x64_pictures_has_a_smaller_first_dense_layer_only():
    smaller = 4096 * (7 * 7 * 512 - 2 * 2 * 512)
    model = vgg(VGG_A, (64, 64, 3))
    assert model.count_params() == 132_863_336 - smaller
    assert model.output_shape == (None, 1000)


def test_resnet50_has_the_published_number_of_parameters():
    model = resnet50()
    assert _trainable_parameters(model) == 25_557_032
    weighted = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense)
        and "shortcut" not in layer.name
    ]
    assert len(weighted) == 50


def test_resnet50_halves_the_picture_five_times():
    model = resnet50((64, 64, 3), classes=10)
    assert model.get_layer("stage4_block3_relu").output.shape == (None, 2, 2, 2048)
    assert model.output_shape == (None, 10)


# Added up from LeCun et al. 1998, figure 2, with full connections; PyTorch's tutorial: 62,006.
@pytest.mark.parametrize(
    ("build", "shape", "exact"),
    [
        (lenet5, (28, 28, 1), 61_706),
        (lenet5, (32, 32, 3), 62_006),
        (torchnet, (28, 28, 1), 61_706),
        (torchnet, (32, 32, 3), 62_006),
    ],
)
def test_small_networks_have_the_published_number_of_parameters(build, shape, exact):
    model = build(shape)
    assert model.count_params() == exact
    assert model.predict(np.zeros((2, *shape), np.float32), verbose=0).shape == (2, 10)


@pytest.mark.parametrize("shape", [(28, 32, 1), (30, 30, 1), (64, 64, 3)])
def test_small_networks_refuse_other_sizes(shape):
    with pytest.raises(ValueError, match="28x28 or 32x32.*Received"):
        torchnet(shape)


def test_mlp_a_has_the_layers_of_its_paper():
    model = mlp()
    # 784 to 256 to 64 to 10, with biases.
    assert model.count_params() == 785 * 256 + 257 * 64 + 65 * 10 == 218_058
    kinds = [type(layer).__name__ for layer in model.layers[2:]]
    assert kinds == ["Dense", "LeakyReLU", "GaussianDropout"] * 2 + ["Dense"]
    assert {layer.rate for layer in model.layers if hasattr(layer, "rate")} == {0.2}
    x = np.random.default_rng(0).random((3, 28, 28, 1), np.float32)
    np.testing.assert_allclose(model.predict(x, verbose=0).sum(axis=1), 1.0, rtol=1e-5)
    assert (np.asarray(model(x, training=True)) != model.predict(x, verbose=0)).any()
