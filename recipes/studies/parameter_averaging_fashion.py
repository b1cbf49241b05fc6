"""[S] tables 3 and 4 on 2 ranks: parameter averaging by batch size, and weighted by distance."""

_images, _epochs = 12000, 10

TITLE = f"Parameter averaging on 2 ranks: {_images} pictures, {_epochs} epochs"
SHOWS = f"""
[S] tables 3 and 4 on {_images} pictures of Fashion-MNIST, tested with all 10000: every rank
trains its own perceptron "model A" for {_epochs} epochs instead of 20, and all average their
parameters after each (k = 1). "B" is a rank's own batch, 64 where not said; the rate follows it.
Weighted: ranks count less the further they have moved ([S] eq. 10, lambda = 1 and 10). Gamma is
that of rank 0 ([S] eq. 10, figure 12), before it is divided by the sum over ranks; 1 where all
ranks count alike. Published, on MNIST with 60000 pictures: with 2 processes 97.97 % with lambda =
1 and 98.05 % with 10 (table 4): weights do not help.
"""
RECIPE = "mlp"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "epochs": _epochs,
    "average_every": 1,
}


def _ranks(n, batch=64, **more):
    return {"ranks": n, "batch_size": n * batch, **more}


def _gamma(epochs):
    """Gamma of the last average; None where there is no average."""
    return epochs[-1].get("averaging_weight")


def _first_gamma(epochs):
    return epochs[0].get("averaging_weight")


CONFIGURATIONS = {
    "1 process": _ranks(1, average_every=0),
    "2 ranks": _ranks(2),
    "2 ranks, B = 128": _ranks(2, 128),
    "2 ranks, lambda 1": _ranks(2, distance_weights=1),
    "2 ranks, lambda 10": _ranks(2, distance_weights=10),
}
SERIES = {
    "mean": {1: "1 process", 2: "2 ranks"},
    "lambda 1": {2: "2 ranks, lambda 1"},
    "lambda 10": {2: "2 ranks, lambda 10"},
}
X_LABEL = "Ranks"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"gamma, first average": _first_gamma, "gamma, last": _gamma}
