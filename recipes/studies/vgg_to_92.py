"""A small VGG on all of Fashion-MNIST, to 90 % and 92 %."""

from study_columns import first_with, share_at_largest, steps

_epochs, _images, _decays = 16, 60000, (11, 15)

TITLE = "A small VGG on all of Fashion-MNIST"
SHOWS = f"""
A VGG of 0.7 million parameters with dropout learns all {_images} pictures for {_epochs} epochs.
Batches of 128 in step (any number of ranks follows this trajectory: there is no batch
normalization), local SGD with
batches of 128 in each group and an average every 8 steps, and `AdaptiveBatchSize`, whose batch
doubles after the second and the fourth epoch, to 512 (K = 2 is given: theta decides nothing). The
rate of the batch of 128, 0.01, is
multiplied by the number of groups, with two epochs of warm-up, and decays to a tenth after
{_decays[0]} and again after {_decays[1]} epochs.
"""
RECIPE = "vgg"
FLAGS = {
    "data": "fashion_mnist",
    "model": "small",
    "dense": "512",
    "epochs": _epochs,
    "schedule": "constant",
    "learning_rate": 0.02,  # for a batch of 256
    "warmup_epochs": 2,
    "decay_epochs": ",".join(map(str, _decays)),
    "interval": 8,
}
CONFIGURATIONS = {
    "1 group": {"ranks": 1, "batch_size": 128},
    "AdaptiveBatchSize": {
        "ranks": 1,
        "batch_size": 128,
        "adaptive_batch": 512,
        "adaptive_interval": 2,
        "warmup_epochs": 0,
    },
    "2 groups": {"ranks": 2, "groups": 2, "batch_size": 256},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {
    "first epoch with 90 %": first_with(0.9),
    "with 92 %": first_with(0.92),
    "steps": steps(_images),
    "% of samples in batches of 512": share_at_largest(_images, 512),
}
