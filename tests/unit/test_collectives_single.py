"""Collectives in one process: inputs come back, with the same types, scaling and errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tests.helpers.launching import launch_script
from tests.helpers.single_job import single_job  # noqa: F401
from tfscale import Average, Compression, Max, Min, Product, Sum
from tfscale.config import ConfigError, ExchangeError
from tfscale.testing import inspect

MODES = pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "traced"])
DTYPES = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)


@MODES
@pytest.mark.parametrize("op", [Average, Sum, Min, Max, Product])
def test_every_reduction_returns_the_tensor(run, op):
    for dtype in DTYPES:
        own = tf.cast([[1, 2], [3, 4]], dtype)
        result = run(lambda x: tfscale.allreduce(x, op=op))(own)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, own)


@MODES
def test_factors_scale(run):
    body = run(lambda x: tfscale.allreduce(x, prescale_factor=0.5, postscale_factor=6.0))
    np.testing.assert_array_equal(body(tf.constant([1.0, 2.0])), [3.0, 6.0])
    part = run(lambda x: tfscale.reducescatter(x, Sum, prescale_factor=0.5))
    np.testing.assert_array_equal(part(tf.constant([1.0, 2.0])), [0.5, 1.0])


@MODES
def test_rows_stay(run):
    own = tf.constant([[1, 2], [3, 4], [5, 6]])
    for collective in (
        tfscale.allgather,
        tfscale.alltoall,
        lambda x: tfscale.reducescatter(x, Sum),
        lambda x: tfscale.broadcast(x, 0),
        lambda x: tfscale.alltoall(x, [3])[0],
        lambda x: tfscale.grouped_allgather([x])[0],
        lambda x: tfscale.grouped_reducescatter([x], Sum)[0],
        lambda x: tfscale.grouped_allreduce([x], Sum)[0],
    ):
        np.testing.assert_array_equal(run(collective)(own), own)
    assert tfscale.alltoall(own, [3])[1].numpy().tolist() == [3]
    assert tfscale.allgather(tf.zeros([0, 2])).shape == (0, 2)
    for scalar in (3, True):
        assert tfscale.allgather(tf.constant(scalar)).numpy().tolist() == [scalar]
        assert tfscale.broadcast(tf.constant(scalar), 0).numpy() == scalar


def test_sparse():
    own = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 2, 0]), tf.constant([4, 2]))
    expected = [[2, 2], [0, 0], [1, 1], [0, 0]]
    for options in ({}, {"sparse_as_dense": True}, {"op": Sum}):
        result = tf.convert_to_tensor(tfscale.allreduce(own, **options))
        np.testing.assert_array_equal(result, expected)


def test_compression_rounds_as_on_several_ranks():
    own = tf.constant([1.0 + 2.0**-10])
    assert tfscale.allreduce(own, compression=Compression.bf16).numpy() == 1.0
    assert tfscale.allreduce(own, compression=Compression.fp16).numpy() == own.numpy()


@MODES
def test_gradients(run):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tfscale.allreduce(x * x, postscale_factor=2.0)
            z = tfscale.allgather(x) + tfscale.broadcast(x, 0) + tfscale.alltoall(x)
            loss = tf.reduce_sum(y) + tf.reduce_sum(z) + tf.reduce_sum(tfscale.reducescatter(x))
        return tape.gradient(loss, x)

    np.testing.assert_array_equal(run(gradient)(tf.constant([1.0, 3.0])), [8.0, 16.0])


def test_objects_variables_barrier_and_join():
    thing, variable = {"a": [1, 2]}, tf.Variable([1.0])
    assert tfscale.broadcast_object(thing) is thing
    assert tfscale.allgather_object(thing) == [thing]
    tfscale.broadcast_variables([variable])
    assert variable.numpy() == 1.0
    tfscale.barrier()
    assert tfscale.join() == 0


ALONE = """
import keras, numpy as np, tfscale, tfscale.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
data = tfscale.data.GlobalBatches(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(data, verbose=0, callbacks=[start, hvd.callbacks.MetricAverageCallback()])
loaded = open("/proc/self/maps").read()
print([name for name in ("libtfscale", "libmpi") if name in loaded])
"""


@pytest.mark.timeout(150)
def test_one_process_loads_neither_mpi_nor_the_engine():
    result = launch_script(0, ALONE, timeout_s=120)
    assert result.exit_code == 0 and result.output.rstrip().endswith("[]"), result.output


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tfscale.allreduce(tf.constant([True])), "dtype=bool"),
        (lambda: tfscale.allreduce(tf.constant(["a"])), "dtype=string"),
        (lambda: tfscale.allreduce(tf.zeros(1, tf.uint16)), "dtype=uint16"),
        (lambda: tfscale.allreduce(tf.ones(1), op="mean"), "op must"),
        (lambda: tfscale.broadcast(tf.ones(1), 1), "root_rank must"),
        (lambda: tfscale.broadcast(tf.ones(1), -1), "root_rank=-1"),
        (lambda: tfscale.broadcast_object(1, 1), "root_rank must"),
        (lambda: tfscale.broadcast_variables([], -1), "root_rank must"),
        (lambda: tfscale.reducescatter(tf.constant([True])), "dtype=bool"),
        (lambda: tfscale.reducescatter(tf.constant(1.0)), "rank 1 or more"),
        (lambda: tfscale.alltoall(tf.ones(2), [1]), "the 2 rows"),
        (lambda: tfscale.alltoall(tf.ones(2), [1, 1]), "each of the 1 ranks"),
        (lambda: tfscale.alltoall(tf.ones(2), [2.0]), "splits must"),
        (lambda: tfscale.alltoall(tf.ones(2), 2), "splits must"),
        (lambda: tfscale.ProcessSet([]), "ranks must be distinct"),
        (lambda: tfscale.ProcessSet([-1]), r"ranks=\[-1\]"),
        (lambda: tfscale.add_process_set([0, 1]), r"in \[0, 1\)"),
        (lambda: tfscale.broadcast_global_variables(0), "Pass model="),
    ],
)
def test_errors(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_process_set_of_the_only_rank():
    own = tfscale.add_process_set([0])
    assert own.included() and own.size() == 1 and own.rank() == 0
    np.testing.assert_array_equal(tfscale.allreduce(tf.ones(2), Sum, process_set=own), [1.0, 1.0])
    assert tfscale.remove_process_set(own)
    with pytest.raises(ExchangeError, match="process_set must be added before it is used"):
        own.size()


def test_nothing_works_before_init():
    tfscale.shutdown()
    assert not tfscale.is_initialized()
    reduce = lambda: tfscale.allreduce(tf.ones(1))  # noqa: E731
    for call in (tfscale.rank, tfscale.size, tfscale.local_rank, tfscale.cross_size, reduce):
        with pytest.raises(ExchangeError, match=r"Call tfscale.init\(\)"):
            call()


@pytest.mark.parametrize(
    ("rank", "versions", "n_told"),
    [
        (0, ("2.22.0-rc0", "3.15.1"), 1),
        (0, ("2.21.0", "3.16.0"), 1),
        (1, ("2.23.0", "3.17.0"), 0),
        (0, ("2.18.1", "3.10.0"), 0),
    ],
)
def test_untested_versions_are_named_once_on_rank_0(monkeypatch, caplog, rank, versions, n_told):
    for package, version in zip((tf, keras), versions, strict=True):
        monkeypatch.setattr(package, "__version__", version)
    monkeypatch.setattr("tfscale.comm.runtime.rank", lambda: rank)
    for _ in range(2):
        tfscale.shutdown()
        tfscale.init()
    told = [text for text in caplog.messages if "was tested with" in text]
    expected = (
        "tfscale was tested with TensorFlow 2.18 to 2.21 and Keras 3.10 to 3.15. Received: "
        f"TensorFlow {versions[0]} and Keras {versions[1]}. If something fails: pip install "
        "'tensorflow<2.22' 'keras<3.16'."
    )
    assert told == [expected] * n_told


def test_init_of_one_process():
    tfscale.init()  # again: does nothing
    assert (tfscale.rank(), tfscale.local_rank(), tfscale.cross_rank()) == (0, 0, 0)
    assert (tfscale.size(), tfscale.local_size(), tfscale.cross_size()) == (1, 1, 1)
    assert inspect.backend_name() == "single"
    tfscale.shutdown()
    tfscale.shutdown()
    process_set = tfscale.ProcessSet([0])
    tfscale.init(process_sets=[process_set])
    assert process_set.included()
    tfscale.shutdown()
    tfscale.init(process_sets="Dynamic")
    tfscale.shutdown()
    for wrong in ({"backend": "mpi"}, {"process_sets": "static"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            tfscale.init(**wrong)
