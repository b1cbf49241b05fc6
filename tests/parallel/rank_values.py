"""Values and gradients that cases of collectives share."""

import numpy as np
import tensorflow as tf

from tests.helpers.ranks import in_both_modes


def ramp(length):
    return np.arange(length) % 50


def plain(tensor):
    return tf.cast(tensor, tf.float64).numpy()


def rank_sum(size):
    """0 + 1 + ... + (size - 1)."""
    return size * (size - 1) // 2


def gradients(loss_of, x):
    """Yield the gradient of a loss, eager and traced."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x)
        return tape.gradient(loss, x)

    return in_both_modes(gradient, x)
