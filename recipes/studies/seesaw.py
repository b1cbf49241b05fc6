"""Seesaw beside theta's rule, a clock and the fixed batch (VGG).

Rule of decision, written before the runs: that of `local_sgd_rules`, against "fixed batch".
Seesaw claims an equal result in fewer steps for as many samples, so its row must be "harmless".
Against "fixed batch, steps of seesaw" it is said to gain only if the one-sided lower bound of 95 %
of the difference, paired by seed, is above 0.
"""

from study_columns import first_growth, steps

_images, _small, _large, _epochs, _decays = 3200, 32, 256, 12, (6, 8, 10)

TITLE = (
    f"Seesaw: batches that grow where the rate decays, a VGG of 0.1 million parameters on "
    f"{_images} pictures of Fashion-MNIST"
)
SHOWS = f"""
The VGG of `local_sgd_rules` on {_images} of 60000 pictures of Fashion-MNIST, tested with 5000, on
one process; {_epochs} epochs, so that all rows but the last see as many samples. The rate is 0.0075
for the batch of {_small}. "fixed batch" halves it after {_decays[0]}, {_decays[1]} and {_decays[2]}
epochs. "seesaw" doubles the batch there and divides the rate by the root of 2, up to {_large}.
"theta" grows the batch by the default rule and "clock" every 2 epochs, up to {_large}, with the
root of the batch as the factor of the rate, which falls to a tenth after 9 epochs. The last row has
the fixed batch and about as many steps as "seesaw", with decays after 4, 5 and 7 of 8 epochs.
"""
RECIPE = "vgg"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 5000,
    "model": "tiny",
    "dense": "128",
    "dropout": 0.0,
    "epochs": _epochs,
    "batch_size": _small,
    "scaling": "sqrt",
    "learning_rate": 0.0212,  # for a batch of 256
}
_fixed = {"adaptive_rule": "seesaw", "adaptive_batch": _small}  # is largest already
_growing = {"adaptive_batch": _large, "decay_epochs": "9"}
_text = ",".join(map(str, _decays))
CONFIGURATIONS = {
    "fixed batch": {**_fixed, "decay_epochs": _text},
    "seesaw": {"adaptive_rule": "seesaw", "adaptive_batch": _large, "decay_epochs": _text},
    "theta": {**_growing, "adaptive_rule": "robust"},
    "clock": {**_growing, "adaptive_interval": 2},
    "fixed batch, steps of seesaw": {**_fixed, "epochs": 8, "decay_epochs": "4,5,7"},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.2, 0.5)
COLUMNS = {"steps": steps(_images), "first epoch with a larger batch": first_growth}
