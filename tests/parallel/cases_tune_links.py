"""`tfscale tune links` measures what the ranks here do; the planner can use it."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator

import tfscale
from tests.helpers.ranks import shared_folder
from tests.helpers.spawn import sizes
from tfscale.launcher.tune import links
from tfscale.launcher.tune.links import measure_model
from tfscale.measure.model_layers import find_model, read_layers
from tfscale.plan.costs import Scenario
from tfscale.plan.machines import Machine, find_machine
from tfscale.plan.parts import bucketed
from tfscale.plan.simulate import simulate

ENGINE_ONLY = "its events are looked at"


@contextlib.contextmanager
def few_rounds() -> Iterator[None]:
    """Measure little: these tests are not about precision."""
    before = links._ROUNDS, links._SIZES
    links._ROUNDS, links._SIZES = 3, (4096, 65536, 2**20)
    try:
        yield
    finally:
        links._ROUNDS, links._SIZES = before


def measured() -> Machine:
    with few_rounds():
        between = links.measure_links(tfscale.global_process_set)
        return links.machine_from(between, [], links.measure_compute())


@sizes(2, 3, timeout_s=120)
def case_links_are_measured_alike_on_all_ranks():
    machine = measured()
    assert all(other == machine for other in tfscale.allgather_object(machine))
    assert machine.ranks_per_host == tfscale.size()
    assert math.isclose(machine.link(2).bytes_per_s, machine.host_bytes_per_s)  # rounded: x * 3 / 3
    # Between a slow Ethernet and the fastest memory there is.
    assert 1e6 < machine.host_bytes_per_s < 1e12
    assert 0 <= machine.host_latency_s < 1
    names = {"latency_s", "bytes_per_s", "reduce_bytes_per_s", "flops_per_s", "memory_bytes_per_s"}
    assert set(machine.spread) == names
    with shared_folder() as folder:
        if tfscale.rank() == 0:
            machine.save(folder / "machine.json")
        tfscale.barrier()
        assert find_machine(str(folder / "machine.json")) == machine


@sizes(4, timeout_s=120)
def case_the_inside_of_a_host_is_measured_with_its_ranks():
    """Four ranks of one host play two hosts of two."""
    before = links.runtime.local_size
    links.runtime.local_size = lambda: 2
    try:
        with few_rounds():
            inside = links.measure_inside()
    finally:
        links.runtime.local_size = before
    assert len(inside) == 3
    assert all(other == inside for other in tfscale.allgather_object(inside))


@sizes(2, timeout_s=180)
def case_the_layers_of_a_model_are_timed():
    options = argparse.Namespace(
        model="tests.unit.test_forecast:small_model", model_file=None, input_shape="", batch=8
    )
    machine = measure_model(measured(), options, find_model(options.model, None))
    times = machine.layer_times["small"]
    assert times.batch == 8
    assert set(times.forward_s) == set(times.backward_s)
    assert 0 < machine.compute_share <= 1 and 0 < machine.message_share <= 1
    assert sum(times.forward_s.values()) > 0 and min(times.backward_s.values()) >= 0
    assert "step of small" in machine.spread
    table = read_layers(find_model(options.model, None))
    scenario = Scenario(table, machine, 2, 16)
    predicted = simulate(scenario, bucketed(table, None))
    least = sum(times.forward_s.values()) + sum(times.backward_s.values())
    assert predicted.step_s >= least * (1 - 1e-6)
