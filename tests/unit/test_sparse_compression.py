"""Options and bytes of sparse averages, and the digest that compares averages."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfscale import Compression
from tfscale.config import ConfigError
from tfscale.local_sgd.reports import digest_of


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"share": 0.0}, "share must be in \\(0, 1\\]. Received: share=0.0"),
        ({"share": 1.5}, "share must be in"),
        ({"bits": 4}, "bits must be 2: a sign and one of two levels. Received: bits=4"),
        ({"chunk": 4097}, "chunk must be 1 to 4096, for positions of 12 bits"),
        ({"chunk": 0}, "chunk must be 1 to 4096"),
        ({"decay": 0.0}, "decay must be in"),
        ({"decay": 1.1}, "decay must be in"),
        ({"start_step": 3}, "Compression.sparse takes share, bits, chunk, decay"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(ConfigError, match=text):
        Compression.sparse(**options)


def test_bytes_of_resnet_50_are_the_published_share():
    """64 values of 14 bits of 4096, and two scales: 0.71 MB, within 3 %, of 102."""
    n_bytes = Compression.sparse.n_bytes(25_557_032)
    assert abs(n_bytes / 0.71e6 - 1) < 0.03
    assert Compression.sparse.n_bytes(4096) == 4 + 64 * 14 // 8
    # A short chunk sends its share, rounded up: here 2 values, of 3 bytes and one.
    assert Compression.sparse.n_bytes(4096 + 100) == 116 + 8
    assert Compression.sparse.n_bytes(0) == 0


def test_variables_below_1024_values_are_sent_whole():
    sparse = Compression.sparse
    shapes = ((1023,), (31, 33), (1024,), (2, 512), ())
    assert [sparse.fits(shape, "float32") for shape in shapes] == [False, False, True, True, False]
    assert not sparse.fits((2048,), "bfloat16")
    with pytest.raises(ConfigError, match="Compression.sparse is for float32"):
        sparse.fits((2048,), "float64")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_digest_depends_on_every_bit_and_place(dtype):
    values = np.random.default_rng(1).normal(size=1000)
    first = tf.cast(values, dtype)
    digest = int(digest_of(first))
    assert digest == int(digest_of(tf.reshape(first, [10, 100])))
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[first.dtype.size]
    found = {digest}
    for place in (0, 500, 999):
        changed = np.array(first.numpy())
        changed.view(bits)[place] ^= 1
        found.add(int(digest_of(tf.constant(changed))))
    found.add(int(digest_of(tf.reverse(first, [0]))))
    assert len(found) == 5
    assert math.prod(first.shape) == 1000
