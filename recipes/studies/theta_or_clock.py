"""Theta's own K, clocks, and a `BatchSizeSchedule` of the same ladder: a small VGG.

Rule of decision, written before the run. Theta can only choose K, and a clock with this K trains
the same, bit for bit: what counts is whether the K that theta finds is better than its steps. The
accuracy of each seed is compared with what the other clocks have at as many steps: the line between
the clock with the next fewer and that with the next more steps (the nearest if there is none on one
side), theta's own K left out. Theta is better if it is above by more than two standard errors, a
clock is better if as much below, else a clock is as good.
"""

from study_columns import first_growth, share_at_largest, steps

_images, _epochs, _small, _large, _decays = 3072, 16, 128, 512, "11,15"

TITLE = f"Theta against a clock: a small VGG, {_images} pictures, {_epochs} epochs"
SHOWS = f"""
The training of `vgg_to_92`, whose table of minutes has K = 2 given, on {_images} instead of 60000
pictures of Fashion-MNIST, with 64 instead of 512 dense units and tested with 1000. The batch
doubles from {_small} to {_large} every K epochs: K is read off theta (the default rule of
`AdaptiveBatchSize`) or given ("clock"). "Schedule": `BatchSizeSchedule` with the ladder of K = 4,
whose rate stays that of {_small}, and never decays. The rate of {_small} is 0.01, follows the batch
and decays to a tenth of 0.01 after 11 and again after 15 epochs; the batch grows no more after the
first decay.
"""
RECIPE = "vgg"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 1000,
    "model": "small",
    "dense": "64",
    "dropout": 0.0,
    "epochs": _epochs,
    "schedule": "constant",
    "learning_rate": 0.02,  # for a batch of 256
}
_growing = {"batch_size": _small, "adaptive_batch": _large, "decay_epochs": _decays}
CONFIGURATIONS = {
    "theta": _growing,
    **{f"clock, K = {k}": {**_growing, "adaptive_interval": k} for k in (2, 4, 6)},
    "schedule, K = 4": {"batch_size": _small, "batch_schedule": "4:256,8:512"},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {
    "steps": steps(_images),
    f"% of samples in batches of {_large}": share_at_largest(_images, _large),
    "first epoch with a larger batch": first_growth,
}
