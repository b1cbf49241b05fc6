"""What the steps of a tf.data.Dataset say of it: whether it ends, and in which order it comes."""

from __future__ import annotations

import tensorflow as tf

from tfscale.config import ConfigError


def never_ends(dataset: tf.data.Dataset) -> bool:
    """Tell whether nothing but steps like filter(), flat_map() or unbatch() follow on a repeat().

    TensorFlow does not know the length of those.
    """
    while dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        inputs = dataset._inputs()
        if len(inputs) != 1 or "Take" in type(dataset).__name__:
            return False
        dataset = inputs[0]
    return bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)


def seeds_of_order(dataset: tf.data.Dataset) -> list[tuple[int, int]]:
    """Return the seeds of the steps that shuffle or draw; ranks of one order have equal ones.

    TensorFlow's global seed, which users set per rank, is one of each pair.

    Raises:
        ConfigError: A step draws another order on each rank, or in each pass.
    """
    seeds, steps = [], [dataset]
    while steps:
        step = steps.pop()
        steps.extend(step._inputs())
        name = type(step).__name__
        if not any(word in name for word in ("Shuffle", "Random")) or not hasattr(step, "_seed"):
            continue
        own = int(step._seed), int(step._seed2)
        is_renewed = getattr(step, "_reshuffle_each_iteration", "Shuffle" in name) is not False
        if own == (0, 0) or is_renewed or getattr(step, "_rerandomize", False):
            raise ConfigError(
                "dataset must give the same order on all ranks and in each pass. Received: a "
                f"{name} that draws another one. Remove shuffle(), use "
                "list_files(..., shuffle=False), and let GlobalBatches shuffle: shuffle_buffer=. "
                "To split data, use shuffle(n, seed=1, reshuffle_each_iteration=False)."
            )
        seeds.append(own)
    return seeds
