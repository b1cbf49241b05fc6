"""[S] tables 3 and 4: parameter averaging by batch size, by ranks, and weighted by distance."""

TITLE = "Parameter averaging: batch sizes and weights"
SHOWS = """
[S] tables 3 and 4 on Fashion-MNIST: every rank trains its own perceptron "model A" for 20 epochs,
and all average their parameters after each (k = 1). "B" is a rank's own batch, 64 where not said;
the rate follows it. Weighted: ranks count less the further they have moved ([S] eq. 10, lambda = 1
and 10). Published, on MNIST: 96.68 % with 8 processes and B = 64, 96.67 with 128, 96.29 with 256
(table 3); with lambda = 1 97.97 % with 2 processes, 97.62 with 4, 96.70 with 8, with lambda = 10
98.05, 97.63 and 96.58 (table 4): weights do not help, and neither do larger batches.
"""
RECIPE = "mlp"
FLAGS = {"data": "fashion_mnist", "epochs": 20, "average_every": 1}


def _ranks(n, batch=64, **more):
    return {"ranks": n, "batch_size": n * batch, **more}


CONFIGURATIONS = {
    "1 process": _ranks(1, average_every=0),
    "2 ranks": _ranks(2),
    "4 ranks": _ranks(4),
    "8 ranks": _ranks(8),
    "8 ranks, B = 128": _ranks(8, 128),
    "8 ranks, B = 256": _ranks(8, 256),
    "2 ranks, lambda 1": _ranks(2, distance_weights=1),
    "4 ranks, lambda 1": _ranks(4, distance_weights=1),
    "8 ranks, lambda 1": _ranks(8, distance_weights=1),
    "2 ranks, lambda 10": _ranks(2, distance_weights=10),
    "4 ranks, lambda 10": _ranks(4, distance_weights=10),
    "8 ranks, lambda 10": _ranks(8, distance_weights=10),
}
SERIES = {
    "mean": {1: "1 process", **{n: f"{n} ranks" for n in (2, 4, 8)}},
    "lambda 1": {n: f"{n} ranks, lambda 1" for n in (2, 4, 8)},
    "lambda 10": {n: f"{n} ranks, lambda 10" for n in (2, 4, 8)},
}
X_LABEL = "Ranks"
SEEDS = (1,)
METRIC = "val_accuracy"
COLUMNS = {"gamma, last epoch": lambda epochs: epochs[-1].get("averaging_weight")}
