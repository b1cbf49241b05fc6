"""A network for clicks: rows of categories, their products with each other, and dense layers."""

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers, ops


def dlrm(
    table: layers.Layer,
    ids: int,
    width: int,
    numbers: int = 13,
    categories: int = 26,
    bottom: Sequence[int] = (64,),
    top: Sequence[int] = (64, 32),
) -> keras.Model:
    """Build the network.

    Args:
        table: An embedding of `categories * ids` rows of `width` values.
        ids: Number of ids of each category.
        width: Values of a row.
        numbers: Number of numbers of an example.
        categories: Number of ids of an example.
        bottom: Units of the dense layers on the numbers, before one of `width` units.
        top: Units of the dense layers on the products.

    Returns:
        A model from numbers and ids to the logit of a click, of shape (batch, 1).

    Source: Naumov et al., "Deep learning recommendation model", 2019, figure 1.
    """
    inputs = [
        keras.Input((numbers,), name="numbers"),
        keras.Input((categories,), dtype="int64", name="ids"),
    ]
    x = inputs[0]
    for units in (*bottom, width):
        x = layers.Dense(units, "relu")(x)
    # The ids of all categories are those of one table.
    rows = table(ops.add(inputs[1], np.arange(categories) * ids))
    vectors = layers.Concatenate(axis=1)([layers.Reshape((1, width))(x), rows])
    n = categories + 1
    pairs = [i * n + j for i in range(n) for j in range(i + 1, n)]
    products = layers.Reshape((n * n,))(layers.Dot(axes=2)([vectors, vectors]))
    x = layers.Concatenate()([x, ops.take(products, pairs, axis=1)])
    for units in top:
        x = layers.Dense(units, "relu")(x)
    return keras.Model(inputs, layers.Dense(1, name="logit")(x), name="dlrm")
