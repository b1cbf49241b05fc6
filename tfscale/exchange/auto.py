"""The planner's exchange: what is sent how follows from a plan instead of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfscale.backends.base import Group
from tfscale.errors import ConfigError
from tfscale.exchange.allreduce import Allreduce
from tfscale.exchange.base import GradientOptions
from tfscale.plan.machines import Machine, find_machine


@dataclass(frozen=True)
class Auto:
    """Plans the exchange from the times of the first steps of a `fit`.

    Ten steps exchange each layer alone and measure when gradients exist and how long an exchange
    takes; `tfscale.plan` then chooses buckets and which dense layers gather activations and errors.
    Plain allreduce and the plan are both timed for some steps. All ranks agree on every decision,
    and every step is synchronous SGD whatever is being tried.

    Outside of `fit`, and until it has begun, this is `Allreduce()`.

    Attributes:
        machine: None measures; a `Machine`, the name of a preset or a file of `tfscale tune links`
            gives the links, and the layers' times where it has those of the model.
        global_batch: Samples of all ranks together; None takes that of `GlobalBatches`. Without it
            dense layers send their weight gradients.
        replan: Go back to plain allreduce where the plan is measured to be slower.
    """

    machine: Machine | str | None = None
    global_batch: int | None = None
    replan: bool = True

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
        """Return what is known so far."""
        return "Nothing is planned yet: `fit` measures its first steps, then chooses.\n"
