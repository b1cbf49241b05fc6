"""The systems that exchange gradients in the measured steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from benchmarks.cells import parse_local
from benchmarks.multi_worker import MultiWorker
from benchmarks.workloads import Workload

MOST_STEPS = 300  # until "auto" has decided

Reduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]


class TracedStep:
    """A training step that can be traced again."""

    def __init__(self, body: Callable[[], tf.Tensor]) -> None:
        self._body = body
        self.trace()

    def trace(self) -> None:
        """Trace the step when it is called next."""
        self._run = tf.function(self._body)

    def __call__(self) -> np.ndarray:
        """Run the step; return its loss."""
        return self._run().numpy()


@dataclass(frozen=True)
class Case:
    """Model and batch to train."""

    workload: Workload
    model: keras.Model


class System(Protocol):
    """One way to train on several ranks; made before TensorFlow does anything."""

    rank: int
    size: int

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer, and what exchanges gradients before it is called."""

    def settle(self, step: TracedStep) -> None:
        """Run steps until the system stays as it is; those that are measured follow."""

    def facts(self) -> dict[str, Any]:
        """Return what belongs into the results besides durations."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def end(self) -> None:
        """End the system."""


class Compute:
    """No exchange at all; ranks start together, and MPI is silent afterwards."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer, and what exchanges gradients before it is called."""
        return optimizer, lambda gradients: gradients

    def settle(self, step: TracedStep) -> None:
        """Do nothing."""

    def facts(self) -> dict[str, Any]:
        """Return nothing more."""
        return {}

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def end(self) -> None:
        """End the system."""


