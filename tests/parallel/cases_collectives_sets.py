"""Objects, variables, process sets and join."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.cases import engine_only, sizes
from tests.helpers.ranks import in_both_modes, outcome, require_error
from tfscale import Average, Max, Sum
from tfscale.testing import inspect, require_equal_ranks

rank, size = tfscale.rank(), tfscale.size()  # only ranks import this


def case_objects_of_any_size():
    own = {"rank": rank, "data": list(range(1000 * rank)), None: (1.5, b"x")}
    every = tfscale.allgather_object(own)
    assert [o["rank"] for o in every] == list(range(size))
    assert [len(o["data"]) for o in every] == [1000 * r for r in range(size)]
    for root in range(size):
        received = tfscale.broadcast_object(own if rank == root else None, root_rank=root)
        assert received == every[root]
    require_error(lambda: tfscale.broadcast_object(1, root_rank=size), "ConfigError: root_rank")


def case_variables_take_the_values_of_the_root():
    for root in {0, size - 1}:
        variables = [
            keras.Variable(np.full((2, 3), rank + 1.0), dtype="float64", name="kernel"),
            tf.Variable(rank, dtype=tf.int64),
            tf.Variable([rank % 2 == 0]),
            keras.Variable(np.zeros((0, 2)), name="empty"),
        ]
        tfscale.broadcast_variables(variables, root_rank=root)
        assert (variables[0].numpy() == root + 1).all()
        assert variables[1].numpy() == root and variables[2].numpy()[0] == (root % 2 == 0)
    # As Horovod's: in place, and returned.
    pair = [tf.Variable(np.full(3, rank, dtype)) for dtype in ("float32", "int64")]
    for results in in_both_modes(lambda: tfscale.broadcast_(pair, size - 1)):
        for result, variable in zip(results, pair, strict=True):
            np.testing.assert_array_equal(result, [size - 1] * 3)
            np.testing.assert_array_equal(variable, result)
            variable.assign(result * 0 + rank)


def case_all_variables_of_a_model_take_the_values_of_the_root():
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.Adam(0.1 + rank)), "mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(7 * rank)
    root = size - 1
    kernel = tfscale.allgather_object(model.layers[0].kernel.numpy())[root]
    tfscale.broadcast_global_variables(root, model)
    require_equal_ranks([*model.variables, *model.optimizer.variables])
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), kernel)
    assert int(model.optimizer.iterations.numpy()) == 7 * root
    require_error(lambda: tfscale.broadcast_global_variables(0), "Received: model=None.")


def sum_over(ranks):
    return float(sum(r + 1 for r in ranks))


def case_process_sets_work_side_by_side():
    even = tfscale.add_process_set(list(range(0, size, 2)))
    own_sets = [even]
    if size > 1:
        own_sets.append(tfscale.add_process_set(tfscale.ProcessSet(range(1, size, 2))))
    own = own_sets[rank % 2]
    assert own.included() and own.rank() == rank // 2 and own.size() == len(own.ranks)
    assert all(s.included() == (rank in s.ranks) for s in own_sets)
    value = tf.fill([3], rank + 1.0)
    first, n_own = own.ranks[0], len(own.ranks)
    for result in in_both_modes(lambda x: tfscale.allreduce(x, Sum, process_set=own), value):
        assert (result.numpy() == sum_over(own.ranks)).all()
    for result in in_both_modes(lambda x: tfscale.allgather(x, process_set=own), value):
        np.testing.assert_array_equal(result.numpy(), np.repeat(np.add(own.ranks, 1), 3))
    for result in in_both_modes(lambda x: tfscale.broadcast(x, first, process_set=own), value):
        assert (result.numpy() == first + 1).all()
    long = tf.fill([2 * n_own], float(rank))
    for result in in_both_modes(lambda x: tfscale.alltoall(x, process_set=own), long):
        np.testing.assert_array_equal(result.numpy(), np.repeat(own.ranks, 2))
    for result in in_both_modes(lambda x: tfscale.reducescatter(x, Sum, process_set=own), long):
        assert (result.numpy() == sum(own.ranks)).all()
    assert tfscale.allgather_object(rank, process_set=own) == own.ranks
    assert tfscale.broadcast_object(rank, own.ranks[-1], process_set=own) == own.ranks[-1]
    tfscale.barrier(process_set=own)
    total = tfscale.allreduce(value, Sum)
    assert (total.numpy() == sum_over(range(size))).all()


def case_world_and_set_in_one_function():
    alone = [tfscale.add_process_set([r]) for r in range(size)]
    front = tfscale.add_process_set(list(range(size - 1))) if size > 2 else alone[0]

    @tf.function
    def body(x):
        total = tfscale.allreduce(x, Sum)
        same = tfscale.allreduce(x, Sum, process_set=alone[rank])
        if front.included():
            total += tfscale.allreduce(x, Sum, process_set=front)
        return total + same

    for _ in range(3):
        expected = sum_over(range(size)) + rank + 1
        expected += sum_over(front.ranks) if front.included() else 0.0
        assert body(tf.constant(rank + 1.0)).numpy() == expected


def case_numbers_that_are_read_when_the_graph_runs():
    last = tfscale.add_process_set([size - 1])

    @tf.function
    def numbers():
        of_set = tfscale.process_set_included_op(last.process_set_id)
        of_set = [of_set, tfscale.size_op(last.process_set_id)]
        here = [tfscale.local_rank_op(), tfscale.local_size_op()]
        return tfscale.rank_op(), tfscale.size_op(), *of_set, *here

    expected = [rank, size, int(rank == size - 1), 1, rank, size]
    for _ in range(2):
        assert [int(value) for value in numbers()] == expected


@sizes(2, 3, 4)
def case_outsiders_and_unknown_sets():
    only = tfscale.add_process_set([0])
    message = outcome(lambda: tfscale.allreduce(tf.ones([1]), process_set=only))
    if rank == 0:
        assert message == "no error"
    else:
        assert f"a call on rank {rank}, which is not in [0]" in message, message
        assert "Guard it with process_set.included()" in message
        with contextlib.suppress(tf.errors.InvalidArgumentError):  # as Horovod's
            tfscale.allreduce(tf.ones([1]), process_set=only)
    with pytest.raises(ValueError, match="ranks are a process set already"):
        tfscale.add_process_set([0])
    assert only.rank() == (0 if rank == 0 else -1)
    never = tfscale.ProcessSet([0, 1])
    require_error(lambda: tfscale.allreduce(tf.ones([1]), process_set=never), "must be added")
    require_error(lambda: tfscale.add_process_set(only), "was added before")
    assert tfscale.remove_process_set(only) and not tfscale.remove_process_set(only)
    assert not tfscale.remove_process_set(tfscale.global_process_set)
    require_error(lambda: only.included(), "must be added")
    # Members broadcast by their rank in the job.
    last = size - 1
    pair = tfscale.add_process_set([last, 0])
    assert pair.ranks == [0, last]
    if pair.included():
        received = tfscale.broadcast(tf.constant(rank), last, process_set=pair)
        assert received.numpy() == last
    message = outcome(lambda: tfscale.broadcast(tf.constant(1), last + 1, process_set=pair))
    assert ("root_rank must be" if pair.included() else "needs a member") in message, message


@sizes(2, 3, 4)
def case_calls_after_an_error_that_one_rank_has_caught():
    """The others get an error for the same call; later calls pair up again."""
    is_last, value = rank == size - 1, tf.ones([1])
    for _ in range(2):
        text = outcome(lambda: tfscale.allreduce(value, "Mean" if is_last else Sum))
        assert ("op must be one of" if is_last else "raised an error in it") in text, text
        gathered = tfscale.allgather(tf.constant([rank]))
        np.testing.assert_array_equal(gathered, range(size))
    for send in (
        lambda: tfscale.allgather_object((lambda: 0) if is_last else 0),
        lambda: tfscale.broadcast_object((lambda: 0) if is_last else 0, size - 1),
    ):
        assert f"rank {size - 1} gave an object that is not" in outcome(send)
        np.testing.assert_array_equal(tfscale.allgather(tf.constant([rank])), range(size))
    forget_steps()
    if is_last:
        outcome(lambda: tfscale.allreduce(value, "Mean"))
    else:
        assert "raised an error in it" in outcome(lambda: tfscale.allreduce(value, Sum))
    if rank:
        assert tfscale.allreduce(value, Sum).numpy() == size - 1
    assert tfscale.join() > 0
    assert tfscale.allreduce(value, Sum).numpy() == size


@engine_only("its names are those of traced functions")
@sizes(1, 2)
def case_collectives_in_sessions_of_tensorflow_1():
    """A graph may grow after it has run."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for factor in (1.0, 2.0):
            own = tf.fill([2], factor * (rank + 1))
            total = session.run(tfscale.allreduce(own, Sum))
            np.testing.assert_array_equal(total, [factor * sum_over(range(size))] * 2)


