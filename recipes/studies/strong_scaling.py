"""[T] figures 5.7 and 5.8: the same training on more and more ranks."""

TITLE = "Strong scaling: EDSR-16 on Phantom"
SHOWS = """
The same training, batch by batch, on more ranks: the epoch speedup is what is computed faster,
and the total speedup should equal it, because the ranks together see the batches of one process.
[T] figure 5.8: 5.64 times on 16 nodes with a batch of 16, 42.96 times on 128 nodes with batches
that grow to 128. Give every rank cores of its own, or this measures how ranks take turns.
"""
RECIPE = "edsr"
FLAGS = {"data": "phantom", "images": 400, "filters": 32, "batch_size": 32, "epochs": 6}
CONFIGURATIONS = {
    "1 process": {"ranks": 1},
    "2 ranks": {"ranks": 2},
    "4 ranks": {"ranks": 4},
    "8 ranks": {"ranks": 8},
    "8 ranks, sharded": {"ranks": 8, "exchange": "sharded"},
}
SERIES = {"allreduce": {1: "1 process", 2: "2 ranks", 4: "4 ranks", 8: "8 ranks"}}
X_LABEL = "Ranks"
SEEDS = (1,)
METRIC = "val_psnr"
THRESHOLD = ("val_psnr", 35.0)
