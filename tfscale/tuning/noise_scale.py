"""The gradient noise scale: the batch size at which noise and signal of a gradient are equal."""

from __future__ import annotations

import math


def noise_scale(small_square: float, small: float, large_square: float, large: float) -> float:
    """Estimate tr(Sigma) / |G|^2 from the norms of gradients over two batch sizes.

    E|g_B|^2 = |G|^2 + tr(Sigma) / B, so two batch sizes give two equations. Take means over many
    steps for the squares: the ratio of two noisy numbers is biased.

    Args:
        small_square: Mean of |g|^2 over batches of `small` samples.
        small: Samples.
        large_square: The same over batches of `large` samples.
        large: Samples, more than `small`.

    Returns:
        The noise scale in samples: 0 where the norms show no noise, infinity where they show
        nothing but noise, NaN where they are not finite.

    Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018), appendix A.1.
    """
    signal = (large * large_square - small * small_square) / (large - small)
    noise = (small_square - large_square) / (1.0 / small - 1.0 / large)
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise <= 0:
        return 0.0
    return noise / signal if signal > 0 else math.inf
