"""[T] figure 5.2: theta of a ResNet with batches of 128, 256 and 2048 over ten epochs.

Rule of decision, written before the run. The peak of a run is the epoch that ends with the largest
theta. [T] is confirmed for a batch if the peak of each seed is in epoch 3 to 10, contradicted if
that of each seed is in epoch 1 or 2, else undecided. "Later the larger the batch" is confirmed if
the peak update, in epochs, rises from 128 to 256 and to 2048 with every seed; contradicted if it
falls so. "The higher theta, the lower the accuracy" is confirmed if the rank correlation of both
over the three batches at the end is -1 with every seed, contradicted if it is above 0 with each.
"""

from study_columns import epochs_to_peak, peak_update

_images, _epochs, _warmup, _decay = 4096, 10, 2, 8


def _peak_epoch(epochs):
    """Return the epoch, from 1, that ends with the largest theta."""
    return max(epochs, key=lambda e: e["theta"])["epoch"]


TITLE = f"Theta of ResNet-8 on {_images} pictures of Fashion-MNIST, {_epochs} epochs"
SHOWS = f"""
[T] figure 5.2 has theta of ResNet-20 on CIFAR-10 for 140 epochs with batches of 128, 256 and 2048.
Here ResNet-8 learns {_images} pictures for {_epochs} epochs, and is tested with 1000. The rate is
0.1 for 128 and follows the batch linearly, with {_warmup} epochs of warm-up for 256 and 2048; it
decays to a tenth after {_decay} epochs. Theta is recorded at every second update, and at the end of
each epoch. [T] 5.1.4: theta peaks in epoch 5 with 128, later with larger batches, and the higher
theta in the end, the lower the accuracy; in [T] the batch of 2048 is 4 % of the pictures, here it
is half of them.
"""
RECIPE = "resnet"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 1000,
    "depth": 8,
    "epochs": _epochs,
    "schedule": "constant",
    "decay_epochs": str(_decay),
    "theta_every": 2,
}
CONFIGURATIONS = {
    "batch 128": {"batch_size": 128},
    "batch 256": {"batch_size": 256, "warmup_epochs": _warmup},
    "batch 2048": {"batch_size": 2048, "warmup_epochs": _warmup},
}
SERIES = {"fixed batch": {n: f"batch {n}" for n in (128, 256, 2048)}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {
    "epoch that ends with the largest theta": _peak_epoch,
    "theta is largest at update": peak_update,
    "after epochs": epochs_to_peak(_images),
    "theta at the end": lambda epochs: epochs[-1]["theta"],
}
