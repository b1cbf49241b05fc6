"""[L] table I and figure 4, small: groups, intervals and rates of local SGD on Fashion-MNIST."""

_images, _epochs, _warmup, _decay = 15000, 12, 5, 8


def _distance(epochs):
    """Mean D at the target rate: after the warm-up, before the first decay."""
    own = [e["model_distance"] for e in epochs[_warmup:_decay] if "model_distance" in e]
    return sum(own) / len(own) if own else None


def _best(epochs):
    return max(e["val_accuracy"] for e in epochs[-3:])


TITLE = "Local SGD: groups, intervals and rates"
SHOWS = f"""
[L] table I and figure 4 on a subset: ResNet-8 learns {_images} pictures of Fashion-MNIST (tested
with all 10000) for {_epochs} epochs. One rank is one group; each has batches of 128 and the groups
average their parameters every 8 steps, or every I where the name says so. The rate of 0.1 is
multiplied by the number of groups (linear rule), or stays ("fixed rate"), after {_warmup} epochs of
warm-up; it decays to a tenth after {_decay} and again after {_epochs - 1} epochs. "In step":
synchronous, with the same global batch and rate. D is [L] eq. 9 just before an average, the mean of
the last ones of epochs {_warmup + 1} to {_decay}, those at the target rate. Published for ResNet-20
on CIFAR-10, best of the last epochs: 91.91 % with one group, 91.61 with 2, 91.58 with 4, 91.11 with
8, and D of 0.8 to 0.9, 1.9 to 2.0, 3 to 3.4.
"""
RECIPE = "resnet"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "depth": 8,
    "epochs": _epochs,
    "schedule": "constant",
    "weight_decay": 1e-4,  # a tenth of the paper's
    "learning_rate": 0.1,
    "warmup_epochs": _warmup,
    "decay_epochs": f"{_decay},{_epochs - 1}",
    "interval": 8,
}


def _groups(n, **more):
    return {"ranks": n, "groups": n, "batch_size": 128 * n, **more}


CONFIGURATIONS = {
    "1 group": _groups(1),
    "2 groups": _groups(2),
    "4 groups": _groups(4),
    "8 groups": _groups(8),
    "2 ranks in step": _groups(2, groups=1),
    "4 ranks in step": _groups(4, groups=1),
    "8 ranks in step": _groups(8, groups=1),
    "4 groups, I = 2": _groups(4, interval=2),
    "4 groups, I = 16": _groups(4, interval=16),
    "2 groups, fixed rate": _groups(2, scaling="none"),
    "4 groups, fixed rate": _groups(4, scaling="none"),
    "8 groups, fixed rate": _groups(8, scaling="none"),
}
SERIES = {
    "local SGD, linear rule": {1: "1 group", **{n: f"{n} groups" for n in (2, 4, 8)}},
    "local SGD, fixed rate": {1: "1 group", **{n: f"{n} groups, fixed rate" for n in (2, 4, 8)}},
    "in step, linear rule": {1: "1 group", **{n: f"{n} ranks in step" for n in (2, 4, 8)}},
}
X_LABEL = "G: groups, or ranks in step"
SEEDS = (1,)
METRIC = "val_accuracy"
COLUMNS = {"best of the last 3": _best, "D": _distance}
