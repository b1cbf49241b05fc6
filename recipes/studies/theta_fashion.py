"""[T] figure 5.2: does theta peak, and when, with fixed batches of 64 to 2048?"""

_batches = (64, 128, 256, 512, 1024, 2048)


def _peak_update(epochs):
    return epochs[-1]["theta_peak_update"]


def _peak_epoch(epochs):
    """Epoch in which theta was largest, from 1; a fraction of an epoch where it was recorded."""
    steps = 60000 // int(epochs[-1]["batch_size"])
    return epochs[-1]["theta_peak_update"] / steps


TITLE = "Theta with fixed batches: ResNet-8 on Fashion-MNIST"
SHOWS = """
Theta is recorded every 10 updates while nothing but the batch differs; the rate follows the batch
linearly, with five epochs of warm-up. [T] 5.1.4: theta peaks, for a batch of 128 in epoch 5, and
later the larger the batch. There is no peak if theta is largest at the first record or the last.
"""
RECIPE = "resnet"
FLAGS = {
    "data": "fashion_mnist",
    "depth": 8,
    "epochs": 30,
    "schedule": "constant",
    "warmup_epochs": 5,
    "decay_epochs": "15,27",
    "theta_every": 10,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"theta is largest at update": _peak_update, "in epoch": _peak_epoch}
