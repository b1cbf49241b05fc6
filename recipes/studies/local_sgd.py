"""[L], accuracy of local SGD by the number of groups: ResNet-20 on CIFAR-10."""

TITLE = "Local SGD: accuracy by the number of groups"
SHOWS = """
[L] IV-B trains ResNet-20 on CIFAR-10 in groups that average their parameters every 8 steps; each
group has batches of 128, and the rate rises over five epochs from 0.1 to 0.1 times the number of
groups (III-C). Published, best of the last 10 epochs: 91.91 % with one group, 91.61 with 2, 91.58
with 4, 91.11 with 8, 89.28 with 16, 85.55 with 32. [L] does not print when the rate decays; the
epochs are those of [T] 5.4.3. One rank is one group here.
"""
RECIPE = "resnet"
FLAGS = {
    "data": "cifar10",
    "depth": 20,
    "epochs": 140,
    "schedule": "constant",
    "warmup_epochs": 5,
    "decay_epochs": "80,120",
    "interval": 8,
}
CONFIGURATIONS = {
    "1 group": {"ranks": 1, "batch_size": 128},
    "2 groups": {"ranks": 2, "groups": 2, "batch_size": 256},
    "4 groups": {"ranks": 4, "groups": 4, "batch_size": 512},
    "8 groups": {"ranks": 8, "groups": 8, "batch_size": 1024},
    "2 ranks in step": {"ranks": 2, "batch_size": 256},
    "4 ranks in step": {"ranks": 4, "batch_size": 512},
}
SERIES = {
    "local SGD": {1: "1 group", **{n: f"{n} groups" for n in (2, 4, 8)}},
    "in step": {1: "1 group", **{n: f"{n} ranks in step" for n in (2, 4)}},
}
X_LABEL = "G: groups, or ranks in step"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"best of the last 10": lambda epochs: max(e["val_accuracy"] for e in epochs[-10:])}
THRESHOLD = ("val_accuracy", 0.9)