def forget_steps() -> None:
    """Let join be tested in a process that has trained before."""
    inspect.forget_training()


def case_join_with_different_numbers_of_steps():
    """Rank r takes part in r + 1 reductions; the others count as zeros afterwards."""
    forget_steps()
    for step in range(rank + 1):
        active = range(step, size)
        total = tfscale.allreduce(tf.fill([2], rank + 1.0), Sum)
        np.testing.assert_array_equal(total.numpy(), [sum_over(active)] * 2)
        mean = tfscale.allreduce(tf.fill([2], rank + 1.0), Average)
        np.testing.assert_allclose(mean.numpy(), [sum_over(active) / size] * 2, rtol=1e-6)
        whole = tfscale.allreduce(tf.fill([2], 2**30))  # of int32, added up as int64
        np.testing.assert_array_equal(whole.numpy(), [2**30 * (size - step) // size] * 2)
        group = tfscale.grouped_allreduce([tf.ones([1]), tf.ones([2, 2], tf.int64)], Sum)
        assert all((t.numpy() == size - step).all() for t in group)
    assert tfscale.join() == size - 1
    assert tfscale.allreduce(tf.constant(1), Sum).numpy() == size
    for _ in range(size - rank):  # rank 0 is the last
        tfscale.allreduce(tf.ones([1]), Sum)
    assert tfscale.join() == 0


@sizes(2, 3, 4)
def case_what_join_refuses():
    """Zeros would be a wrong answer to all but sums; rank 0 has joined."""
    variable = keras.Variable([1.0], name="weight")
    optimizer = tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1))
    value = tf.ones([1])
    for call, *texts in (
        (
            lambda: tfscale.allgather(value),
            "has joined, so that the others",
            "allgather(float32[])",
        ),
        (
            lambda: tfscale.allreduce(value, Max),
            "with Sum or Average, equal",
            "allreduce(float32[1])",
        ),
        (lambda: optimizer.apply([value], [variable]), "GlobalBatches"),
    ):
        forget_steps()
        require_error(tfscale.join if rank == 0 else call, *texts)
    # After traced steps the others may be in one that this rank cannot see.
    tf.function(lambda: optimizer.apply([value], [variable]))()
    require_error(tfscale.join, "traced steps of a distributed optimizer", "GlobalBatches")
    forget_steps()
    require_error(tf.function(lambda: tfscale.join()), "join() must be called", "GlobalBatches")


@sizes(2)
def case_eager_collectives_belong_on_the_main_thread():
    messages = []

    def body():
        messages.append(outcome(lambda: tfscale.allreduce(tf.ones([1]))))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert "must be called from the main thread" in messages[0]
    assert tfscale.allreduce(tf.ones([1]), Sum).numpy() == size
