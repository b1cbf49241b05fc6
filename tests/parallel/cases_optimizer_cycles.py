"""backward_passes_per_step, local variables and process sets: exact values.

Horovod's tests of gradient aggregation, of local variables and of PartialDistributedOptimizer ask
for the same.
"""

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.cases import sizes
from tfscale import DistributedOptimizer, PartialDistributedOptimizer
from tfscale.testing import require_equal_ranks

SGD = keras.optimizers.SGD
ROWS = 6


def rank_mean():
    return (tfscale.size() - 1) / 2


def new_variables():
    return [
        keras.Variable(np.zeros((2,)), dtype="float64", name="dense"),
        keras.Variable(np.zeros((ROWS, 2)), dtype="float64", name="table"),
    ]


def own_gradients(batch):
    """Dense: batch + rank. Sparse: row 0 gets the batch's number twice, row rank + 1 gets 1."""
    rank = tfscale.rank()
    number = tf.cast(batch, tf.float64)
    values = tf.stack([number * tf.ones([2], tf.float64)] * 2 + [tf.ones([2], tf.float64)])
    sparse = tf.IndexedSlices(values, tf.constant([0, 0, rank + 1]), tf.constant([ROWS, 2]))
    return [tf.fill([2], number + rank), sparse]


def sparse_mean(total):
    """Mean over ranks of the sparse gradients of some batches whose numbers add up to total."""
    expected = np.zeros((ROWS, 2))
    expected[0] = 2.0 * total[0]
    expected[1 : tfscale.size() + 1] = total[1] / tfscale.size()
    return expected


def runs(optimizer, variables, batches, is_traced):
    def step(batch):
        optimizer.apply(own_gradients(batch), variables)

    step = tf.function(step) if is_traced else step
    for batch in range(batches):
        step(tf.constant(batch))
        yield batch


def check_cycles(passes, is_mean, is_traced=True, sparse_as_dense=False):
    variables = new_variables()
    optimizer = DistributedOptimizer(
        SGD(1.0),
        backward_passes_per_step=passes,
        average_aggregated_gradients=is_mean,
        sparse_as_dense=sparse_as_dense,
    )
    for batch in runs(optimizer, variables, 3 * passes + 1, is_traced):
        n_applied = (batch + 1) // passes * passes
        total = n_applied * (n_applied - 1) / 2  # of the batches' numbers
        scale = 1 / passes if is_mean else 1.0
        dense = -scale * (total + n_applied * rank_mean())
        np.testing.assert_allclose(variables[0].numpy(), [dense] * 2, rtol=1e-13)
        expected = -scale * sparse_mean((total, n_applied))
        np.testing.assert_allclose(variables[1].numpy(), expected, rtol=1e-13)
        assert int(optimizer.iterations.numpy()) == batch + 1


def case_aggregation_is_exact():
    for passes, is_mean in ((2, False), (2, True), (3, False), (1, True)):
        check_cycles(passes, is_mean)
    check_cycles(3, True, sparse_as_dense=True)
    check_cycles(2, True, is_traced=False)


def check_infinity(is_traced):
    rank, weight = tfscale.rank(), keras.Variable(np.zeros(2), dtype="float64", name="weight")
    optimizer = DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)

    def step(value):
        optimizer.apply([tf.fill([2], tf.cast(value, tf.float64))], [weight])

    step = tf.function(step) if is_traced else step
    for value in (np.inf if rank == 0 else 1.0, 1.0):
        step(tf.constant(value))
    assert np.isinf(weight.numpy()).all()  # on all ranks
    weight.assign(np.zeros(2))
    for value in (1.0 + rank, 2.0 + rank):
        step(tf.constant(value))
    np.testing.assert_array_equal(weight.numpy(), [-3.0 - 2 * rank_mean()] * 2)


def case_infinity_of_one_cycle_is_gone_in_the_next():
    for is_traced in (True, False):
        check_infinity(is_traced)


