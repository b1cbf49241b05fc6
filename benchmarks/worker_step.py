"""Measured program: training steps of one model, its gradients exchanged by one system."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from benchmarks import worker
from benchmarks.numbers import allreduce_bytes, least_bytes
from benchmarks.systems import Case, System, Tfscale, TracedStep, start
from benchmarks.workloads import WORKLOADS, Workload, make_batch, make_loss, weights_of
from tfscale.comm.process import discover


def make_step(workload: Workload, model: keras.Model, system: System) -> TracedStep:
    """Return one training step on a batch that stays the same, traced."""
    optimizer, reduce = system.wrap(keras.optimizers.SGD(1e-4, momentum=0.9), Case(workload, model))
    loss = make_loss(workload)
    pictures, targets = map(tf.constant, make_batch(workload, system.rank, system.size))
    variables = model.trainable_variables
    optimizer.build(variables)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(targets, model(pictures, training=True))
        optimizer.apply(reduce(tape.gradient(value, [v.value for v in variables])), variables)
        return value

    return TracedStep(step)


def wire_seconds(step: Callable[[], Any], n_steps: int) -> dict[str, float]:
    """Return how long this rank's collectives are under way in a step, averages of models apart.

    Collectives that are under way at the same time count once. Waiting for other ranks counts.

    Args:
        step: Runs a step.
        n_steps: To run, whole intervals of local SGD.
    """
    from tfscale.comm import runtime
    from tfscale.measure.analysis import length, merged
    from tfscale.trace.events import Listener

    listener = Listener()
    for _ in range(n_steps):
        step()
    engine: Any = runtime.backend()
    spans: dict[str, list[tuple[int, int]]] = {"averages": [], "gradients": []}
    for event in listener.take():
        if event["slot"] >= 0:
            name = engine.slot_name(int(event["plan"]), int(event["slot"]))
            kind = "averages" if "average of" in name else "gradients"
            spans[kind].append((int(event["started_ns"]), int(event["ended_ns"])))
    listener.close()
    return {kind: length(merged(found)) / 1e9 / n_steps for kind, found in spans.items()}


def own_step(
    workload: Workload, system: System, options: argparse.Namespace
) -> tuple[keras.Model, worker.Samples, dict[str, Any]]:
    """Measure a traced step of one's own; return the model, samples and facts."""
    model = workload.build()
    step = make_step(workload, model, system)
    step()
    start_s = worker.since_start()
    system.settle(step)
    system.barrier()
    samples = worker.sample(step, options.warmup, options.repeats, options.block)
    facts = system.facts()
    if isinstance(system, Tfscale) and system.size > 1:
        # Four steps, or whole intervals of about 32 together.
        n_steps = options.block * max(1, min(4, 32 // options.block))
        facts["wire_s"] = wire_seconds(step, n_steps)
    return model, samples, {**facts, "start_s": start_s}


def step_in_fit(
    workload: Workload, system: Tfscale, options: argparse.Namespace
) -> tuple[keras.Model, worker.Samples, dict[str, Any]]:
    """Measure steps of `fit`, input included; return the model, samples and facts."""
    from benchmarks.worker_fit import Clock, Fit

    fitted = Fit(workload, system, options.warmup + options.repeats + 1)
    fitted.model.train_on_batch(*fitted.own)
    start_s = worker.since_start()
    fitted.settle()
    clock = Clock(options.warmup + 1)
    fitted.run(clock)
    samples = worker.Samples(clock.seconds, clock.sent_bytes, clock.idle_share)
    return fitted.model, samples, {**system.facts(), "start_s": start_s}


def pin() -> None:
    """Give this rank of one host a core of its own, before TensorFlow counts cores."""
    cores = sorted(os.sched_getaffinity(0))
    launch = discover(os.environ)
    rank = launch.rank if launch else 0
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def main() -> None:
    """Measure the steps of one model."""
    parser = worker.parser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--block", type=int, default=1, help="steps whose mean is one duration")
    parser.add_argument("--sleep", type=float, help="layers sleep, of cores that are so fast")
    parser.add_argument("--pin", action="store_true", help="each rank has a core of its own")
    parser.add_argument("--share", type=int, default=1, help="train on 1/SHARE of the batch")
    options = parser.parse_args()
    if options.pin:
        pin()
    system = start(options.system)
    keras.utils.set_random_seed(1)
    if options.sleep:
        from benchmarks import sleeping

        workload = sleeping.workload(options.model, system.size, options.sleep)
    else:
        workload = WORKLOADS[options.model]
        workload = replace(workload, global_batch=workload.global_batch // options.share)
    if isinstance(system, Tfscale) and system.in_fit:
        model, samples, facts = step_in_fit(workload, system, options)
    else:
        model, samples, facts = own_step(workload, system, options)
    weights, hosts = weights_of(model), worker.n_hosts()
    worker.write(
        options.output,
        system.rank,
        {options.model: samples},
        n_parameters=sum(layer.n_parameters for layer in weights),
        allreduce_bytes=allreduce_bytes(weights, hosts),
        least_bytes=least_bytes(weights, hosts, workload.global_batch // hosts),
        **facts,
    )
    system.end()


if __name__ == "__main__":
    main()
