"""[S] figures 10 to 14, small: parameter averaging against gradient sharing and one process."""

_images, _epochs = 20000, 12

TITLE = f"Parameter averaging: {_images} pictures of MNIST, {_epochs} epochs"
SHOWS = f"""
[S] trains its perceptron "model A" on MNIST for 20 epochs, every process with batches of 64 of
its own; here all configurations have {_images} of the 60000 pictures and {_epochs} epochs, and are
tested with all 10000. Published, averaged after each epoch: 97.97 % with 2 processes, 97.62 with 4,
96.70 with 8 (weighted, lambda = 1); speedups per epoch 1.85, 3.66 and 4.20. Averaged once, at the
end, models do not fit together any more. Gamma is that of rank 0 ([S] eq. 10, figure 12), before it
is divided by the sum over ranks; 1 where all ranks count alike.
"""
RECIPE = "mlp"
RANKS = 2
FLAGS = {"data": "mnist", "images": _images, "epochs": _epochs}
CONFIGURATIONS = {
    "1 process": {"ranks": 1, "batch_size": 64},
    "gradients": {"batch_size": 64},
    "averaged each epoch": {"batch_size": 128, "average_every": 1},
    "averaged every 4 epochs": {"batch_size": 128, "average_every": 4},
    "averaged at the end": {"batch_size": 128, "average_every": _epochs},
    "4 ranks, each epoch": {"ranks": 4, "batch_size": 256, "average_every": 1},
    "8 ranks, each epoch": {"ranks": 8, "batch_size": 512, "average_every": 1},
    "2 ranks, lambda 1": {"batch_size": 128, "average_every": 1, "distance_weights": 1},
    "4 ranks, lambda 1": {"ranks": 4, "batch_size": 256, "average_every": 1, "distance_weights": 1},
}
SERIES = {
    "averaged each epoch": {
        1: "1 process", 2: "averaged each epoch", 4: "4 ranks, each epoch", 8: "8 ranks, each epoch"
    },
    "lambda 1": {2: "2 ranks, lambda 1", 4: "4 ranks, lambda 1"},
}  # fmt: skip
X_LABEL = "Ranks"
SEEDS = (1,)
METRIC = "val_accuracy"
COLUMNS = {"gamma, last epoch": lambda epochs: epochs[-1].get("averaging_weight")}  # [S] figure 12
THRESHOLD = ("val_accuracy", 0.95)
