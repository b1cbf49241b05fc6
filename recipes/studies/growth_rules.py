"""Rules that let the batch grow, on equal terms: theta, the noise scale, a fixed schedule."""

from study_columns import share_at_largest, steps

_small, _large, _images, _epochs = 64, 2048, 20000, 30


TITLE = "Rules for growing batches"
SHOWS = f"""
ResNet-8 on {_images} pictures of Fashion-MNIST, {_epochs} epochs, two ranks; batches from
{_small} to {_large}, of which the largest should lose more than a point if it is used throughout:
raise it until it does. All growing batches see as many samples; the fixed schedule doubles at equal
distances. The rules of `AdaptiveBatchSize` have no limit on the interval: the batch may not grow at
all.
"""
RECIPE = "resnet"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "depth": 8,
    "epochs": _epochs,
    "schedule": "constant",
}
_decays = {"decay_epochs": f"{_epochs * 60 // 100},{_epochs * 90 // 100}"}
_growing = {"batch_size": _small, "adaptive_batch": _large, **_decays}
CONFIGURATIONS = {
    "small batch": {"batch_size": _small, **_decays},
    "large batch": {"batch_size": _large, "warmup_epochs": 5, **_decays},
    "fixed schedule": {**_growing, "adaptive_interval": 3},
    "theta, 10 % once": {**_growing, "adaptive_rule": "thesis"},
    "theta, 10 % twice": {**_growing, "adaptive_rule": "robust"},
    "theta, peak": {**_growing, "adaptive_rule": "peak"},
    "noise scale": {**_growing, "adaptive_signal": "noise_scale"},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {
    "steps": steps(_images),
    f"% of samples in batches of {_large}": share_at_largest(_images, _large),
}
