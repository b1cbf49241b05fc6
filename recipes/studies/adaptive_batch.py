"""[T] 5.4.3 (table 5.3, figure 5.10): what do larger batches cost in accuracy?"""

from study_columns import share_at_largest, steps

_epochs, _images = 30, 20000
_small, _large = 64, 512


def _best_accuracy(epochs):
    return max(line["val_accuracy"] for line in epochs)


TITLE = "Batches that grow while a model trains"
SHOWS = f"""
The four methods of [T] table 5.3, after figure 5.10: a small batch throughout; the large batch
throughout, with the linear scaling rule and five epochs of gradual warm-up; a batch that grows at
epochs set beforehand, at a fixed rate; and `AdaptiveBatchSize`, which lets batch and rate grow
together, then decays the rate to a tenth of the initial one. It grew every 4 epochs: not because of
theta, but of a limit (three fifths of the epochs for the largest batch) that there is no more.
ResNet-8 learns {_images} pictures of Fashion-MNIST (all 10000 test pictures) on two ranks. Batches
go from {_small} to {_large}; the rate is 0.05 for {_small}; decays come after 50 % and 90 % of the
epochs, except with the fixed rate, where the growing batch takes their place.
"""
RECIPE = "resnet"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "depth": 8,
    "epochs": _epochs,
    "schedule": "constant",
    "weight_decay": 1e-4,  # a tenth of the paper's
    "learning_rate": 0.1,  # for a batch of 128
}
_decays = {"decay_epochs": f"{_epochs * 50 // 100},{_epochs * 90 // 100}"}
CONFIGURATIONS = {
    "small batch": {"batch_size": _small, **_decays},
    "large batch, linear scaling": {"batch_size": _large, "warmup_epochs": 5, **_decays},
    "growing batch, fixed rate": {"batch_size": _small, "batch_schedule": "8:128,15:256,22:512"},
    "AdaptiveBatchSize": {"batch_size": _small, "adaptive_batch": _large, **_decays},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {
    "best": _best_accuracy,
    "steps": steps(_images),
    f"% of samples in batches of {_large}": share_at_largest(_images, _large),
}
