"""Machines, measured steps and layer tables that tests of the planner share."""

import dataclasses

from hypothesis import strategies as st

from tfscale.plan.buckets import auto_bucket_bytes
from tfscale.plan.choose import plain_plan
from tfscale.plan.costs import Scenario
from tfscale.plan.layers import Layer, LayerTable, is_partial_cheaper
from tfscale.plan.machines import Machine
from tfscale.plan.parts import LayerPlan, bucketed, chunked, dense_layers, specs_of
from tfscale.plan.published import VGG_A, dense, resnet50, vgg

# Four ranks on the two cores of one machine, in network namespaces with links of 1 Gbit/s: the
# rate is that of the links, the shares are fitted to the eight steps below.
CLUSTER = Machine(
    name="emulated 1 Gbit/s",
    latency_s=60e-6,
    bytes_per_s=115e6,
    reduce_bytes_per_s=2e9,
    flops_per_s=1e12,
    memory_bytes_per_s=8e9,
    compute_share=0.35,
    message_share=0.85,
)
TABLES = {
    "vgg_like": (vgg("vgg_like", ((32,), (64,), (128,)), 32), 64, 138e-3),
    "vgg_a": (vgg("vgg_a", VGG_A, 64), 32, 483e-3),
    "resnet50": (resnet50(64), 32, 409e-3),
}


def scenario_of(name: str) -> Scenario:
    """Return the model on the cluster, with cores so fast that it computes as long as it did."""
    table, batch, compute_s = TABLES[name]
    slow, fast = 1e9, 1e13
    for _ in range(50):
        flops = (slow * fast) ** 0.5
        machine = dataclasses.replace(CLUSTER, flops_per_s=flops)
        scenario = Scenario(table, machine, 4, batch)
        if scenario.compute_s() + scenario.update_s(table.n_values) > compute_s:
            slow = flops
        else:
            fast = flops
    return scenario


def fixed(scenario: Scenario, exchange: str) -> LayerPlan:
    """Return the plan of a fixed exchange, as the benchmarks measure it."""
    table, batch = scenario.table, scenario.global_batch
    layers = dense_layers(table)
    if exchange == "allreduce":
        return plain_plan(scenario)
    if exchange == "chunked":
        half = sum(bool(layer.weights) for layer in table.layers) // 2
        cheap = [x for x in layers if sum(table.layers[x].dense) * batch < table.layers[x].n_values]
        return chunked(table, half, 2, len(cheap))
    partial = [x for x in layers if is_partial_cheaper(*table.layers[x].dense, batch, 4)]
    size = auto_bucket_bytes(specs_of(table))
    return bucketed(table, size, "sharded", dict.fromkeys(partial, "partial"))


def machines():
    return st.builds(
        Machine,
        name=st.just("any"),
        latency_s=st.floats(0, 1e-2),
        bytes_per_s=st.floats(1e5, 1e11),
        reduce_bytes_per_s=st.floats(1e6, 1e11),
        flops_per_s=st.floats(1e9, 1e14),
        memory_bytes_per_s=st.floats(1e8, 1e12),
        half_batch=st.floats(0, 8),
        mpi_s_per_byte=st.floats(0, 1e-8),
        ranks_per_host=st.integers(1, 16),
        host_latency_s=st.none() | st.floats(0, 1e-2),
        host_bytes_per_s=st.none() | st.floats(1e5, 1e11),
    )


def layer(name: str, n_values: int, flops: float = 1.0) -> Layer:
    return Layer(name, ((f"{name}/kernel", n_values),), flops)


def tables():
    sizes = st.tuples(st.integers(1, 10**6), st.floats(1, 1e9), st.booleans(), st.integers(1, 999))

    def build(rows):
        layers = [
            dense(f"l{i}", n % 997 + 1, n_out) if is_dense else layer(f"l{i}", n, flops)
            for i, (n, flops, is_dense, n_out) in enumerate(rows)
        ]
        return LayerTable("any", tuple(layers))

    return st.lists(sizes, min_size=1, max_size=6).map(build)


def require_fit(table, plan):
    """Require each parameter in one part, and dense kinds for one dense layer only."""
    chosen = sorted(p for part in plan.parts for p in part.parameters)
    assert chosen == list(range(len(table.parameters)))
    for part in plan.parts:
        owners = {table.parameters[p].layer for p in part.parameters}
        if part.kind in ("partial", "replicated"):
            assert len(owners) == 1 and table.layers[owners.pop()].dense is not None
