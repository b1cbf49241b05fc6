"""The planner's exchange: what is sent how follows from a plan instead of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.base import GradientOptions
from tfscale.plan.machines import Machine, find_machine


@dataclass(frozen=True)
class Auto:
    """Plans the exchange from the times of the first steps of a `fit`.

    Twenty steps exchange each layer alone and measure when gradients exist, how long an exchange
    takes, and what computing and messages take from each other; `tfscale.plan` then chooses for
    each parameter among allreduced and sharded buckets and dense layers that gather activations
    and errors. Plain allreduce and the best plans are timed for some steps each, and the fastest
    is kept. All ranks agree on every decision, and every step is synchronous SGD whatever is being
    tried.

    Until it has decided, and where nobody calls the optimizer's `after_step` (`fit` does, given a
    tfscale callback), this is `Allreduce()`.

    Attributes:
        machine: None measures; a `Machine`, the name of a preset or a file of `tfscale tune links`
            gives the links, and the layers' times where it has those of the model.
        global_batch: Samples of all ranks together; None takes that of `GlobalBatches`. Without it
            dense layers send their weight gradients.
        replan: Go back to plain allreduce where all that was tried is measured to be slower.
    """

    machine: Machine | str | None = None
    global_batch: int | None = None
    replan: bool = True

    outcome = None  # the strategies that follow have one

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: An option does not fit.
        """
        if self.global_batch is not None and not self.global_batch > 0:
            raise ConfigError(
                "global_batch must be 1 or more, or None. "
                f"Received: global_batch={self.global_batch!r}."
            )
        self.read_machine()

    def read_machine(self) -> Machine | None:
        """Return the machine that was named, if any.

        Raises:
            ConfigError: There is none of that name.
        """
        if self.machine is None or isinstance(self.machine, Machine):
            return self.machine
        try:
            return find_machine(self.machine)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def exchange(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        group: Group,
        options: GradientOptions,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return the reduced gradients, in order: those of `Allreduce`."""
        return Allreduce().exchange(gradients, variables, group, options)

    def explain(self) -> str:
        """Return what is known so far; the strategies that follow have a table."""
        return "Nothing is planned yet: `fit` measures its first steps, then chooses.\n"
