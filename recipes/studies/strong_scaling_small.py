"""The same training on 1, 2 and 4 ranks, in minutes: LeNet-5 on a part of MNIST."""

_images, _epochs, _batch = 4000, 4, 64

TITLE = f"Strong scaling: LeNet-5 on {_images} pictures of MNIST, {_epochs} epochs"
SHOWS = f"""
[T] figures 5.7 and 5.8 speed up one training by more ranks, and expect the same convergence, as the
ranks together see the batches of one process. Here LeNet-5 learns {_images} pictures of MNIST in
batches of {_batch}, tested with 2000: with one seed all configurations begin with the same weights
and see the same pictures in the same order, so that they differ by float32's rounding only, and by
what training makes of it.
"""
RECIPE = "lenet"
FLAGS = {
    "data": "mnist",
    "images": _images,
    "test_images": 2000,
    "batch_size": _batch,
    "learning_rate": 0.01,
    "epochs": _epochs,
    "patience": 0,
}
CONFIGURATIONS = {
    "1 process": {"ranks": 1},
    "2 ranks": {"ranks": 2},
    "4 ranks": {"ranks": 4},
    "4 ranks, sharded": {"ranks": 4, "exchange": "sharded"},
}
SERIES = {"allreduce": {1: "1 process", 2: "2 ranks", 4: "4 ranks"}}
X_LABEL = "Ranks"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {
    "loss": lambda epochs: epochs[-1]["loss"],
    "val_loss": lambda epochs: epochs[-1]["val_loss"],
}
THRESHOLD = ("val_accuracy", 0.9)
