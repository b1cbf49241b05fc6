"""Transformer that predicts the next token at each position."""

import keras
from keras import layers, ops


def transformer(
    tokens: int = 128, length: int = 64, blocks: int = 2, width: int = 64, heads: int = 4
) -> keras.Model:
    """Build a decoder: embeddings, blocks of causal attention and two dense layers, logits.

    Each half of a block is added to its input, which is normalized before ("pre-norm").

    Args:
        tokens: Number of different tokens.
        length: Tokens of a sequence.
        blocks: Attention layers, each followed by two dense layers.
        width: Values per position, a multiple of `heads`; the hidden dense layers have four times
            as many.
        heads: Attention heads.

    Returns:
        A model from integers (batch, length) to logits (batch, length, tokens).

    Source: Vaswani et al., "Attention is all you need", NeurIPS 2017; Radford et al., "Language
        models are unsupervised multitask learners", 2019 (the order of the normalization).
    """
    inputs = keras.Input((length,), dtype="int32", name="tokens")
    positions = ops.cumsum(ops.ones_like(inputs), axis=-1) - 1
    x = layers.Embedding(tokens, width, name="embedding")(inputs)
    x = layers.Add(name="sum")([x, layers.Embedding(length, width, name="position")(positions)])
    for n in range(1, blocks + 1):
        y = layers.LayerNormalization(name=f"norm{n}_1")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"attention{n}")
        x = layers.Add(name=f"add{n}_1")([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"norm{n}_2")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"fc{n}_1")(y)
        x = layers.Add(name=f"add{n}_2")([x, layers.Dense(width, name=f"fc{n}_2")(y)])
    logits = layers.Dense(tokens, name="logits")(layers.LayerNormalization(name="norm")(x))
    return keras.Model(inputs, logits, name="transformer")
