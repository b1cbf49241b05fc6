"""What a gather brings: any layout and type, and the memory it lies in."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.helpers.ranks import in_both_modes
from tests.helpers.spawn import sizes
from tests.parallel.futures_model import Posts, Subject
from tfscale.comm import runtime
from tfscale.comm.backends.base import Backend, Call, Reduction
from tfscale.optimizer import futures
from tfscale.plan.segments import SegmentedBucket

ENGINE_ONLY = "nothing is posted past the end of a step"

SHAPES = ((), (1,), (0,), (7,), (16,), (17,), (0, 3), (3, 5, 7), (1001,))
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


def variables_of(dtype: str, shapes=SHAPES) -> list[keras.Variable]:
    """Return variables with values that fit into any type."""
    random = np.random.default_rng(3)
    arrays = [random.integers(0, 50, shape) for shape in shapes]
    return [keras.Variable(tf.cast(a, dtype), dtype=dtype, name="v") for a in arrays]


def require(posts: Posts, step: int) -> None:
    for v, value in zip(posts.variables, posts.expected(step), strict=True):
        assert v.numpy().dtype == value.dtype
        np.testing.assert_array_equal(v.numpy(), value)


@sizes(1, 2, 3, 4, timeout_s=120)
def case_types_and_sizes():
    """As this backend gathers, and as one that waits, such as Horovod's."""
    for dtype in DTYPES:
        for bucket_bytes in (0, 300, 1 << 20):
            posts = Posts(variables_of(dtype), bucket_bytes)
            futures.make_futures(posts.variables)
            for step, posts.gather in ((1, "post_gather"), (3, "gather_and_assign")):
                posts.post(step)
                require(posts, step)
                posts.run = tf.function(posts.post)
                posts.run(tf.constant(step + 1.0))
                require(posts, step + 1)


def cuts_of(length: int, size: int) -> list[list[int]]:
    """Return ways to cut a buffer: everything to one rank, or in the middle of variables."""
    ends = [0] * (size + 1)
    cuts = [[*ends[:-1], length], [0] + [length] * size]
    random = np.random.default_rng(5)
    cuts += [[0, *sorted(random.integers(0, length + 1, size - 1)), length] for _ in range(6)]
    return [[int(c) for c in cut] for cut in cuts]


@sizes(1, 2, 3, 4)
def case_any_cuts():
    posts = Posts(variables_of("float32"), 1 << 20)
    futures.make_futures(posts.variables)
    (layout,) = posts.layouts
    for step, cuts in enumerate(cuts_of(layout.length, tfscale.size())):
        posts.layouts = (dataclasses.replace(layout, cuts=tuple(cuts)),)
        posts.post(step)
        require(posts, step)


@sizes(1, 2, 3, 4, timeout_s=120)
def case_scatter_reduce():
    """Borders between tensors and between ranks have nothing to do with each other."""
    rank, size = tfscale.rank(), tfscale.size()
    shapes = ((3, 5), (), (0,), (7,), (1000,))
    total = 15 + 1 + 7 + 1000
    even = [total * (r + 1) // size - total * r // size for r in range(size)]
    for dtype in ("float32", "float64", "int32"):
        every = [
            [np.random.default_rng(r).integers(-9, 9, s).astype(dtype) for s in shapes]
            for r in range(size)
        ]
        flat = sum(np.concatenate([a.ravel() for a in own]) for own in every) * 2
        for counts in (even, [total] + [0] * (size - 1), [0] * (size - 1) + [total]):
            expected = flat[sum(counts[:rank]) : sum(counts[: rank + 1])]

            def reduce(backend, dtype=dtype, own=every[rank], counts=counts):
                call = Call(runtime.world(), "gradients")
                tensors = [tf.constant(a, dtype) for a in own]
                return backend.scatter_reduce(tensors, counts, call, Reduction(prescale=2.0))

            for result in in_both_modes(lambda: reduce(runtime.backend())):
                np.testing.assert_array_equal(result, expected)

            class Waiting(Backend):
                allreduce = runtime.backend().allreduce

            for result in in_both_modes(lambda: reduce(Waiting())):
                np.testing.assert_array_equal(result, expected)


def address_of(variable) -> int:
    tensor = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)
    # A view: TensorFlow 2.18 has no __dlpack__.
    return np.frombuffer(memoryview(tensor), np.float32).__array_interface__["data"][0]


@sizes(2)
def case_buffers_are_used_again():
    """And what somebody still reads is left alone."""
    posts = Posts([keras.Variable(np.ones([100, 100], "float32")) for _ in range(2)], 1 << 20)
    futures.make_futures(posts.variables)
    addresses = set()
    for step in range(12):
        posts.run(tf.constant(float(step)))
        addresses.add(address_of(posts.variables[0]))
        require(posts, step)
    assert len(addresses) <= 3, addresses
    kept = []
    for step in range(6):
        posts.run(tf.constant(float(step)))
        kept.append([tf.identity(v.value) for v in posts.variables])
    for step, values in enumerate(kept):
        for value in values:
            np.testing.assert_array_equal(value, 1 + step)


@sizes(2, 3)
def case_in_place_updates_of_gathered_variables():
    """A slice of a shared buffer is never written in place."""
    subject = Subject()
    posts = subject.posts
    for step in (1, 2, 3):
        posts.run(tf.constant(float(step)))
        for v in posts.variables:
            v.value.assign_add(tf.ones(v.shape))
        rows = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([2]))
        subject.model.layers[0].embeddings.value.scatter_add(rows)
        for v, value in zip(posts.variables, posts.expected(step), strict=True):
            changed = value + 1
            if v is subject.model.layers[0].embeddings:
                changed[2] += 1
            np.testing.assert_array_equal(v.numpy(), changed)


@sizes(2, 3)
def case_the_wrong_layout_is_refused():
    posts = Posts(variables_of("float32"), 1 << 20)
    futures.make_futures(posts.variables)
    (layout,) = posts.layouts
    wrong: dict[str, SegmentedBucket] = {
        "multiples of 64 bytes": dataclasses.replace(
            layout, offsets=tuple(o + 1 for o in layout.offsets), length=layout.length + 64
        ),
        "variables lie in the buffer": dataclasses.replace(
            layout, offsets=tuple(o + layout.length for o in layout.offsets)
        ),
        "one cut more than ranks": dataclasses.replace(layout, cuts=(0, layout.length, 0, 0, 0, 0)),
    }
    for text, bad in wrong.items():
        try:
            own = [tf.zeros([p.count]) for p in layout.pieces(tfscale.rank())]
            call = Call(runtime.world(), "wrong")
            runtime.backend().post_gather(own, posts.variables, bad, call)
        except tf.errors.InvalidArgumentError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no error: {text}")
    posts.post(1)
    require(posts, 1)
