"""Measured program: training steps of one model, its gradients exchanged by one system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from benchmarks import worker
from benchmarks.numbers import allreduce_bytes, least_bytes
from benchmarks.workloads import WORKLOADS, Workload, make_batch, make_loss, weights_of

Reduce = Callable[[list[tf.Tensor]], list[tf.Tensor]]


@dataclass(frozen=True)
class Case:
    """What is trained."""

    workload: Workload
    model: keras.Model


class Compute:
    """No exchange at all; ranks start together, and MPI is silent afterwards."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer, and what exchanges gradients before it is called."""
        return optimizer, lambda gradients: gradients

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.comm.Barrier()

    def end(self) -> None:
        """End the system."""


class Tfscale:
    """tfscale's optimizer, with one of its strategies of exchange."""

    def __init__(self, exchange: str) -> None:
        import tfscale

        tfscale.init()
        self.exchange, self.tfscale = exchange, tfscale
        self.rank, self.size = tfscale.rank(), tfscale.size()

    def wrap(self, optimizer: keras.optimizers.Optimizer, case: Case) -> tuple[Any, Reduce]:
        """Return the optimizer, which exchanges by itself."""
        wrapped = self.tfscale.DistributedOptimizer(optimizer, exchange=self._strategy(case))
        case.model.compile(optimizer=wrapped, loss="mse")  # the loss is the step's own
        self.tfscale.prepare(case.model)
        return wrapped, lambda gradients: gradients

    def _strategy(self, case: Case) -> Any:
        """Return what the name of the exchange stands for."""
        half = sum(bool(x.trainable_weights) for x in case.model._flatten_layers()) // 2
        named = {
            "chunked": lambda: self.tfscale.Chunked(
                max(1, half), "auto", global_batch=case.workload.global_batch
            ),
            "sharded": lambda: self.tfscale.Sharded(global_batch=case.workload.global_batch),
            "sharded-weights": lambda: self.tfscale.Sharded(dense="weights"),
            "local8": lambda: self.tfscale.LocalSGD(self.size, 8, "allreduce"),
            "local16": lambda: self.tfscale.LocalSGD(self.size, 16, "allreduce"),
        }
        return named.get(self.exchange, lambda: self.exchange)()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.tfscale.barrier()

    def end(self) -> None:
        """End the system."""
        self.tfscale.shutdown()


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

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.hvd.allreduce(tf.zeros(1), name="barrier")

    def end(self) -> None:
        """End the system."""
        self.hvd.shutdown()


def start(system: str) -> Compute | Tfscale | Horovod:
    """Initialise "compute", "horovod" or "tfscale-" with the name of an exchange."""
    if system == "compute":
        return Compute()
    return Horovod() if system == "horovod" else Tfscale(system.removeprefix("tfscale-"))


def make_step(workload: Workload, model: keras.Model, system: Any) -> Callable[[], object]:
    """Return one training step on a batch that stays the same, traced."""
    optimizer, reduce = system.wrap(keras.optimizers.SGD(1e-4, momentum=0.9), Case(workload, model))
    loss = make_loss(workload)
    pictures, targets = map(tf.constant, make_batch(workload, system.rank, system.size))
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(targets, model(pictures, training=True))
        optimizer.apply(reduce(tape.gradient(value, [v.value for v in variables])), variables)
        return value

    return lambda: step().numpy()


def main() -> None:
    """Measure the steps of one model."""
    parser = worker.parser()
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    options = parser.parse_args()
    system = start(options.system)
    keras.utils.set_random_seed(1)
    workload = WORKLOADS[options.model]
    model = workload.build()
    step = make_step(workload, model, system)
    step()
    start_s = worker.since_start()
    system.barrier()
    samples = worker.sample(step, options.warmup, options.repeats)
    weights = weights_of(model)
    worker.write(
        options.output,
        system.rank,
        {options.model: samples},
        start_s=start_s,
        n_parameters=sum(layer.n_parameters for layer in weights),
        allreduce_bytes=allreduce_bytes(weights, system.size),
        least_bytes=least_bytes(weights, system.size, workload.global_batch // system.size),
    )
    system.end()


if __name__ == "__main__":
    main()
