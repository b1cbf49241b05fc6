"""What scripts made for Horovod do, and what must not pass in silence."""

import threading

import numpy as np
import tensorflow as tf

import tfscale
import tfscale.keras as hvd
from tests.helpers.ranks import require_error
from tests.helpers.spawn import sizes
from tfscale.comm import runtime, start
from tfscale.comm.software import require_equal, versions


@sizes(2, 3)
def case_the_global_set_knows_its_ranks():
    everyone = hvd.global_process_set
    assert everyone.ranks == list(range(runtime.size()))
    assert everyone.process_set_id == 0


@sizes(1, 2)
def case_process_sets_that_come_later():
    assert start._check_process_sets("Dynamic") is None
    require_error(lambda: start._check_process_sets("static"), "process_sets must be a list")


@sizes(2)
def case_only_the_root_pickles():
    own = {"rate": 0.5} if tfscale.rank() == 0 else threading.Lock()
    assert tfscale.broadcast_object(own, 0) == {"rate": 0.5}


@sizes(1, 2)
def case_sparse_sums_of_integers():
    rank, size = tfscale.rank(), tfscale.size()
    for dtype in (tf.int32, tf.int64):
        values = tf.constant([[2 * (rank + 1)], [4]], dtype)
        slices = tf.IndexedSlices(values, tf.constant([rank, 0]), tf.constant([size, 1]))
        dense = np.zeros((size, 1), int)
        for other in range(size):
            dense[other] += 2 * (other + 1)
            dense[0] += 4
        total = tf.convert_to_tensor(tfscale.allreduce(slices, op=tfscale.Sum))
        np.testing.assert_array_equal(total, dense)
        mean = tf.convert_to_tensor(tfscale.allreduce(slices, op=tfscale.Average))
        assert mean.dtype == dtype and int(mean[0, 0]) <= int(dense[0, 0])


@sizes(2)
def case_rows_that_no_split_names_are_refused():
    """Known when the function runs only: the number of rows was unknown as it was traced."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def exchange(x):
        return tfscale.alltoall(x)

    rows = np.asarray(exchange(tf.fill([6, 4], float(tfscale.rank()))))
    np.testing.assert_array_equal(rows[:, 0], [0, 0, 0, 1, 1, 1])
    try:
        exchange(tf.zeros([7, 4]))
    except (tfscale.ExchangeError, tf.errors.OpError, ValueError) as error:
        assert "splits" in str(error), error
    else:
        raise AssertionError("a row is lost")


@sizes(2)
def case_versions_are_compared():
    require_equal(tfscale.allgather_object(versions()))
    require_error(lambda: require_equal(["a", "a", "b"]), "a on rank 0 and b on rank 2")
