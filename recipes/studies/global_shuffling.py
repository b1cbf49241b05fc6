"""[F], "Speedup": does shuffling inside of fixed shares of the data cost convergence?"""

TITLE = "Global shuffling against fixed shards"
SHOWS = """
[F] gives each process a fixed share of the training data, shuffles inside the share only, and
suspects this where its parallel training improves less per epoch than the sequential one. Here
LeNet-5 learns 10000 pictures of Fashion-MNIST in global batches of 64: shuffled over all data
(`GlobalBatches`, on one process and on two ranks), in fixed shares of the data as it comes, and
in shares of data sorted by class. The ranks exchange gradients, or train on their own and average
their parameters after each epoch.
"""
RECIPE = "lenet"
RANKS = 2
FLAGS = {
    "data": "fashion_mnist",
    "images": 10000,
    "test_images": 2000,
    "batch_size": 64,
    "learning_rate": 0.005,
    "epochs": 10,
    "patience": 0,
}
CONFIGURATIONS = {
    "1 process": {"ranks": 1},
    "gradients, global": {},
    "gradients, shards": {"shuffle": "shards"},
    "gradients, sorted shards": {"shuffle": "sorted_shards"},
    "averaging, global": {"average_every": 1},
    "averaging, shards": {"average_every": 1, "shuffle": "shards"},
    "averaging, sorted shards": {"average_every": 1, "shuffle": "sorted_shards"},
}
SEEDS = (1, 2, 3)
METRIC = "val_accuracy"
THRESHOLD = ("val_loss", 0.6)
