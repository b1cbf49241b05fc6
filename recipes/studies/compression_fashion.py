"""Accuracy of ResNet-8 with gradients of 8 bits, 4 bits and low rank, paired with float32."""

_images, _epochs, _start = 9600, 4, 40
_steps = _images // 128 * _epochs
_share = round(100 * (1 - _start / _steps))

TITLE = f"Compression: ResNet-8 on {_images} pictures of Fashion-MNIST, {_epochs} epochs"
SHOWS = f"""
What is lost in accuracy by sending fewer bits. Shrunk alike for all: ResNet-8 instead of ResNet-20,
{_images} of 60000 pictures, {_epochs} epochs, {_steps} steps of 128 on two ranks; tested with all
10000 pictures. With one seed all configurations begin with the same weights and see the same
pictures in the same order. 8 bits are used from the first step, 4 bits and factors of rank 4 from
step {_start}, so for {_share} % of the steps: by default they begin later, after more steps than
there are here. Only int8 is held to the limits; int4 and low_rank show what they cost.
"""
RECIPE = "resnet"
RANKS = 2
FLAGS = {"data": "fashion_mnist", "images": _images, "depth": 8, "epochs": _epochs}
CONFIGURATIONS = {
    "none": {"compression": "none"},
    "int8": {"compression": "int8"},
    "int4": {"compression": f"int4:start_step={_start}"},
    "low_rank": {"compression": f"low_rank:start_step={_start}"},
}
SEEDS = tuple(range(1, 11))
METRIC = "val_accuracy"
MAY_LOSE = (0.2, 0.5)
