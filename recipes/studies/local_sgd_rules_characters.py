"""`local_sgd_rules` with a transformer that predicts characters. Its rule of decision holds."""

_epochs, _sequences, _batch, _interval, _least = 4, 1600, 16, 8, 4
_steps = _sequences // _batch * _epochs
_rate = 0.005  # the highest

TITLE = (
    f"Intervals of local SGD: a transformer of two layers on {_sequences} sequences of "
    f"characters, {_epochs} epochs"
)
SHOWS = f"""
`local_sgd_rules` for the next character of a text. Shrunk alike for all: two blocks of width 32,
{_sequences} of about 6500 sequences of 64 characters, {_epochs} epochs, {_steps} steps of {_batch},
Adam. The rate rises to {_rate} in the first 5 % of the steps, and falls to 0 on half a cosine. The
rows are those of `local_sgd_rules`, "QSR" with `QuadraticInterval({1.8 * _rate:g}, {_least})`;
"post-local" is in step for {_epochs // 2} epochs. Each group keeps its own moments of Adam.
"""
RECIPE = "characters"
RANKS = 2
FLAGS = {
    "width": 32,
    "sequences": _sequences,
    "epochs": _epochs,
    "batch_size": _batch,
    "scaling": "none",
    "learning_rate": _rate,
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
