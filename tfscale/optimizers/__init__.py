"""Update rules that Keras lacks."""

from tfscale.optimizers.lars import LARS

__all__ = ["LARS"]
