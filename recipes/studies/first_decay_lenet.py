"""[T] figure 5.3 with LeNet-5: theta and accuracy with and without a first decay to beta mu_0.

Rule of decision, written before the run. Figure 5.3 is confirmed if, paired by seed, theta rises
less after the first decay with the method than without it, by more than two standard errors;
contradicted if it rises more by as much; else there is no difference. [T] 5.1.5, that this decay
keeps the accuracy, is confirmed if the method ends above the decay to beta mu by more than two
standard errors, contradicted if as much below, else no difference.
"""

_small, _large, _images, _epochs, _decay = 64, 512, 2560, 12, 8


def _rise(epochs):
    """Return by how many per cent theta has risen since the end of the epoch before the decay."""
    return 100 * (epochs[-1]["theta"] / epochs[_decay - 1]["theta"] - 1)


TITLE = f"The first decay of the rate: LeNet-5, {_images} pictures, {_epochs} epochs"
SHOWS = f"""
[T] figure 5.3 and 5.1.5: where batch and rate have grown, the first decay takes the rate to beta
times the initial one, mu_0, and theta does not rise after it; "the other curves commonly increase".
LeNet-5 learns {_images} pictures of Fashion-MNIST for {_epochs} epochs, tested with 1000. Batch and
rate double every 2 epochs from {_small} to {_large}; the rate of {_small} is 0.02, and decays once,
after {_decay} epochs (beta is 0.1): to 0.1 mu_0, the method; or to a tenth of the rate that it had
grown to, which is 0.8 mu_0; or not at all. {_small} and {_large} throughout decay to a tenth;
{_large} has 2 epochs of warm-up. The rise of theta is that from the end of epoch {_decay} to the
end.
"""
RECIPE = "lenet"
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 1000,
    "epochs": _epochs,
    "patience": 0,
    "scaling": "linear",
    "learning_rate": 0.005,  # for a batch of 16
    "decay_epochs": str(_decay),
}
_growing = {"batch_size": _small, "adaptive_batch": _large, "adaptive_interval": 2}
CONFIGURATIONS = {
    "to beta mu_0": _growing,
    "to beta mu": {**_growing, "adaptive_decay": 0.1 * _large / _small},
    "no decay": {**_growing, "adaptive_decay": 1.0, "decay_epochs": str(_epochs)},
    f"{_small} throughout": {"batch_size": _small, "theta_every": 4},
    f"{_large} throughout": {"batch_size": _large, "warmup_epochs": 2, "theta_every": 4},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
MAY_LOSE = (0.5, 1.0)
COLUMNS = {"rise of theta after the decay, %": _rise}
