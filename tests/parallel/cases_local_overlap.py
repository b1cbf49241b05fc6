"""Averages that training does not wait for: equal to single processes, float64, 1e-10."""

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import require_close, require_equal_ranks
from tests.helpers.spawn import sizes
from tests.parallel.cases_backup import interrupt_and_go_on
from tests.parallel.cases_equality import OPTIMIZERS, float64
from tests.parallel.cases_local_sgd import train
from tests.parallel.local_sgd_reference import STEPS, mean_of, models_for, own_part, samples
from tfscale.callbacks import ModelDistance


class ByHand:
    """Single processes, one for each group, whose models are averaged in NumPy."""

    def __init__(self, make, groups, strategy):
        self.strategy, self.groups = strategy, groups
        self.models = models_for(groups, make)
        own = [m.trainable_variables for m in self.models]
        self.variables = list(zip(*own, strict=True))  # of all groups, by position
        self.common = [keras.Variable(v[0].numpy(), dtype="float64") for v in self.variables]
        self.places = fragments_of(own[0], strategy.fragments)
        self.outers = [self.outer_for(places) for places in self.places]
        self.under_way = {}  # step of the merge and what was sent, by fragment
        self.square, self.distances = np.zeros(groups), []

    def outer_for(self, places):
        given = self.strategy.outer
        if given is not None:
            given = keras.optimizers.SGD.from_config(given.get_config())
            given.build([self.common[i] for i in places])
        return given

    def train(self, n_steps):
        x, y = samples()
        n, interval = len(self.places), self.strategy.interval
        for step in range(n_steps):
            for g, model in enumerate(self.models):
                own = own_part(step % STEPS, g, self.groups)
                model.train_on_batch(x[own], y[own])
            for f, places in enumerate(self.places):
                if self.under_way.get(f, [None])[0] == step:
                    self.merge(f)
                if (step + 1) % interval == f * interval // n:
                    sent = {i: [v.numpy() for v in self.variables[i]] for i in places}
                    self.under_way[f] = step + self.strategy.overlap, sent
                    if self.strategy.overlap == 0:
                        self.merge(f)
        return mean_of([m.trainable_variables for m in self.models])

    def merge(self, f):
        sent = self.under_way.pop(f)[1]
        means = {i: np.mean(values, axis=0) for i, values in sent.items()}
        common = [self.common[i] for i in sent]
        if self.outers[f] is not None:
            changes = [c.value - m for c, m in zip(common, means.values(), strict=True)]
            self.outers[f].apply(changes, common)
        else:
            for variable, mean in zip(common, means.values(), strict=True):
                variable.assign(mean)
        weight = self.strategy.merge
        for i, values in sent.items():
            new = self.common[i].numpy()
            for g, variable in enumerate(self.variables[i]):
                own = variable.numpy()
                added = own + new - values[g]
                variable.assign(added if weight is None else weight * own + (1 - weight) * new)
                self.square[g] += np.sum((means[i] - values[g]) ** 2)
        if f == len(self.places) - 1:
            self.distances.append(np.mean(np.sqrt(self.square)))
            self.square[:] = 0.0


def fragments_of(variables, n):
    """Return the positions of each fragment: a layer joins the one with the fewest values."""
    filled, places = [0] * n, [[] for _ in range(n)]
    for kernel in range(0, len(variables), 2):  # and its bias
        smallest = int(np.argmin(filled))
        filled[smallest] += sum(v.numpy().size for v in variables[kernel : kernel + 2])
        places[smallest] += [kernel, kernel + 1]
    return places


OUTER = keras.optimizers.SGD(0.7, momentum=0.9)
TABLE = (
    # Options of LocalSGD, and the optimizer.
    ({"interval": 3, "overlap": 2}, "momentum"),
    ({"interval": 4, "fragments": 2, "overlap": 1, "within": "allreduce"}, "adam"),
    ({"interval": 4, "fragments": 3, "overlap": 3}, "momentum"),
    ({"interval": 2, "fragments": 2}, "momentum"),
    ({"interval": 3, "overlap": 1, "merge": 0.25, "within": "allreduce"}, "sgd"),
    ({"interval": 4, "fragments": 2, "overlap": 2, "outer": OUTER}, "sgd"),
)


@sizes(2, 3, 4, timeout_s=400)
def case_averages_on_their_way_equal_single_processes():
    groups = 2 if tfscale.size() == 4 else tfscale.size()
    with float64():
        for options, name in TABLE:
            strategy = tfscale.LocalSGD(groups, **options)
            record = ModelDistance()
            model = train(OPTIMIZERS[name], strategy, epochs=2, callbacks=[record])
            by_hand = ByHand(OPTIMIZERS[name], groups, strategy)
            require_close(model.trainable_variables, by_hand.train(2 * STEPS))
            require_equal_ranks(model.trainable_variables)
            found = [distance for _, distance in record.distances]
            assert len(found) >= 3, found
            np.testing.assert_allclose(found, by_hand.distances[: len(found)], rtol=1e-9)


@sizes(2, timeout_s=200)
def case_what_is_on_its_way_survives_an_interruption():
    """Five steps in an epoch: the third epoch begins with averages on their way."""
    options = {"interval": 4, "fragments": 2, "overlap": 3}
    for within in ("allreduce", tfscale.Sharded()):
        interrupt_and_go_on(lambda w=within: tfscale.LocalSGD(2, within=w, **options))
    bf16 = tfscale.Compression.bf16
    interrupt_and_go_on(lambda: tfscale.LocalSGD(2, **options), compression=bf16)


@sizes(2, timeout_s=100)
def case_an_overlap_is_measured_once_and_is_the_same_on_all_ranks():
    """Small averages take less than a step."""
    strategy = tfscale.LocalSGD(2, 5, "allreduce", overlap="auto")
    with float64():
        model = train(OPTIMIZERS["sgd"], strategy, epochs=4)
        average = model.optimizer.group_average
        chosen = tfscale.allgather_object((average.is_measured, int(average.overlap.numpy())))
    assert chosen[0] == chosen[1] and chosen[0][0] and 1 <= chosen[0][1] <= 4, chosen
