"""Rules that let the batch grow to one that loses more than a point on its own (LeNet-5)."""

from study_columns import first_growth, share_at_largest, steps

_small, _large, _images, _epochs = 64, 1024, 8000, 20


def _largest(epochs):
    return max(e["batch_size"] for e in epochs)


TITLE = f"Rules for growing batches up to {_large}: LeNet-5, {_epochs} epochs"
SHOWS = f"""
`growth_rules_small` with a largest batch of {_large} instead of 512, which loses more than a
point if it is used throughout: LeNet-5 (no batch normalization) on {_images} pictures of Fashion-
MNIST, tested with 5000, {_epochs} epochs for all, so that all see as many samples. The rate is
0.02 for {_small} and follows the root of the batch, to 0.08 for {_large}; {_large} throughout has
four epochs of warm-up. Growing batches double, at most once in an interval of K epochs: K is
given ("every K epochs"), or read off theta. Decays to a tenth of the first rate come after 60 %
and to a hundredth after 90 % of the epochs; a batch grows no more after the first one. Theta only
determines K, so it helps if the K that it finds is better than another one that costs as many
steps. With one seed all begin with the same weights and see the same pictures in the same order:
a rule that finds K trains what "every K epochs" trains.
"""
RECIPE = "lenet"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 5000,
    "epochs": _epochs,
    "patience": 0,
    "scaling": "sqrt",
    "learning_rate": 0.01,  # for a batch of 16
    "decay_epochs": f"{_epochs * 60 // 100},{_epochs * 90 // 100}",
}
_growing = {"batch_size": _small, "adaptive_batch": _large}
CONFIGURATIONS = {  # the first is the default, which all others are compared with
    "theta, 10 % twice": {**_growing, "adaptive_rule": "robust"},
    "small batch": {"batch_size": _small},
    "large batch": {"batch_size": _large, "warmup_epochs": 4},
    **{f"every {k} epochs": {**_growing, "adaptive_interval": k} for k in (1, 2, 3)},
    "theta, peak": {**_growing, "adaptive_rule": "peak"},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.2, 0.5)
COLUMNS = {
    "steps": steps(_images),
    "largest batch": _largest,
    f"% of samples in batches of {_large}": share_at_largest(_images, _large),
    "first epoch with a larger batch": first_growth,
}
