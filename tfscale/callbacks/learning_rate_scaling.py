"""The learning rate that a large batch gets from a small one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfscale.callbacks.learning_rate import LearningRateScheduleCallback
from tfscale.config import ConfigError

RULES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


class LearningRateScaling(LearningRateScheduleCallback):
    """Scale a small batch's learning rate to a fixed large batch, with a gradual warm-up.

    The target is `initial_lr * batch_size / base_batch_size` ("linear") or `initial_lr` times the
    root of that ("sqrt"). In batch b of epoch e of the warm-up the rate is
    `initial_lr + (target - initial_lr) * (e + b / steps) / warmup_epochs`; under
    `steps_per_execution` it changes once per execution. It does not depend on the number of ranks.

    Collective: all ranks must pass it to `fit`, with the same arguments.

    Args:
        initial_lr: Learning rate that suits a batch of `base_batch_size`.
        base_batch_size: Samples over all ranks.
        batch_size: Samples over all ranks of this run.
        rule: "linear", "sqrt" or "none".
        warmup_epochs: Length of the warm-up in epochs; 0 for none.
        decay_epochs: Epochs, counted from 0, from which on the rate is multiplied by 0.1 once more.

    Raises:
        ConfigError: An argument is out of its range; or as `LearningRateScheduleCallback`.

    Source: Goyal et al., Accurate, Large Minibatch SGD (2017), sections 2.1 and 2.2; root scaling:
        Hoffer et al., Train longer, generalize better (2017).
    """

    def __init__(
        self,
        initial_lr: float,
        base_batch_size: int,
        batch_size: int,
        rule: str = "linear",
        warmup_epochs: int = 5,
        decay_epochs: Sequence[int] = (),
    ) -> None:
        if rule not in RULES or warmup_epochs < 0 or base_batch_size < 1 or batch_size < 1:
            raise ConfigError(
                "rule must be 'linear', 'sqrt' or 'none', batch sizes at least 1 and "
                f"warmup_epochs at least 0. Received: rule={rule!r}, batch_size={batch_size}, "
                f"base_batch_size={base_batch_size}, warmup_epochs={warmup_epochs}."
            )
        target = RULES[rule](batch_size / base_batch_size)

        def multiplier(epoch: float) -> float:
            if epoch < warmup_epochs:
                return 1.0 + (target - 1.0) * epoch / warmup_epochs
            return target * math.prod(0.1 for begin in decay_epochs if begin <= epoch)

        super().__init__(initial_lr, multiplier, staircase=False)
