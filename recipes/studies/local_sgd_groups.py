"""[L] table I, small: groups of local SGD against one group, on Fashion-MNIST."""

_epochs, _warmup, _decay = 6, 2, 4


def _distance(epochs):
    """Mean D at the target rate: after the warm-up, before the first decay."""
    own = [e["model_distance"] for e in epochs[_warmup:_decay] if "model_distance" in e]
    return sum(own) / len(own) if own else None


def _best(epochs):
    return max(e["val_accuracy"] for e in epochs[-3:])


TITLE = "Local SGD by the number of groups: a small VGG on 30000 pictures of Fashion-MNIST"
SHOWS = f"""
[L] table I, shrunk alike for all: a VGG of 0.7 million parameters without dropout learns 30000
pictures for {_epochs} epochs and is tested with all 10000. A group has batches of 128, and G groups
average their parameters every 8 steps, so that all rows see as many samples. The rate of the batch
of 128, 0.005, is multiplied by G ({_warmup} epochs of warm-up from 0.01 to 0.02 where G is 4), and
decays to a tenth after {_decay} and again after {_epochs - 1} epochs. "In step": the gradients of
as large a batch are summed in every step. "Groups of 2": two ranks a group, which share its batch.
"Averages overlap": training continues for 2 steps while an average is computed. The network has no
batch normalization, so exact exchanges follow one trajectory on any number of ranks.
"AdaptiveBatchSize" doubles batch and rate after the first and the second epoch, to 512 (K = 1 is
given: theta decides nothing). D is [L]
eq. 9, the mean of the last averages of epochs {_warmup + 1} to {_decay}. Published for ResNet-20 on
CIFAR-10, best of the last epochs: 91.91 % with one group, 91.61 with 2, 91.58 with 4.
"""
RECIPE = "vgg"
FLAGS = {
    "data": "fashion_mnist",
    "images": 30000,
    "model": "small",
    "dense": "512",
    "dropout": 0.0,
    "epochs": _epochs,
    "schedule": "constant",
    "learning_rate": 0.01,  # for a batch of 256
    "warmup_epochs": _warmup,
    "decay_epochs": f"{_decay},{_epochs - 1}",
    "interval": 8,
}
CONFIGURATIONS = {
    "1 group": {"ranks": 1, "batch_size": 128},
    "2 groups": {"ranks": 2, "groups": 2, "batch_size": 256},
    "4 groups": {"ranks": 4, "groups": 4, "batch_size": 512},
    "2 groups of 2": {"ranks": 4, "groups": 2, "batch_size": 256},
    "256 in step": {"ranks": 1, "batch_size": 256},
    "512 in step": {"ranks": 1, "batch_size": 512},
    "1 group, int8": {"ranks": 2, "batch_size": 128, "compression": "int8"},
    "2 groups, averages overlap": {"ranks": 2, "groups": 2, "batch_size": 256, "overlap": 2},
    "4 groups, averages overlap": {"ranks": 4, "groups": 4, "batch_size": 512, "overlap": 2},
    "AdaptiveBatchSize": {
        "ranks": 1,
        "batch_size": 128,
        "adaptive_batch": 512,
        "adaptive_interval": 1,
        "warmup_epochs": 0,
    },
}
SERIES = {
    "local SGD": {1: "1 group", 2: "2 groups", 4: "4 groups"},
    "groups of 2 ranks": {2: "2 groups of 2"},
    "averages overlap": {2: "2 groups, averages overlap", 4: "4 groups, averages overlap"},
    "in step": {1: "1 group", 2: "256 in step", 4: "512 in step"},
}
X_LABEL = "G: groups, or batches of 128 in step"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"best of the last 3": _best, "D": _distance}
MAY_LOSE = (0.5, 1.0)
