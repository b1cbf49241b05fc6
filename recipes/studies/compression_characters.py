"""Accuracy of a transformer with gradients of 8 bits, 4 bits and low rank, paired with float32."""

_epochs, _start = 4, 40
_steps = 102 * _epochs  # of the text in Python 3.11
_share = round(100 * (1 - _start / _steps))

TITLE = f"Compression: a transformer of two layers on characters, {_epochs} epochs"
SHOWS = f"""
What is lost in accuracy by sending fewer bits, as in `compression_fashion`, for the next character
of a text. Shrunk alike for all: two blocks of width 64, {_epochs} epochs, {_steps} steps of 64
sequences of 64 characters on two ranks, Adam. With one seed all configurations begin with the same
weights and see the same sequences in the same order. 8 bits are used from the first step, 4 bits
and factors of rank 4 from step {_start}, so for {_share} % of the steps: by default they begin
later, after more steps than there are here. Embeddings are sparse and sent as they are. Only int8
is held to the limits; int4 and low_rank show what they cost.
"""
RECIPE = "characters"
RANKS = 2
FLAGS = {"epochs": _epochs}
CONFIGURATIONS = {
    "none": {"compression": "none"},
    "int8": {"compression": "int8"},
    "int4": {"compression": f"int4:start_step={_start}"},
    "low_rank": {"compression": f"low_rank:start_step={_start}"},
}
SEEDS = tuple(range(1, 11))
METRIC = "val_accuracy"
MAY_LOSE = (0.2, 0.5)
