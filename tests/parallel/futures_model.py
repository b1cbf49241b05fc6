"""A model whose parameters are gathered by hand: what the cases about futures share."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.optimizer import futures
from tfscale.plan.buckets import GradientSpec
from tfscale.plan.segments import SegmentedBucket, build_segments
from tfscale.testing import inspect, require_close, require_identical

X = np.arange(24).reshape(4, 6) % 11
Y = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
DELAY_S = 0.1


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(11, 4),
            layers.Flatten(),
            layers.Dense(5, activation="tanh"),
            layers.Dense(3),
        ]
    )
    model.compile("sgd", loss="mse", metrics=["mae"])
    return model


class Posts:
    """Gathers of variables, one per bucket, in which each rank has its own pieces only."""

    gather = "post_gather"

    def __init__(self, variables: list[Any], bucket_bytes: int = 150) -> None:
        self.variables = variables
        self.base = [np.array(v.numpy()) for v in variables]
        specs = [GradientSpec(v.path, tuple(v.shape), v.dtype) for v in variables]
        self.layouts = build_segments(specs, tfscale.size(), bucket_bytes)
        self.run = tf.function(self.post)

    def expected(self, step: int) -> list[np.ndarray]:
        return [(base + step).astype(base.dtype) for base in self.base]

    def post(self, step: Any) -> None:
        for layout in self.layouts:
            self.post_one(layout, step)

    def post_one(self, layout: SegmentedBucket, step: Any) -> None:
        pieces = []
        for piece in layout.pieces(tfscale.rank()):
            flat = tf.constant(self.base[piece.variable].reshape(-1)[piece.start : piece.stop])
            pieces.append(flat + tf.cast(step, flat.dtype))
        own = [self.variables[i] for i in layout.indices]
        gather = getattr(inspect.backend(), self.gather)
        gather(pieces, own, layout, inspect.call(own[0].path))

    def post_late(self, step: int, late: int, delay_s: float = DELAY_S) -> None:
        """Post on all ranks; on rank `late` a while after the others have found theirs pending."""
        argument = tf.constant(step, tf.float32)
        if tfscale.rank() == late:
            tfscale.barrier()
            time.sleep(delay_s)
            self.run(argument)
            return
        self.run(argument)
        assert inspect.pending_gathers() == len(self.variables)
        tfscale.barrier()


class Subject:
    """The model, its gathers, and an ordinary model that shows what reads must give."""

    def __init__(self, before: Callable[[keras.Model], Any] | None = None) -> None:
        self.model, self.twin = build(), build()
        if before is not None:
            before(self.model)
        self.assigned: list[str] = []
        self.names = futures.attach(
            self.model,
            self.model.trainable_variables,
            lambda variable, *_: self.assigned.append(variable.path),
        )
        self.posts = Posts(self.model.trainable_variables)
        self.step = 0

    def check(self, name: str, read: Callable[[keras.Model], Any]) -> None:
        """Read the model while gathers are pending; compare with the ordinary model."""
        begin = time.monotonic()
        read(self.model)
        # A read that traces or writes files takes as long: it is to begin before the values come.
        delay_s = 0.05 + 2 * (time.monotonic() - begin)
        self.step += 1
        self.twin.set_weights(self.posts.expected(self.step))
        self.posts.post_late(self.step, self.step % tfscale.size(), delay_s)
        found = read(self.model)
        futures.drain(self.model.variables)
        require_close(flatten(found), flatten(read(self.twin)), rtol=1e-6, atol=1e-6, message=name)
        require_identical(
            self.posts.variables, self.posts.expected(self.step), message=f"after {name}"
        )


def flatten(values: Any) -> list[np.ndarray]:
    """Return arrays; variables are not read again."""
    return [np.array(value) for value in tf.nest.flatten(values)]
