"""Clicks made on the spot, with the schema of Criteo's data: 13 numbers and 26 categories.

Ids follow a Zipf distribution of exponent 1.05, the most frequent first, as in a vocabulary. Each
id has a weight of its own; the sum of an example's weights, and of some numbers, is the logit of a
click. So only a model that learns a row for each frequent id predicts clicks.
"""

import numpy as np

NUMBERS, CATEGORIES = 13, 26
_EXPONENT = 1.05


def load(count: int, ids: int, seed: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Make examples.

    Args:
        count: Number of examples.
        ids: Number of ids of each category.
        seed: The examples depend on it; the weights of ids do not.

    Returns:
        Numbers of shape (count, 13) in float32 and ids of shape (count, 26) in int64; and clicks of
        shape (count, 1), 0.0 or 1.0.
    """
    random = np.random.default_rng([seed, count])
    numbers = random.normal(size=(count, NUMBERS)).astype(np.float32)
    # Of a continuous distribution, rounded down.
    least = ids ** (1 - _EXPONENT)
    drawn = ((least - 1) * random.random((count, CATEGORIES)) + 1) ** (1 / (1 - _EXPONENT))
    categories = np.minimum(drawn.astype(np.int64), ids) - 1
    logits = numbers[:, :4].sum(axis=1) / 2
    for column in range(CATEGORIES):
        weights = np.random.default_rng([7, column]).normal(size=min(ids, 1 << 16))
        logits += weights[categories[:, column] % len(weights)] / 2
    clicks = random.random(count) < 1 / (1 + np.exp(-logits))
    return [numbers, categories], clicks.astype(np.float32)[:, np.newaxis]
