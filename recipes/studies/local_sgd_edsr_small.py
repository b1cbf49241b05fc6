"""[L] table II, small: local SGD of EDSR by the number of groups, the rate by their root.

Rule of decision, written before the run. [L] prints 34.35, 34.39 and 34.10 dB with 1, 2 and 4
groups: "the accuracy holds" is confirmed for a number of groups if, paired by seed, it loses at
most 0.25 dB at the upper end of two standard errors; contradicted if it loses more than 0.25 dB at
the lower end; else undecided. "D grows in proportion to the groups" is confirmed if D of 4 groups
is at least 0.85 times twice that of 2 with every seed (the factor of `tfscale tune groups`).
"""

_images, _patches_per_image, _epochs, _warmup, _decay = 64, 8, 12, 2, 9


def _distance(epochs):
    """Mean D at the target rate: after the warm-up, before the decay."""
    own = [e["model_distance"] for e in epochs[_warmup:_decay] if "model_distance" in e]
    return sum(own) / len(own) if own else None


TITLE = f"Local SGD: a small EDSR, {_images * _patches_per_image} patches of Phantom, 12 epochs"
SHOWS = f"""
[L] table II: EDSR on DIV2K, batches of 16 in each group, parameters averaged every 4 steps, the
rate of 1e-4 times the square root of the number of groups, 1200 epochs. Published: 34.35 dB with
one group, 34.39 with 2, 34.10 with 4. Here EDSR with 4 blocks of 8 filters restores {_images}
pictures of Phantom, {_patches_per_image} patches each, for {_epochs} epochs, validated on four
pictures; the rate of 1e-3 for one group has {_warmup} epochs of warm-up and decays to a tenth after
{_decay}. One rank is one group. "In step": the gradients of as large a batch are summed in every
step. D is [L] eq. 9, the mean of the last averages of epochs {_warmup + 1} to {_decay}.
"""
RECIPE = "edsr"
FLAGS = {
    "data": "phantom",
    "images": _images,
    "patches_per_image": _patches_per_image,
    "validation_images": 4,
    "blocks": 4,
    "filters": 8,
    "epochs": _epochs,
    "schedule": "constant",
    "learning_rate": 1e-3,  # for a batch of 16
    "scaling": "sqrt",
    "warmup_epochs": _warmup,
    "decay_epochs": str(_decay),
    "interval": 4,
}
CONFIGURATIONS = {
    "1 group": {"ranks": 1, "batch_size": 16},
    "2 groups": {"ranks": 2, "groups": 2, "batch_size": 32},
    "4 groups": {"ranks": 4, "groups": 4, "batch_size": 64},
    "64 in step": {"ranks": 1, "batch_size": 64},
}
SERIES = {
    "local SGD": {1: "1 group", 2: "2 groups", 4: "4 groups"},
    "in step": {1: "1 group", 4: "64 in step"},
}
X_LABEL = "G: groups, or batches of 16 in step"
SEEDS = (1, 2, 3)
METRIC = "val_psnr"
COLUMNS = {"D": _distance}
