"""[F] figures 1 and 5 to 8: LeNet-5 and TorchNet on MNIST to a validation loss of 0.5.

Rule of decision, written before the run; a run that never reaches the loss counts as one epoch more
than it had. Figure 1 is confirmed for a network if 64 takes more epochs than 16 with every seed,
contradicted if fewer with every seed. Figures 6 to 8, that TorchNet behaves as LeNet-5, are
confirmed if figure 1 has the same verdict for both. Figure 5, that parallel training improves less
per epoch, is confirmed if two ranks with fixed shares take more epochs than one process by more
than two standard errors, paired by seed and over both networks, contradicted if as much fewer, else
no difference.
"""

from study_columns import first_below

_images, _epochs, _batches = 3000, 12, (16, 64)
_networks = {"LeNet-5": "lenet5", "TorchNet": "torchnet"}

TITLE = f"To a validation loss of 0.5: {_images} pictures of MNIST, {_epochs} epochs"
SHOWS = f"""
[F] trains LeNet-5 on MNIST, and TorchNet on CIFAR-10, at a rate of 0.001 whatever the batch, and
takes the time to a validation loss of 0.5 for the total speedup. Here both networks learn {_images}
pictures of MNIST for {_epochs} epochs, tested with 1000. "2 ranks": each has a fixed half of the
pictures, which it shuffles on its own, as in [F]. Epochs that are counted from 1 end with the loss.
"""
RECIPE = "lenet"
FLAGS = {
    "data": "mnist", "images": _images, "test_images": 1000, "epochs": _epochs, "patience": 0
}  # fmt: skip
CONFIGURATIONS = {
    **{
        f"{name}, {batch}": {"model": model, "batch_size": batch}
        for name, model in _networks.items()
        for batch in _batches
    },
    **{
        f"{name}, 16, 2 ranks": {"model": model, "batch_size": 16, "ranks": 2, "shuffle": "shards"}
        for name, model in _networks.items()
    },
}
SERIES = {name: {batch: f"{name}, {batch}" for batch in _batches} for name in _networks}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"first epoch with a loss of 0.5": first_below(0.5)}
THRESHOLD = ("val_loss", 0.5)
