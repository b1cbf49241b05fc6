"""Intervals and few values of local SGD for slow links, paired with training in step (VGG).

Rule of decision, written before the runs. Points of `val_accuracy` after the last epoch that a row
loses against "in step", paired by seed; one-sided confidence of 95 % by Student's t:

* "harmless": a mean of at most 0.2 points, and an upper bound of at most 0.5 (`MAY_LOSE`);
* "gains x" is said only if the upper bound of the loss is below 0;
* else "costs x": x is the mean, and the bound is told beside it.

All pairs that are complete when the machine time ends count, at most ten. No run is left out.
"""

_epochs, _images, _batch, _interval, _least = 8, 4000, 64, 8, 4
_steps = _images // _batch * _epochs
_rate = 0.015  # the highest

TITLE = (
    f"Intervals of local SGD: a VGG of 0.1 million parameters on {_images} pictures of "
    f"Fashion-MNIST, {_epochs} epochs"
)
SHOWS = f"""
What local SGD for slow links loses or gains. Shrunk alike for all: a VGG with convolutions of 16,
32 and 64 filters and dense layers of 128, without dropout and batch normalization, {_images} of
60000 pictures, {_epochs} epochs, {_steps} steps of {_batch}; tested with 5000 pictures. The rate
rises to {_rate} in the first 5 % of the steps, and falls to 0 on half a cosine. Two ranks are two
groups, each with half of every batch, so all rows see the same pictures in the same order and begin
with the same weights; "in step" is one process, which sums the gradients of the whole batch.
"interval {_interval}" averages parameters every {_interval} steps. "QSR" is
`QuadraticInterval({1.8 * _rate:g}, {_least})`: from {_least} steps on, about as many averages in
all. "post-local" trains in step for the first half of the epochs, at whose end the rate is half of
the highest, then every {_interval} steps. "sparse" averages every 30 steps with
`Compression.sparse`, and merges 10 steps later.
"""
RECIPE = "vgg"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "images": _images,
    "test_images": 5000,
    "model": "tiny",
    "dense": "128",
    "dropout": 0.0,
    "epochs": _epochs,
    "batch_size": _batch,
    "learning_rate": 4 * _rate,  # for a batch of 256
}
_local = {"groups": 2, "interval": _interval}
CONFIGURATIONS = {
    "in step": {"ranks": 1},
    "interval 8": _local,
    "QSR": {"groups": 2, "interval": f"quadratic:alpha={1.8 * _rate:.6g},minimum={_least}"},
    "post-local": {**_local, "local_start": _epochs // 2},
    "sparse, interval 30": {"groups": 2, "interval": 30, "overlap": 10, "compression": "sparse"},
}
SEEDS = tuple(range(1, 11))
METRIC = "val_accuracy"
MAY_LOSE = (0.2, 0.5)
