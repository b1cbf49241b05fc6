"""[T] figure 5.2 with LeNet-5: theta with fixed batches of 64 to 2048, over up to 6000 updates."""

from study_columns import epochs_to_peak, peak_update

_batches, _images, _epochs = (64, 128, 256, 512, 1024, 2048), 20000, 20

TITLE = (
    f"Theta with fixed batches: LeNet-5 on {_images} pictures of Fashion-MNIST, {_epochs} epochs"
)
SHOWS = f"""
`theta_fashion` with a small network, so that all batches of [T] figure 5.2 and 6000 updates with
the smallest fit into minutes: LeNet-5 learns {_images} pictures for {_epochs} epochs on two ranks,
theta and the norm of the mean gradient are recorded at every fourth update. The rate is 0.02 for 64
and follows the root of the batch, with two epochs of warm-up, and decays to a tenth after 60 % and
to a hundredth after 90 % of the epochs. [T] 5.1.4: theta peaks, for a batch of 128 in epoch 5
(about update 2000), and later the larger the batch. There is no peak if theta is largest at the
first record or the last.
"""
RECIPE = "lenet"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 5000,
    "epochs": _epochs,
    "patience": 0,
    "scaling": "sqrt",
    "learning_rate": 0.01,  # for a batch of 16
    "warmup_epochs": 2,
    "decay_epochs": f"{_epochs * 60 // 100},{_epochs * 90 // 100}",
    "theta_every": 4,
    "theta_norms": True,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
COLUMNS = {"theta is largest at update": peak_update, "after epochs": epochs_to_peak(_images)}
