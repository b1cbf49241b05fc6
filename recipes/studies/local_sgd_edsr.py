"""[L] table II: local SGD of EDSR on DIV2K, the rate by the square root of the groups."""

TITLE = "Local SGD: EDSR on DIV2K"
SHOWS = """
[L] table II: EDSR on DIV2K, batches of 16 in each group, parameters averaged every 4 steps, the
rate of 1e-4 times the square root of the number of groups. Published: 34.35 dB with one group,
34.39 with 2, 34.10 with 4, 33.89 with 8, 30.95 with 16. One rank is one group here.
"""
RECIPE = "edsr"
FLAGS = {
    "data": "div2k",
    "scale": 2,
    "blocks": 32,
    "filters": 256,
    "epochs": 1000,
    "schedule": "constant",
    "learning_rate": 1e-4,
    "scaling": "sqrt",
    "warmup_epochs": 5,
    "interval": 4,
    "patience": 50,
}
CONFIGURATIONS = {
    "1 group": {"ranks": 1, "batch_size": 16},
    "2 groups": {"ranks": 2, "groups": 2, "batch_size": 32},
    "4 groups": {"ranks": 4, "groups": 4, "batch_size": 64},
    "8 groups": {"ranks": 8, "groups": 8, "batch_size": 128},
    "16 groups": {"ranks": 16, "groups": 16, "batch_size": 256},
}
SEEDS = (1,)
METRIC = "val_psnr"
THRESHOLD = ("val_psnr", 33.5)
