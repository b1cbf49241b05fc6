"""[L] III-B: groups of two ranks that are sharded inside, beside the baseline with allreduce.

Rule of decision, written before the run. Both compute the same averages in another order, so
"equal" is confirmed if, paired by seed, the mean loss of the method is within two standard errors
of 0, or within 0.5 points where the errors are smaller than rounding makes them (0.25 points);
contradicted if it is outside of both.
"""

_images, _epochs = 4000, 6

TITLE = f"Two groups of two ranks, sharded inside: LeNet-5, {_images} pictures, {_epochs} epochs"
SHOWS = f"""
[L] III-B: the ranks of a group exchange their gradients by reduce-scatter and allgather, so that
each updates one part of the model, and averages that part alone with the other groups. The baseline
of [L] sums gradients, and averages parameters, by allreduce. LeNet-5 learns {_images} pictures of
Fashion-MNIST for {_epochs} epochs, tested with 2000, on four ranks in two groups of m = 2 (of two
ranks each), with batches of 64 in a group, an average every 8 steps and a rate of 0.02 for one
group that follows the number of groups, with a warm-up of one epoch and a decay to a tenth after 4.
D is [L] eq. 9 at the last average of the epoch before the decay.
"""
RECIPE = "lenet"
RANKS = 4
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 2000,
    "epochs": _epochs,
    "patience": 0,
    "batch_size": 128,
    "scaling": "linear",
    "learning_rate": 0.005,  # for a batch of 16
    "warmup_epochs": 1,
    "decay_epochs": "4",
    "groups": 2,
    "interval": 8,
}
CONFIGURATIONS = {
    "allreduce inside (baseline)": {"exchange": "allreduce"},
    "sharded inside (method)": {"exchange": "sharded"},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {"D": lambda epochs: epochs[3]["model_distance"]}