def case_local_variables():
    """Their gradients stay this rank's own, divided by size if asked for."""
    rank = tfscale.rank()
    for passes, is_scaled, is_traced in ((1, True, True), (1, False, False), (2, True, True)):
        variables = new_variables()
        optimizer = DistributedOptimizer(
            SGD(1.0), backward_passes_per_step=passes, scale_local_gradients=is_scaled
        )
        optimizer.register_local_var(variables[1])
        assert [optimizer.is_local_var(v) for v in variables] == [False, True]
        for _ in runs(optimizer, variables, 2, is_traced):
            pass
        np.testing.assert_allclose(variables[0].numpy(), [-1 - 2 * rank_mean()] * 2, rtol=1e-14)
        expected = np.zeros((ROWS, 2))
        expected[0], expected[rank + 1] = -2.0, -2.0
        expected *= 1 / tfscale.size() if is_scaled else 1.0
        np.testing.assert_allclose(variables[1].numpy(), expected, rtol=1e-14)
        assert int(optimizer.iterations.numpy()) == 2


def case_all_variables_local():
    variables = new_variables()
    optimizer = DistributedOptimizer(SGD(1.0), scale_local_gradients=False)
    for variable in variables:
        optimizer.register_local_var(variable)
    for _ in runs(optimizer, variables, 2, True):
        pass
    np.testing.assert_array_equal(variables[0].numpy(), [-1.0 - 2 * tfscale.rank()] * 2)


def case_partial_optimizer():
    """Layers that are local differ after steps on data of each rank; the others are equal."""
    rng = np.random.default_rng(tfscale.rank())
    x, y = rng.normal(size=(12, 2)), rng.normal(size=(12, 3))
    for n_local in (0, 1, 2):
        keras.utils.set_random_seed(5)
        layers = [keras.layers.Dense(3, dtype="float64") for _ in range(3)]
        model = keras.Sequential([keras.Input((2,), dtype="float64"), *layers])
        local = [None, layers[1], layers[1:]][n_local]
        model.compile(PartialDistributedOptimizer(SGD(0.1), local_layers=local), "mse")
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        for layer in layers:
            if layer not in layers[1 : 1 + n_local]:
                require_equal_ranks(layer.weights)
                continue
            first, *others = tfscale.allgather_object(layer.kernel.numpy())
            assert all(np.abs(first - other).max() > 1e-6 for other in others), layer.name


@sizes(2, 3, 4)
def case_infinity_of_a_local_layer_skips_the_step_on_all_ranks():
    """Otherwise the shared variables of one rank would miss a step."""
    variables = [*new_variables()[:1], keras.Variable(np.zeros(2), dtype="float64", name="own")]
    optimizer = DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    )
    optimizer.register_local_var(variables[1])
    optimizer.build(variables)

    @tf.function
    def step(local):
        shared = tf.fill([2], tf.constant(4.0, tf.float64))
        optimizer.apply([shared, tf.fill([2], local)], variables)

    for own, expected in ((np.inf if tfscale.rank() == 1 else 1.0, 0.0), (1.0, -2.0)):
        step(tf.constant(own, tf.float64))
        require_equal_ranks([*variables[:1], *optimizer.variables])
        assert (variables[0].numpy() == expected).all()


def case_process_set_of_even_ranks():
    """Even ranks average among themselves, the others keep their own."""
    rank, everyone = tfscale.rank(), tfscale.global_process_set
    assert everyone.ranks == list(range(tfscale.size())) and everyone.process_set_id == 0
    even = tfscale.add_process_set(everyone.ranks[::2])
    for is_traced in (True, False):
        variables = new_variables()
        optimizer = DistributedOptimizer(SGD(1.0), process_set=even)
        for _ in runs(optimizer, variables, 2, is_traced):
            pass
        mean = np.mean(even.ranks) if rank % 2 == 0 else rank
        np.testing.assert_allclose(variables[0].numpy(), [-1.0 - 2 * mean] * 2, rtol=1e-14)
        own_rows = np.add(even.ranks if rank % 2 == 0 else [rank], 1)
        expected = np.zeros((ROWS, 2))
        expected[0], expected[own_rows] = -2.0, -2.0 / len(own_rows)
        np.testing.assert_allclose(variables[1].numpy(), expected, rtol=1e-14)
