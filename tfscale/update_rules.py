"""What Keras's update rules need to see of a variable."""

from __future__ import annotations

from typing import Any

import keras

from tfscale.optimizers.lars import LARS

_rules = keras.optimizers
# The update of a value depends on that value's gradient and state alone.
ELEMENTWISE = (
    _rules.SGD,
    _rules.RMSprop,
    _rules.Adam,
    _rules.AdamW,
    _rules.Adadelta,
    _rules.Adagrad,
    _rules.Adamax,
    _rules.Nadam,
    _rules.Ftrl,
    _rules.Lion,
)
# The update needs all of a variable, but of no other.
LAYERWISE = (LARS, _rules.Lamb, _rules.Adafactor, _rules.Muon)


def why_whole(rule: Any) -> str:
    """Return why an update rule cannot work on parts of the parameters, or an empty string."""
    if type(rule) in ELEMENTWISE + LAYERWISE:
        return ""
    return f"it is not known whether {type(rule).__name__} can update parts of them"


def why_uncut(rule: Any, variable: Any) -> str:
    """Return why one rank must own all of a variable, or an empty string."""
    if type(rule) in LAYERWISE:
        return f"{type(rule).__name__} needs whole kernels"
    return "" if variable.constraint is None else "a constraint needs the whole kernel"
