"""The models of the step suite with their data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from benchmarks.numbers import Weights

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))

from models.edsr import edsr
from models.resnet import resnet
from models.resnet50 import resnet50
from models.vgg import VGG_A, VGG_SMALL, vgg, vgg_a_of_width

FASHION = (28, 28, 1)


@dataclass(frozen=True)
class Workload:
    """A model to be trained on pictures made up.

    Attributes:
        build: Makes the model.
        global_batch: Pictures per step, of all ranks together.
        shape: Rows, columns and channels of a picture, or just numbers.
        classes: Number of classes; 0 for a model that restores pictures.
    """

    build: Callable[[], keras.Model]
    global_batch: int
    shape: tuple[int, ...]
    classes: int


def fc1() -> keras.Model:
    """Return VGG-16's first dense layer: 25088 x 4096."""
    return keras.Sequential([keras.Input((25088,)), keras.layers.Dense(4096)])


def small_vgg() -> keras.Model:
    """Return the network of 0.7 million parameters that studies train on Fashion-MNIST."""
    return vgg(VGG_SMALL, FASHION, (512,), 10, dropout=0.0)


def vgg_a(filters: int = 0) -> keras.Model:
    """Return VGG-A for pictures of 64x64, with as many filters in each convolution if not 0."""
    return vgg(vgg_a_of_width(filters) if filters else VGG_A, (64, 64, 3), dropout=0.0)


def lstm() -> keras.Model:
    """Return one LSTM of 128 units over sequences of 28 rows."""
    layers = [keras.Input(FASHION[:2]), keras.layers.LSTM(128), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def dense512() -> keras.Model:
    """Return three dense layers of 512 units and a classifier."""
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


WORKLOADS = {
    # The dense layers take 4x4x128 = 2048 numbers.
    "vgg_like": Workload(lambda: vgg(VGG_SMALL, (32, 32, 3), dropout=0.0), 64, (32, 32, 3), 1000),
    "vgg_a": Workload(vgg_a, 32, (64, 64, 3), 1000),
    "resnet50": Workload(lambda: resnet50((64, 64, 3)), 32, (64, 64, 3), 1000),
    # Forward passes that are long enough to hide the gather of parameters at 1 Gbit/s.
    "resnet50_128": Workload(lambda: resnet50((64, 64, 3)), 128, (64, 64, 3), 1000),
    "resnet50_256": Workload(lambda: resnet50((64, 64, 3)), 256, (64, 64, 3), 1000),
    "resnet20": Workload(lambda: resnet(20), 64, (32, 32, 3), 10),
    # What recipes/whole_runs.py trains on Fashion-MNIST, with the batches of a growing one.
    **{f"vgg_small_{n}": Workload(small_vgg, n, FASHION, 10) for n in (128, 256, 512)},
    # Whose steps take a few milliseconds.
    "lstm": Workload(lstm, 64, FASHION[:2], 10),
    "dense512": Workload(dense512, 256, (784,), 10),
    # [T] figure 4.6: VGG-16's first dense layer, errors as if more layers followed.
    "fc1": Workload(fc1, 256, (25088,), 4096),
    "edsr16": Workload(lambda: edsr(), 16, (48, 48, 1), 0),
}


def make_batch(workload: Workload, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (pictures, targets) of one rank: float32 pictures, labels or pictures as targets."""
    generator = np.random.default_rng(rank)
    n = workload.global_batch // size
    pictures = generator.random((n, *workload.shape), np.float32)
    if workload.classes:
        return pictures, generator.integers(0, workload.classes, n)
    return pictures, generator.random(pictures.shape, np.float32)


def make_loss(workload: Workload) -> keras.losses.Loss:
    """Return the loss that goes with the targets."""
    if workload.classes:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.losses.MeanAbsoluteError()


def weights_of(model: keras.Model) -> list[Weights]:
    """Return what `numbers.least_bytes` needs to know of each layer."""
    found = []
    for layer in model.layers:
        n_parameters = sum(int(np.prod(v.shape)) for v in layer.trainable_variables)
        if isinstance(layer, keras.layers.Dense):
            found.append(Weights(n_parameters, *(int(n) for n in layer.kernel.shape)))
        elif n_parameters:
            found.append(Weights(n_parameters))
    return found
