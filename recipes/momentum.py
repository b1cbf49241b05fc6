"""Momentum of the recipes that train with SGD: plain, or LARS, which sets a rate for each layer."""

from typing import Any

import keras
from absl import flags

import tfscale

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    "optimizer", "sgd", ["sgd", "lars"],
    "lars: the step of each layer is in proportion to its weights; choose --learning-rate for it.",
)  # fmt: skip
_MOMENTUM = 0.9


def optimizer(
    rate: Any, *, nesterov: bool = False, weight_decay: float = 0.0, undecayed: tuple[str, ...] = ()
) -> keras.optimizers.Optimizer:
    """Return SGD or LARS, as --optimizer says.

    Args:
        rate: A number or a schedule.
        nesterov: Of SGD; LARS has none.
        weight_decay: Of Keras, outside of the momentum. LARS has it inside, where as much decays
            with `1 - momentum` of it.
        undecayed: What names of variables contain that do not decay; LARS spares all of one
            dimension.
    """
    if FLAGS.optimizer == "lars":
        decay = weight_decay * (1 - _MOMENTUM)
        return tfscale.LARS(rate, momentum=_MOMENTUM, weight_decay=decay)
    sgd = keras.optimizers.SGD(
        rate, momentum=_MOMENTUM, nesterov=nesterov, weight_decay=weight_decay or None
    )
    if undecayed:
        sgd.exclude_from_weight_decay(var_names=list(undecayed))
    return sgd
