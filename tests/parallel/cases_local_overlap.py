"""Averages that training does not wait for: equal to single processes, float64, 1e-10."""

import keras
import numpy as np

import tfscale
from tests.helpers.ranks import require_close, require_equal_ranks
from tests.helpers.spawn import sizes
from tests.parallel.cases_backup import interrupt_and_go_on
from tests.parallel.cases_equality import OPTIMIZERS, float64
from tests.parallel.cases_local_sgd import train
from tests.parallel.local_sgd_reference import STEPS, ByHand
from tfscale.callbacks import ModelDistance

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
