"""Variants of local SGD ([L] III-B): intervals, post-local, SASGD, outer optimizers, LARS.

Rule of decision, written before the run. With two seeds a variant differs from the fixed interval
if both seeds differ to the same side by more than one point; nothing smaller is stated.
"""

_images, _epochs, _decay = 4000, 6, 4

TITLE = f"Variants of local SGD: LeNet-5, {_images} pictures, {_epochs} epochs, two seeds"
SHOWS = f"""
[L] III-B: local SGD composes with adaptive intervals, post-local SGD and SASGD. LeNet-5 learns
{_images} pictures of Fashion-MNIST for {_epochs} epochs, tested with 2000, in two groups of one
rank with batches of 64. The rate of 0.02 for a batch of 64 follows the number of groups, with a
warm-up of one epoch, and decays to a tenth after {_decay} epochs. "Post-local": in step until the
rate decays. "Outer": SGD with a rate of 0.7 and Nesterov's momentum of 0.9 takes the change of the
average as its gradient (DiLoCo), every 8 steps. LARS has a rate of 1 for a batch of 64. The
intervals: AdaComm from 16 steps, 8 steps that grow by 2 with each average, QSR from 8, and an
average where groups are further than 0.5 from the last one, after 32 steps at the latest.
"""
RECIPE = "lenet"
RANKS = 2
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
    "decay_epochs": str(_decay),
    "groups": 2,
}
CONFIGURATIONS = {
    "every 8 steps": {"interval": 8},
    "in step": {"groups": 1},
    "AdaComm": {"interval": "adaptive:initial=16"},
    "growing interval": {"interval": "growing:initial=8,growth=0.25,maximum=32"},
    "QSR": {"interval": f"quadratic:alpha={0.04 * 8**0.5:.4f},minimum=8"},
    "distance guard": {"interval": "distance:limit=0.5,maximum=32"},
    "post-local": {"interval": 8, "local_start": "after_first_decay"},
    "SASGD": {"interval": 8, "local_average": "gradients"},
    "outer": {"interval": 8, "outer": "SGD:learning_rate=0.7,momentum=0.9,nesterov=True"},
    "LARS": {"interval": 8, "optimizer": "lars", "learning_rate": 0.25},
}
SEEDS = (1, 2)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {"D, last average": lambda epochs: epochs[-1].get("model_distance")}
