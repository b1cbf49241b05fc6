"""[F] figures 1 to 6, small: LeNet-5 on a part of Fashion-MNIST with batches of 16 to 512."""

TITLE = "Batch sizes: LeNet-5 on Fashion-MNIST"
SHOWS = """
[F] figures 1 to 6 with 10000 pictures of Fashion-MNIST (2000 for validation) and 20 epochs: the
rate is 0.001 whatever the batch. Published for MNIST, on 16 cores: the total speedup falls from
6.83 with batches of 16 to 6.23 with 512, while the epoch speedup rises from 6.83 to 7.70.
"""
RECIPE = "lenet"
FLAGS = {"data": "fashion_mnist", "images": 10000, "test_images": 2000, "epochs": 20, "patience": 0}
_names = {1: "1 process", 2: "2 ranks"}
CONFIGURATIONS = {
    f"{batch}, {name}": {"batch_size": batch, "ranks": ranks}
    for batch in (16, 64, 256, 512)
    for ranks, name in _names.items()
}
SERIES = {name: {n: f"{n}, {name}" for n in (16, 64, 256, 512)} for name in _names.values()}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
THRESHOLD = ("val_loss", 0.8)
