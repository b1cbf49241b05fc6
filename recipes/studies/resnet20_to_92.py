"""ResNet-20 on half of Fashion-MNIST, to 90 % and 92 %."""

from study_columns import first_with, share_at_largest, steps

_epochs, _images, _decays = 7, 30000, (4, 6)

TITLE = f"ResNet-20 on {_images} pictures of Fashion-MNIST, {_epochs} epochs"
SHOWS = f"""
ResNet-20 learns {_images} pictures for {_epochs} epochs on two ranks.
Batches of 128 in step, local SGD with
batches of 128 in each of two groups and an average every 8 steps, and `AdaptiveBatchSize`, whose
batch doubles to 256 after the second epoch (K = 2 is given: theta decides nothing); at later ends
of its interval the rate decays instead.
The rate of the batch of 128, 0.1, is multiplied by the number of groups, with a warm-up of one
epoch, and decays to a tenth after {_decays[0]} and again after {_decays[1]} epochs. [T] and [L]
train for 140 epochs and more.
"""
RECIPE = "resnet"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "depth": 20,
    "images": _images,
    "epochs": _epochs,
    "schedule": "constant",
    "warmup_epochs": 1,
    "decay_epochs": ",".join(map(str, _decays)),
    "interval": 8,
}
CONFIGURATIONS = {
    "1 group": {"batch_size": 128},
    "AdaptiveBatchSize": {
        "batch_size": 128,
        "adaptive_batch": 512,
        "adaptive_interval": 2,
        "warmup_epochs": 0,
    },
    "2 groups": {"groups": 2, "batch_size": 256},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {
    "first epoch with 90 %": first_with(0.9),
    "with 92 %": first_with(0.92),
    "steps": steps(_images),
    "% of samples in batches of 256": share_at_largest(_images, 256),
}
