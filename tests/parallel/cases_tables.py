"""Tables whose rows are spread over the ranks train as in one process: float64, 1e-10."""

import keras

from tests.helpers.cases import sizes
from tests.helpers.equality import OPTIMIZERS
from tests.helpers.tables import check

RULES = {**OPTIMIZERS, "adagrad": lambda: keras.optimizers.Adagrad(0.05)}


@sizes(1, 2, 3, 4, timeout_s=300)
def case_every_rule():
    for make in RULES.values():
        check(make)


@sizes(1, 2, 3, 4, timeout_s=300)
def case_repeated_indices_as_keras():
    for make in RULES.values():
        check(make, repeated_indices="keras")
