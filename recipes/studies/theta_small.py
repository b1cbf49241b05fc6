"""[T] figure 5.2 in minutes: theta of ResNet-8 in its first updates, with batches of 64 to 2048."""

_batches = (64, 128, 256, 512, 1024, 2048)

TITLE = "Theta in the first epochs: ResNet-8 on Fashion-MNIST"
SHOWS = """
A first look before `theta_fashion`: 12800 pictures, four epochs, one process, theta at every second
update. The rate is 0.1 for a batch of 128 and follows the batch linearly, without warm-up. [T]
5.1.4: theta peaks, for a batch of 128 in epoch 5, and later the larger the batch; four epochs
cannot show that.
"""
RECIPE = "resnet"
FLAGS = {
    "data": "fashion_mnist",
    "images": 12800,
    "test_images": 2000,
    "depth": 8,
    "epochs": 4,
    "schedule": "constant",
    "theta_every": 2,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"theta is largest at update": lambda epochs: epochs[-1]["theta_peak_update"]}
