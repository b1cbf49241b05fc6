"""[F] figures 1 to 6 and table I: LeNet-5 on MNIST with batches of 16 to 512."""

TITLE = "Batch sizes: LeNet-5 on MNIST"
SHOWS = """
[F] trains LeNet-5 on MNIST at a rate of 0.001 whatever the batch, until 10 epochs bring no lower
validation loss, 20 at most. Published, on 16 cores: an epoch speedup of 6.83 with batches of 16
and 7.70 with 512, a total speedup (validation loss below 0.5) of 6.83 and 6.23. Larger batches
make epochs shorter and each of them worth less.
"""
RECIPE = "lenet"
RANKS = 2
FLAGS = {"data": "mnist", "epochs": 20}
CONFIGURATIONS = {
    f"{batch}, {ranks} rank{'s' * (ranks > 1)}": {"batch_size": batch, "ranks": ranks}
    for batch in (16, 64, 256, 512)
    for ranks in (1, 2)
}
SERIES = {
    f"{ranks} rank{'s' * (ranks > 1)}": {
        batch: f"{batch}, {ranks} rank{'s' * (ranks > 1)}" for batch in (16, 64, 256, 512)
    }
    for ranks in (1, 2)
}
X_LABEL = "Samples of a batch"
SEEDS = (1,)
METRIC = "val_accuracy"
THRESHOLD = ("val_loss", 0.5)
