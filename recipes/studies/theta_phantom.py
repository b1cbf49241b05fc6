"""[T] figure 5.6: does theta of EDSR on Phantom peak, and when, with fixed batches?"""

_batches = (16, 32, 64, 128)

TITLE = "Theta with fixed batches: EDSR-16 on Phantom"
SHOWS = """
Theta is recorded every 20 updates while nothing but the batch differs; Adam's rate of 1e-4 for a
batch of 16 follows the batch linearly ([T] table 5.2). [T] figure 5.6: theta peaks in epochs 55 to
65 for a batch of 32. EDSR-16 has 32 filters here, and there are 400 pictures instead of 1600.
"""
RECIPE = "edsr"
FLAGS = {
    "data": "phantom",
    "images": 400,
    "filters": 32,
    "epochs": 100,
    "schedule": "constant",
    "learning_rate": 1e-4,
    "theta_every": 20,
}
CONFIGURATIONS = {f"batch {n}": {"batch_size": n} for n in _batches}
SERIES = {"fixed batch": {n: f"batch {n}" for n in _batches}}
X_LABEL = "Samples of a batch"
SEEDS = (1, 2, 3)
METRIC = "val_psnr"
COLUMNS = {"theta is largest at update": lambda epochs: epochs[-1]["theta_peak_update"]}
