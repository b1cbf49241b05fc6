"""[T] 5.4.1 (table 5.2, figure 5.5) in minutes: growing batches for the restoration of pictures."""

from study_columns import share_at_largest, steps

_epochs, _images = 20, 60
_patches = 4 * _images
_small, _large = 2, 16


TITLE = f"Batches that grow while a small EDSR trains: {_patches} patches, {_epochs} epochs"
SHOWS = f"""
`adaptive_batch_edsr` in minutes: EDSR with 8 blocks of 16 filters on {_patches} patches of
{_images} Phantom pictures, validated on two pictures, {_epochs} epochs on one process. Batches go
from {_small} to {_large}. Adam's rate is 0.001 for {_large} and follows the root of the batch.
Decays come after 50 % and 90 % of the epochs, except with the fixed rate, where the growing batch
takes their place. `AdaptiveBatchSize` reads its interval off theta, without a limit.
"""
RECIPE = "edsr"
FLAGS = {
    "data": "phantom",
    "images": _images,
    "validation_images": 2,
    "blocks": 8,
    "filters": 16,
    "epochs": _epochs,
    "schedule": "constant",
    "scaling": "sqrt",
    "learning_rate": 0.001,  # for a batch of 16
}
_decays = {"decay_epochs": f"{_epochs * 50 // 100},{_epochs * 90 // 100}"}
CONFIGURATIONS = {
    "small batch": {"batch_size": _small, **_decays},
    "large batch, root scaling": {"batch_size": _large, "warmup_epochs": 3, **_decays},
    "growing batch, fixed rate": {"batch_size": _small, "batch_schedule": "5:4,10:8,15:16"},
    "AdaptiveBatchSize": {"batch_size": _small, "adaptive_batch": _large, **_decays},
}
SEEDS = (1, 2, 3)
METRIC = "val_psnr"
COLUMNS = {
    "steps": steps(_patches),
    f"% of samples in batches of {_large}": share_at_largest(_patches, _large),
}
