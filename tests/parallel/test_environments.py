"""Jobs that begin in another way than usual: a locale, settings that differ, some ranks only."""

import subprocess
import textwrap

import pytest

from tests.helpers.launching import launch_script

LIMIT_S = 90  # starting TensorFlow on a loaded machine takes most of it
pytestmark = pytest.mark.timeout(LIMIT_S + 30)
COMMA = """\
LC_NUMERIC
decimal_point ","
thousands_sep ""
grouping -1
END LC_NUMERIC
"""


def launch(size, code, environ=None):
    return launch_script(size, textwrap.dedent(code), LIMIT_S, environ)


def test_a_decimal_comma_changes_no_factor(tmp_path):
    """Of a locale that is made here."""
    others = ("CTYPE", "COLLATE", "TIME", "MONETARY", "MESSAGES")
    copied = "".join(f'LC_{name}\ncopy "POSIX"\nEND LC_{name}\n' for name in others)
    (tmp_path / "comma").write_text(COMMA + copied)
    command = ["localedef", "-c", "-i", "./comma", "-f", "UTF-8", str(tmp_path / "comma.UTF-8")]
    subprocess.run(command, cwd=tmp_path, capture_output=True)  # its status: 1 after any warning
    # Not in CI, which installs it; others may test without this package.
    if not (tmp_path / "comma.UTF-8" / "LC_NUMERIC").exists():
        pytest.skip("localedef needs the character maps of Debian's package `locales`")
    script = """
        import locale
        import numpy as np
        import tensorflow as tf
        import tfscale, tfscale.keras as hvd
        locale.setlocale(locale.LC_NUMERIC, "")
        assert locale.localeconv()["decimal_point"] == ","
        hvd.init()
        mean = hvd.allreduce(tf.constant([1.0, 4.0]) * (hvd.rank() + 1), prescale_factor=0.5)
        np.testing.assert_array_equal(mean, [0.75, 3.0])
        """
    result = launch(2, script, {"LOCPATH": str(tmp_path), "LC_ALL": "comma.UTF-8"})
    assert result.exit_code == 0, result.output


def test_variables_on_several_devices():
    script = """
        import tempfile
        import keras
        import numpy as np
        import tensorflow as tf
        import tfscale
        cpu = tf.config.list_physical_devices("CPU")[0]
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, two)
        tfscale.init()
        from tfscale.callbacks import CommunicationReport, Synchronize

        def train(exchange=None, **options):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((6,))
            hidden = keras.layers.Dense(8, "tanh")(inputs)
            with tf.device("CPU:1"):
                hidden = keras.layers.Dense(16, "tanh")(hidden)
            model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
            rule = keras.optimizers.Adam(0.01)
            if exchange is None:
                model.compile(rule, "mse")
                model.fit(x, x[:, :3], batch_size=24, shuffle=False, epochs=2, verbose=0)
            else:
                rule = tfscale.DistributedOptimizer(rule, exchange=exchange, **options)
                model.compile(rule, "mse")
                data = tfscale.data.GlobalBatches(x, x[:, :3], batch_size=24, shuffle=False)
                callbacks = [Synchronize(), CommunicationReport(folder)]
                model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
            return model.get_weights()

        keras.config.set_floatx("float64")
        folder = tfscale.broadcast_object(tempfile.mkdtemp(), 0)
        x = np.random.default_rng(0).normal(size=(48, 6))
        alone = train()
        for exchange in ("allreduce", "chunked", "sharded", tfscale.Sharded(dense="partial")):
            for own, whole in zip(train(exchange), alone, strict=True):
                np.testing.assert_allclose(own, whole, rtol=0, atol=1e-10)
        train("allreduce", compression=tfscale.Compression.int8)
        train("sharded", compression=tfscale.Compression.int8)
        train(tfscale.LocalSGD(2, 2))
        train(tfscale.LocalSGD(2, 2, fragments=2, overlap=1, merge=0.5))
        print("ENDED", flush=True)
        """
    result = launch(2, script)
    assert result.exit_code == 0, result.output
    assert result.output.count("ENDED") == 2


