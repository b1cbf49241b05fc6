"""[T] 5.4.1 (table 5.2, figure 5.5): growing batches for the restoration of pictures."""

from study_columns import share_at_largest, steps

_epochs, _patches = 40, 1600
_small, _large = 2, 16


TITLE = "Batches that grow while EDSR trains"
SHOWS = f"""
The four methods of [T] table 5.2, after figure 5.5, for EDSR-16 with 32 filters on {_patches}
patches of 400 Phantom pictures, on two ranks. Batches go from {_small} to {_large}: the gradient's
noise scale is 1 to 3 samples in the first epochs (`tfscale tune batch-size`), and what more than 16
samples would save in noise the fewer updates lose. Adam's rate is 0.001 for {_large}; it follows
the root of the batch, since {_epochs} epochs need a rate ten times the thesis's, which would not
grow eightfold without harm. Decays come after 50 % and 90 % of the epochs, except with the fixed
rate, where the growing batch takes their place. "AdaptiveBatchSize, fixed rate" grows at the small
batch's rate and decays once, after 90 %.
"""
RECIPE = "edsr"
RANKS = 2
FLAGS = {
    "data": "phantom",
    "images": 400,
    "filters": 32,
    "epochs": _epochs,
    "schedule": "constant",
    "scaling": "sqrt",
    "learning_rate": 0.001,  # for a batch of 16
}
_decays = {"decay_epochs": f"{_epochs * 50 // 100},{_epochs * 90 // 100}"}
CONFIGURATIONS = {
    "small batch": {"batch_size": _small, **_decays},
    "large batch, root scaling": {"batch_size": _large, "warmup_epochs": 5, **_decays},
    "growing batch, fixed rate": {"batch_size": _small, "batch_schedule": "10:4,20:8,30:16"},
    "AdaptiveBatchSize": {"batch_size": _small, "adaptive_batch": _large, **_decays},
    "AdaptiveBatchSize, fixed rate": {
        "batch_size": _small,
        "adaptive_batch": _large,
        "scaling": "none",
        "learning_rate": 0.001 * (_small / _large) ** 0.5,
        "decay_epochs": f"{_epochs * 90 // 100}",
    },
}
SEEDS = (1, 2, 3)
METRIC = "val_psnr"
COLUMNS = {
    "steps": steps(_patches),
    f"% of samples in batches of {_large}": share_at_largest(_patches, _large),
}
