"""One epoch of each recipe on real data with its defaults, apart from the number of pictures."""

TITLE = "One epoch of each recipe with its defaults"
SHOWS = """
Each recipe trains one epoch on real data as its defaults say (batch, rate, schedule, decay), so
that defaults that do not train are seen. Fewer pictures where an epoch takes more than a minute;
VGG-A and small VGG take Fashion-MNIST in place of ImageNet, EDSR-16 takes Phantom. Accuracies after
one epoch of few pictures say nothing about the models.
"""
RECIPE = "lenet"
FLAGS = {"epochs": 1}
CONFIGURATIONS = {
    "lenet, MNIST": {},
    "mlp, MNIST": {"recipe": "mlp"},
    "resnet (20), 6400 pictures of Fashion-MNIST": {"recipe": "resnet", "images": 6400},
    "vgg small, Fashion-MNIST": {
        "recipe": "vgg", "data": "fashion_mnist", "model": "small", "dense": "512"
    },
    "vgg a, 2048 pictures of Fashion-MNIST": {
        "recipe": "vgg", "data": "fashion_mnist", "images": 2048, "test_images": 1000
    },
    "edsr, 40 pictures of Phantom": {"recipe": "edsr", "images": 40, "validation_images": 2},
}  # fmt: skip
SEEDS = (1,)
METRIC = "val_loss"
COLUMNS = {
    "loss": lambda epochs: epochs[-1]["loss"],
    "val_accuracy": lambda epochs: epochs[-1].get("val_accuracy"),
    "val_psnr": lambda epochs: epochs[-1].get("val_psnr"),
}
