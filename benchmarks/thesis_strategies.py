"""The strategies and machines of the papers, as plans and constants of the simulator.

They differ from tfscale's own in what their software did: blocking MPI calls in one thread,
MPI's own allreduce, one exchange per layer, and updates where the next forward pass needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tfscale.plan.costs import Scenario
from tfscale.plan.machines import PRESETS, Machine
from tfscale.plan.parts import LayerPlan, bucketed, cheap_partial_layers, chunked

# Cori's numbers are fitted to the published speedups, see docs/thesis-scaling.md.
_HASWELL = PRESETS["cori-haswell"]
MACHINES: dict[str, Machine] = {
    "cori-haswell": _HASWELL,
    "cori-haswell-2017": replace(
        _HASWELL,
        name="cori-haswell-2017",
        flops_per_s=0.275e12,
        half_batch=0.6,
        note="[T] chapter 3: the same hosts, earlier and slower kernels",
    ),
    "cori-knl": replace(
        _HASWELL,
        name="cori-knl",
        latency_s=3e-6,
        bytes_per_s=1e9,
        reduce_bytes_per_s=10e9,
        flops_per_s=2e12,
        memory_bytes_per_s=80e9,
        note="[L] IV: one rank per host of 68 slow cores; not fitted, the paper prints no times",
    ),
}

# [T] counts pooling layers in k. So many layers of VGG-A and its variants follow each of them.
_BEHIND_POOLINGS = (3, 6, 9, 12, 14)


def data_parallel(scenario: Scenario) -> LayerPlan:
    """Return "DP" of [T] chapter 3: one allreduce of everything, after back-propagation."""
    return _blocking(bucketed(scenario.table, 2**62), overlap=False)


def per_layer_allreduce(scenario: Scenario, overlap: bool = True) -> LayerPlan:
    """Return "allreduce" of [T] 4.5.4, "DP+Overlap" of 3.4.4: overlapped with the next step, too.

    Args:
        scenario: Model, machine, ranks, batch.
        overlap: False: "allreduce_no_overlap".
    """
    plan = _blocking(bucketed(scenario.table, None), overlap)
    return replace(plan, lazy=("allreduce",))


def chunked_2017(scenario: Scenario, k: int = 9, f: int = 2) -> LayerPlan:
    """Return "parallel CNN" of [T] chapter 3, algorithm 2, for VGG-A and its variants.

    Args:
        scenario: Model, machine, ranks, batch.
        k: Layers of the first chunk, counted with poolings and with replicated layers.
        f: Dense layers whose gradients are replicated, and delayed to the next forward pass.
    """
    n_poolings = sum(n_behind < k for n_behind in _BEHIND_POOLINGS)
    first = max(1, k - n_poolings - f)
    plan = _blocking(chunked(scenario.table, first, 2, f), overlap=True)
    return replace(plan, lazy=("replicated",))


def pcnn(scenario: Scenario, overlap: bool = True) -> LayerPlan:
    """Return "pcnn" of [T] chapter 4: each layer sharded, dense layers by eq. 4.8.

    Args:
        scenario: Model, machine, ranks, batch.
        overlap: False: "pcnn_no_overlap".
    """
    plan = bucketed(scenario.table, None, "sharded", cheap_partial_layers(scenario))
    return replace(plan, overlap=overlap, has_early_gradients=False, piece_bytes=0, gather_bytes=0)


def _blocking(plan: LayerPlan, overlap: bool) -> LayerPlan:
    return replace(plan, overlap=overlap, algorithm="mpi", piece_bytes=0, gather_bytes=0)


STRATEGIES: dict[str, Callable[[Scenario], LayerPlan]] = {
    "data parallel": data_parallel,
    "allreduce without overlap": lambda scenario: per_layer_allreduce(scenario, overlap=False),
    "allreduce": per_layer_allreduce,
    "chunked": chunked_2017,
    "pcnn without overlap": lambda scenario: pcnn(scenario, overlap=False),
    "pcnn": pcnn,
}
