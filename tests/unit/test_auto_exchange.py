"""exchange="auto" before it has planned, and what its measurements become."""

import keras
import numpy as np
import pytest

import tfscale
from tests.helpers.fake_ranks import single_job  # noqa: F401
from tfscale.comm.backends.base import Group
from tfscale.config import ConfigError
from tfscale.exchange.auto import Auto, strategy_of
from tfscale.exchange.base import resolve
from tfscale.exchange.plan import Parameter, Table
from tfscale.launcher.tune.links import fit_line
from tfscale.measure.layer_times import LayerMeasurement, calibrated, fitted, measured_machine
from tfscale.plan.buckets import GradientSpec
from tfscale.plan.costs import Scenario
from tfscale.plan.layers import Layer, LayerTable
from tfscale.plan.machines import PRESETS
from tfscale.plan.parts import bucketed, chunked
from tfscale.plan.published import dense
from tfscale.plan.simulate import simulate


def test_names_and_machines():
    for wrong, text in (({"global_batch": 0}, "1 or more, or"), ({"machine": "no"}, "one of")):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be {text}"):
            Auto(**wrong)
    assert resolve("auto") == Auto()
    assert Auto(machine="ethernet-1g").read_machine() is PRESETS["ethernet-1g"]
    assert Auto(machine=PRESETS["cori-haswell"]).read_machine() is PRESETS["cori-haswell"]
    assert "Nothing is planned yet" in Auto().explain()


def test_one_process_trains_as_without():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(tfscale.DistributedOptimizer(keras.optimizers.SGD(0.1), exchange="auto"), "mse")
    history = model.fit(np.ones((8, 3)), np.ones((8, 2)), epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_a_plan_becomes_a_strategy():
    table = LayerTable("t", (dense("a", 4, 5), dense("b", 5, 6), dense("c", 6, 7)))
    strategy = strategy_of(table, chunked(table, 1, 2, replicated=1), "words")
    assert strategy.layers == (("a", "replicated"),) and not strategy.is_sharding
    summed = {paths for kind, paths in strategy.parts if kind == "allreduce"}
    assert summed == {("c/bias", "c/kernel"), ("b/bias", "b/kernel")}
    # A variable that the plan does not know is sent alone, and one that is missing does not matter.
    names = ["b/kernel", "c/kernel", "c/bias", "new"]
    specs = [GradientSpec(name, (2,), "float32") for name in names]
    made = tuple(Parameter(spec, "float32", "dense") for spec in specs)
    plan = strategy.plan(Table(made), Group(0, (0, 1), 0))
    assert [part.indices for part in plan.parts] == [(3,), (2, 1), (0,)]


def test_lines_through_durations():
    assert fit_line([0, 10, 20], [1.0, 2.0, 3.0]) == pytest.approx((1.0, 0.1))
    # A falling line, or one size only: the fastest counts, with no time for nothing.
    assert fit_line([10, 20], [2.0, 1.0]) == pytest.approx((0.0, 0.05))
    assert fit_line([10, 10], [2.0, 1.0]) == pytest.approx((0.0, 0.1))


def test_what_messages_cost_where_many_are_under_way():
    # Alone 0.1 s and 0.01 s per byte: 4 of 100 bytes in all take 1.4 s.
    assert fitted((0.1, 0.01), 4, 100, 1.4) == pytest.approx((0.1, 0.01))
    # They took less: messages overlapped; much less, and bytes moved faster, too.
    assert fitted((0.1, 0.01), 4, 100, 1.2) == pytest.approx((0.05, 0.01))
    assert fitted((0.1, 0.01), 4, 100, 0.54) == pytest.approx((0.01, 0.005))
    # They took longer: bytes had to wait.
    assert fitted((0.1, 0.01), 4, 100, 2.4) == pytest.approx((0.1, 0.02))


def measured(layers, n_bytes, ready_s):
    """A step of 2 s whose messages take 0.2 s and 20 kB/s."""
    return LayerMeasurement(layers, n_bytes, ready_s, message_s=0.2, byte_s=0.5e-4,
                            before_s=0.5, after_s=0.1, step_s=2.0)  # fmt: skip


@pytest.mark.parametrize("n_embeddings", [1, 3])
def test_rows_of_embeddings_say_nothing_of_the_bandwidth(n_embeddings):
    """Of 4 MB that the plan counts 4 kB are sent; the later layers send twice what it counts."""
    rows = [Layer(f"e{i}", ((f"e{i}/w", 1_000_000),)) for i in range(n_embeddings)]
    layers = (*rows, Layer("a", (("a/w", 250),), 3.0), Layer("b", (("b/w", 1000),), 1.0))
    table = LayerTable("t", layers)
    n_bytes = (*[4000] * n_embeddings, 2000, 8000)
    ready_s = (0.3,) * n_embeddings + (0.25, 0.0)
    found = measured(tuple(layer.name for layer in layers), n_bytes, ready_s)
    machine = measured_machine(table, found, n_ranks=2, batch=4, known=None)
    assert 1 / machine.bytes_per_s == pytest.approx(1e-4)


def test_layers_of_several_cells_are_found_by_any_of_them():
    """Which weight names the bucket of a layer depends on the order of readiness."""
    cells = Layer("rnn", (("rnn/one/w", 100), ("rnn/two/w", 150)), 3.0)
    table = LayerTable("t", (cells, Layer("b", (("b/w", 1000),), 1.0)))
    found = LayerMeasurement(("rnn/two", "b"), (1000, 4000), (0.25, 0.0), 0.2, 1e-4, 0.5, 0.1, 2.0)
    machine = measured_machine(table, found, n_ranks=2, batch=4, known=None)
    assert machine.layer_times["t"].backward_s == {"rnn": 0.25, "b": 0.0}
    assert 1 / machine.bytes_per_s == pytest.approx(1e-4)


def test_a_measured_machine_takes_as_long_as_the_steps_did():
    layers = (Layer("a", (("a/w", 250),), 3.0), Layer("b", (("b/w", 1000),), 1.0))
    table = LayerTable("t", layers)
    # float64: twice what the plan counts
    found = measured(("a", "b"), (2000, 8000), (0.25, 0.0))
    machine = measured_machine(table, found, n_ranks=2, batch=4, known=None)
    scenario = Scenario(table, machine, 2, 8)
    assert scenario.compute_s() == pytest.approx(0.5 + 0.25)
    assert scenario.update_s(table.n_values) == pytest.approx(0.1)
    # Durations are 0.2 + bytes / 10000 seconds of what the plan counts.
    assert 2 * machine.latency_s == pytest.approx(0.2)
    assert 1 / machine.bytes_per_s == pytest.approx(1e-4)
    known = measured_machine(table, found, 2, 4, PRESETS["ethernet-1g"])
    assert known.bytes_per_s == PRESETS["ethernet-1g"].bytes_per_s
    assert known.layer_times["t"].backward_s == machine.layer_times["t"].backward_s
    plan = bucketed(table, None)
    assert simulate(scenario, plan).step_s < 2.0
    assert simulate(calibrated(scenario, found), plan).step_s == pytest.approx(2.0)
