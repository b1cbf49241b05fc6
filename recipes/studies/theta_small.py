"""[T] figure 5.2 in minutes: theta and gradient norms of ResNet-8 with batches of 64 to 512."""

from study_columns import epochs_to_peak, peak_update

_batches, _images, _epochs = (64, 128, 256, 512), 3200, 8

TITLE = f"Theta in the first {_epochs} epochs: ResNet-8 on {_images} pictures of Fashion-MNIST"
SHOWS = f"""
A first look before `theta_fashion`: {_images} pictures, {_epochs} epochs, two ranks, theta and the
norm of the mean gradient at every second update. The rate is 0.1 for a batch of 128 and follows the
batch linearly, without warm-up. [T] 5.1.4: theta peaks, for a batch of 128 in epoch 5, and later
the larger the batch; epochs of [T] have about 16 times as many updates.
"""
RECIPE = "resnet"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 2000,
    "depth": 8,
    "epochs": _epochs,
    "schedule": "constant",
    "theta_every": 2,
    "theta_norms": True,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"theta is largest at update": peak_update, "after epochs": epochs_to_peak(_images)}
