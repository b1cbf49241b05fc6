"""[T] figure 5.6 with fixed batches of 64 to 1024: theta and gradient norms of a small EDSR."""

from study_columns import epochs_to_peak, peak_update

_batches, _images, _patches_per_image, _epochs = (64, 128, 256, 512, 1024), 64, 32, 20
_patches = _images * _patches_per_image

TITLE = f"Theta of a small EDSR: {_patches} patches of Phantom, batches of 64 to 1024"
SHOWS = f"""
`theta_phantom_small` with batches up to 1024: EDSR with 4 blocks of 8 filters learns {_images}
pictures with {_patches_per_image} patches each for {_epochs} epochs on two ranks, validated on two
pictures; theta and the norm of the mean gradient are recorded at every second update. Adam's rate
of 1e-4 for a batch of 16 follows the root of the batch. [T] 5.1.4: the epoch in which theta peaks
is later the larger the batch. There is no peak if theta is largest at the first record or the last.
"""
RECIPE = "edsr"
RANKS = 2
FLAGS = {
    "data": "phantom",
    "images": _images,
    "patches_per_image": _patches_per_image,
    "validation_images": 2,
    "blocks": 4,
    "filters": 8,
    "epochs": _epochs,
    "schedule": "constant",
    "learning_rate": 1e-4,
    "scaling": "sqrt",
    "theta_every": 2,
    "theta_norms": True,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_psnr"
COLUMNS = {"theta is largest at update": peak_update, "after epochs": epochs_to_peak(_patches)}
