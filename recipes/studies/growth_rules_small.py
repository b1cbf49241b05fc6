"""Rules that let the batch grow, in an hour: theta, the noise scale, fixed intervals (LeNet-5)."""

from study_columns import first_growth, share_at_largest, steps

_small, _large, _images, _epochs = 64, 512, 20000, 30


TITLE = "Rules for growing batches: LeNet-5 on Fashion-MNIST"
SHOWS = f"""
[T] 5.1.4 with a network that takes minutes: LeNet-5 (no batch normalization) on {_images}
pictures of Fashion-MNIST, tested with all 10000, {_epochs} epochs for all, so that all see as many
samples. Batches go from {_small} to {_large}, with a rate of 0.02 for {_small} that follows the
batch linearly; {_large} throughout has five epochs of warm-up. Growing batches double, at most once
in an interval of K epochs: K is given ("every K epochs"), or read off theta, without a limit; the
noise scale needs two ranks and decides by itself. Decays to a tenth of the first rate come after
60 % and to a hundredth after 90 % of the epochs; a batch grows no more after the first one. Theta
only determines K, so it helps if the K that it finds is better than another one that costs as many
steps. With one seed all begin with the same weights and see the same pictures in the same order: a
rule that finds K trains what "every K epochs" trains, bit for bit.
"""
RECIPE = "lenet"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "epochs": _epochs,
    "patience": 0,
    "scaling": "linear",
    "learning_rate": 0.005,  # for a batch of 16
    "decay_epochs": f"{_epochs * 60 // 100},{_epochs * 90 // 100}",
}
_growing = {"batch_size": _small, "adaptive_batch": _large}
CONFIGURATIONS = {  # the first is the default, which all others are compared with
    "theta, 10 % twice": {**_growing, "adaptive_rule": "robust"},
    "small batch": {"batch_size": _small},
    "large batch": {"batch_size": _large, "warmup_epochs": 5},
    **{f"every {k} epochs": {**_growing, "adaptive_interval": k} for k in (2, 5, 8)},
    "theta, 10 % once": {**_growing, "adaptive_rule": "thesis"},
    "theta, peak": {**_growing, "adaptive_rule": "peak"},
    "noise scale": {**_growing, "adaptive_signal": "noise_scale", "ranks": 2},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.2, 0.5)
COLUMNS = {
    "steps": steps(_images),
    f"% of samples in batches of {_large}": share_at_largest(_images, _large),
    "first epoch with a larger batch": first_growth,
}