class Tfscale:
    """tfscale's optimizer with one of its exchanges.

    "-bf16", "-int8" or "-int4" after its name compresses; "-fit" at the end trains in `fit`.
    """

    def __init__(self, exchange: str) -> None:
        import tfscale

        tfscale.init()
        self.tfscale = tfscale
        wires = {
            "bf16": tfscale.Compression.bf16,
            "int8": tfscale.Compression.int8,
            "int4": tfscale.Compression.int4(start_step=0),
            "sparse": tfscale.Compression.sparse,
        }
        self.in_fit = exchange.endswith("-fit")
        exchange = exchange.removesuffix("-fit")
        name, _, wire = exchange.rpartition("-")
        self.exchange = name if wire in wires else exchange
        self.compression = wires.get(wire, tfscale.Compression.none)
        self.rank, self.size = tfscale.rank(), tfscale.size()

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer, which exchanges by itself."""
        wrapped = self.optimizer(optimizer, case)
        case.model.compile(optimizer=wrapped, loss="mse")  # the loss is the step's own
        self.tfscale.prepare(case.model, batch_size=case.workload.global_batch)
        return wrapped, lambda gradients: gradients

    def optimizer(self, optimizer: keras.optimizers.Optimizer, case: Case) -> Any:
        """Return the wrapped optimizer."""
        self._optimizer = self.tfscale.DistributedOptimizer(
            optimizer, exchange=self._strategy(case), compression=self.compression
        )
        return self._optimizer

    def _strategy(self, case: Case) -> Any:
        """Return what the name of the exchange stands for."""
        half = sum(bool(x.trainable_weights) for x in case.model._flatten_layers()) // 2
        named = {
            "allreduce-waiting": lambda: self.tfscale.Allreduce(overlap=False),
            "chunked": lambda: self.tfscale.Chunked(max(1, half), "auto"),
            "chunked-per-layer": lambda: self.tfscale.Chunked(1, chunks="per_layer"),
            "sharded": lambda: self.tfscale.Sharded(),
            "sharded-weights": lambda: self.tfscale.Sharded(dense="weights"),
            "sharded-partial": lambda: self.tfscale.Sharded(dense="partial"),
            "sharded-waiting": lambda: self.tfscale.Sharded(overlap_forward=False),
            "sharded-replicated": lambda: self.tfscale.Sharded(dense="replicated"),
            "auto": lambda: self.tfscale.Auto(),
        }
        local = parse_local(self.exchange, self.size)
        if local:
            within = named.get(local.within, lambda: local.within)()
            return self.tfscale.LocalSGD(
                local.groups, local.interval, within, overlap=local.overlap
            )
        return named.get(self.exchange, lambda: self.exchange)()

    def settle(self, step: TracedStep) -> None:
        """Let "auto" measure, plan and decide."""
        for _ in range(MOST_STEPS if self.exchange == "auto" and self.size > 1 else 0):
            step()
            if self.tfscale.after_step(self._optimizer):
                step.trace()
            if getattr(self._optimizer.strategy, "outcome", None) is not None:
                step()
                return

    def facts(self) -> dict[str, Any]:
        """Return what "auto" decided, in seconds per step."""
        outcome = getattr(self._optimizer.strategy, "outcome", None)
        if outcome is None:
            return {}
        return {
            "plan": outcome.plan,
            "predicted_s": outcome.predicted_s,
            "tried_s": outcome.measured_s,
            "allreduce_predicted_s": outcome.plain_predicted_s,
            "allreduce_tried_s": outcome.plain_measured_s,
            "explanation": outcome.explanation,
        }

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.tfscale.barrier()

    def end(self) -> None:
        """End the system."""
        self.tfscale.shutdown()


class InStep(Tfscale):
    """Computing where ranks wait for each other in each step, but send a single number."""

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer, and a sum of one number that needs all gradients."""

        def reduce(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            numbers = [tf.reshape(gradient, [-1])[0] for gradient in gradients]
            with tf.control_dependencies([self.tfscale.allreduce(tf.add_n(numbers))]):
                return [tf.identity(gradient) for gradient in gradients]

        return optimizer, reduce

    def facts(self) -> dict[str, Any]:
        """Return nothing more."""
        return {}


class Horovod:
    """Horovod's TensorFlow ops in a step of one's own, as it has no optimizer for Keras 3."""

    def __init__(self) -> None:
        import horovod.tensorflow as hvd

        hvd.init()
        self.hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer and an allreduce per gradient, which Horovod fuses."""

        def reduce(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            average = self.hvd.Average
            return [
                self.hvd.allreduce(gradient, op=average, name=f"gradient{i}")
                for i, gradient in enumerate(gradients)
            ]

        return optimizer, reduce

    def settle(self, step: TracedStep) -> None:
        """Do nothing."""

    def facts(self) -> dict[str, Any]:
        """Return nothing more."""
        return {}

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.hvd.allreduce(tf.zeros(1), name="barrier")

    def end(self) -> None:
        """End the system."""
        self.hvd.shutdown()


class Mpi(Compute):
    """MPI's own allreduce of each gradient, called through mpi4py."""

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer and an allreduce per gradient."""

        def mean(gradient: np.ndarray) -> np.ndarray:
            received = np.empty_like(gradient)
            self.comm.Allreduce(gradient, received)
            received /= self.size
            return received

        def reduce(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
            # One after the other, in the same order on all ranks.
            reduced: list[tf.Tensor] = []
            for gradient in gradients:
                with tf.control_dependencies(reduced[-1:]):
                    reduced.append(tf.numpy_function(mean, [gradient], gradient.dtype))
                reduced[-1].set_shape(gradient.shape)
            return reduced

        return optimizer, reduce


def start(system: str) -> System:
    """Initialise "compute", "mpi", "horovod", "mwms", or "tfscale-" with an exchange's name.

    "one-core" and "both-cores" compute, too; "in-step" computes, and exchanges one number.
    """
    made: dict[str, Callable[[], System]] = {
        **dict.fromkeys(("compute", "one-core", "both-cores"), Compute),
        "mpi": Mpi,
        "horovod": Horovod,
        "mwms": MultiWorker,
        "in-step": lambda: InStep("allreduce"),
    }
    return made[system]() if system in made else Tfscale(system.removeprefix("tfscale-"))