def test_messages_of_other_lengths_on_one_rank_are_refused_on_all():
    script = """
        import os
        if os.environ["PMI_RANK"] == "1":
            os.environ["TFSCALE_CHUNK_BYTES"] = "123456"
        import tfscale
        try:
            tfscale.init()
        except tfscale.ExchangeError as error:
            print(f"REFUSED {error}", flush=True)
        """
    result = launch(2, script)
    assert (
        result.output.count("REFUSED ranks run different versions, or have different settings.")
        == 2
    )
    assert "chunks of 123456" in result.output, result.output


# Ranks, what they call, and the sum of the ranks of those that take part.
SETS = {
    "some ranks": (
        3,
        """
        if world.rank == 1:
            raise SystemExit
        tfscale.init(comm=[2, 0])
        assert (tfscale.size(), tfscale.rank()) == (2, world.rank // 2)
        """,
        "0 + 2",
    ),
    "a communicator": (
        4,
        """
        tfscale.init(comm=world.Split(world.rank % 2))
        assert (tfscale.size(), tfscale.rank()) == (2, world.rank // 2)
        """,
        "2 + 2 * (world.rank % 2)",
    ),
    "process sets": (
        3,
        """
        own = tfscale.ProcessSet(world.Split(world.rank % 2))
        tfscale.init(process_sets=[own, [0, 1]])
        total = tfscale.allreduce(1.0, op=tfscale.Sum, process_set=own)
        assert own.included() and float(total) == len(own.ranks) == 2 - tfscale.rank() % 2
        tfscale.shutdown()
        pair = tfscale.ProcessSet([0, 2])
        tfscale.init(process_sets=[pair, [0, 1]])
        assert pair.included() == (tfscale.rank() != 1)
        if pair.included():
            assert float(tfscale.allreduce(1.0, op=tfscale.Sum, process_set=pair)) == 2
        """,
        "0 + 1 + 2",
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_who_takes_part(name):
    size, code, expected = SETS[name]
    # MPI starts only together: on all ranks.
    begin = "import tfscale\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
    end = (
        "total = tfscale.allreduce(float(world.rank), op=tfscale.Sum)\n"
        f"assert float(total) == {expected}, total\n"
        "print('DONE', flush=True)\n"
    )
    result = launch_script(size, begin + textwrap.dedent(code) + end, LIMIT_S)
    n_done = size - (name == "some ranks")
    assert (result.exit_code, result.output.count("DONE")) == (0, n_done), result.output


def test_a_rank_that_is_not_named_is_told():
    result = launch(2, "import tfscale\nfrom mpi4py import MPI\ntfscale.init(comm=[0])\n")
    assert result.exit_code not in (0, None)
    text = "comm must hold the rank that calls init. Received: comm=[0] on rank 1"
    assert text in result.output


ORDERS = {
    "mpi4py first": "from mpi4py import MPI\nimport tfscale\ntfscale.init()\n",
    "tfscale first": "import tfscale\ntfscale.init()\nfrom mpi4py import MPI\n",
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_process_has_one_mpi_whether_mpi4py_or_tfscale_comes_first(order):
    check = """
        from tfscale.native import mpi_library
        (path,) = mpi_library._mapped()
        assert mpi_library.locate().path == path
        assert MPI.COMM_WORLD.rank == tfscale.rank() and MPI.COMM_WORLD.size == tfscale.size() == 2
        assert float(tfscale.allreduce(1.0, op=tfscale.Sum)) == 2
        print('DONE', flush=True)
    """
    result = launch_script(2, ORDERS[order] + textwrap.dedent(check), LIMIT_S)
    assert (result.exit_code, result.output.count("DONE")) == (0, 2), result.output
