"""[S] figures 10 to 12 and table 4 at eight ranks: averages each epoch, every 4, at the end.

Rule of decision, written before the run. Figure 10, the collapse, is confirmed if "at the end"
loses more than 10 points against "each epoch" with every seed, contradicted if less than 2 with
every seed. Figure 11 is confirmed if eight ranks lose against one process by more than two standard
errors, paired by seed, contradicted if they gain as much. Table 4, that weights by distance do not
help, is contradicted if lambda = 1 gains more than two standard errors, else no difference.
"""

_images, _epochs = 12800, 8

TITLE = f"Parameter averaging on 8 ranks: {_images} pictures of MNIST, {_epochs} epochs"
SHOWS = f"""
[S] trains its perceptron "model A" on MNIST for 20 epochs, every process with batches of 64 of its
own, and averages the parameters of 8 processes after each epoch, or less often; averaged once, at
the end, its models fail (figure 10). Here all configurations have {_images} of the 60000 pictures
and {_epochs} epochs, and are tested with 2000. Weighted: ranks count less the further they have
moved ([S] eq. 10, lambda = 1). Published with 8 processes, averaged after each epoch: 96.70 %
(weighted, lambda = 1). Gamma is that of rank 0, before it is divided by the sum over ranks.
"""
RECIPE = "mlp"
RANKS = 8
FLAGS = {"data": "mnist", "images": _images, "test_images": 2000, "epochs": _epochs}
CONFIGURATIONS = {
    "each epoch": {"batch_size": 512, "average_every": 1},
    "1 process": {"ranks": 1, "batch_size": 64},
    "every 4 epochs": {"batch_size": 512, "average_every": 4},
    "at the end": {"batch_size": 512, "average_every": _epochs},
    "each epoch, lambda 1": {"batch_size": 512, "average_every": 1, "distance_weights": 1},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {"gamma, last": lambda epochs: epochs[-1].get("averaging_weight")}
