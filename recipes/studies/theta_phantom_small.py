"""[T] figure 5.6 in minutes: theta and gradient norms of a small EDSR with fixed batches."""

from study_columns import epochs_to_peak, peak_update

_batches, _images, _epochs = (16, 32, 64), 100, 12
_patches = 4 * _images

TITLE = f"Theta of a small EDSR: {_patches} patches of Phantom, {_epochs} epochs"
SHOWS = f"""
[T] figure 5.6 in minutes: EDSR with 8 blocks of 16 filters instead of 16 of 64, {_images} pictures
instead of 1600, two ranks, validated on two pictures; theta and the norm of the mean gradient are
recorded at every second update. Adam's rate of 1e-4 for a batch of 16 follows the batch linearly
([T] table 5.2). [T] figure 5.6: theta peaks, in epochs 55 to 65 for a batch of 32. There is no peak
if theta is largest at the last record.
"""
RECIPE = "edsr"
RANKS = 2
FLAGS = {
    "data": "phantom",
    "images": _images,
    "validation_images": 2,
    "blocks": 8,
    "filters": 16,
    "epochs": _epochs,
    "schedule": "constant",
    "learning_rate": 1e-4,
    "theta_every": 2,
    "theta_norms": True,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_psnr"
COLUMNS = {"theta is largest at update": peak_update, "after epochs": epochs_to_peak(_patches)}
