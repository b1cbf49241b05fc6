"""Models whose layers sleep: places, and that a step sleeps for as long as its table says."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import (
    harness,
    layer_tables,
    sessions,
    sleeping,
    sleeping_page,
    sleeping_tables,
)
from benchmarks.cells import Choice, cells_of
from benchmarks.launch import shape_of
from benchmarks.places import SLOW_MOTION, Place, parse_place
from benchmarks.workloads import make_batch

DOCS = Path(__file__).parents[2] / "docs"
# Exact in float32.
BEST = ("tfscale-sharded", "tfscale-allreduce", "tfscale-chunked")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("1gbit", Place(4, 4, 1e9)),
        ("2x4@1gbit", Place(2, 8, 1e9)),
        ("sleep-4x1@1gbit", Place(4, 4, 1e9, 1.0)),
        ("sleep8-16x1@10gbit", Place(16, 16, 1e10, 8.0)),
        ("sleep0.5-1x4@memory", Place(1, 4, None, 0.5)),
        ("sleep-4x1@10mbit+100ms", Place(4, 4, 1e7, 1.0, 100.0)),
    ],
)
def test_place(text: str, place: Place) -> None:
    assert parse_place(text) == place


def test_in_slow_motion_links_are_slower_and_queues_hold_as_much():
    place = parse_place("sleep-4x1@1gbit+100ms")
    usual, slow = shape_of(place), shape_of(place, 8)
    assert (usual.rate_bits_s, slow.rate_bits_s) == (1e9, 1e9 / 8)
    assert (usual.delay_ms, slow.delay_ms) == (25, 200)
    assert slow.rate_bits_s * slow.queue_ms == usual.rate_bits_s * usual.queue_ms
    assert shape_of(parse_place("memory")) is None


@pytest.mark.parametrize(
    "text", ["sleep", "sleep-", "sleep-4x1", "sleepx-4x1@1gbit", "1gbit+ms", "memory+5ms"]
)
def test_what_is_no_place_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="Received: "):
        parse_place(text)


def test_computing_alone_needs_no_links() -> None:
    choice = Choice(places=["sleep8-16x1@1gbit"], models=["resnet50"], exchanges=["sharded"])
    cells = {cell.system: cell for cell in cells_of(["step"], choice)}
    assert cells["compute"].place == "sleep8-1x16@memory"
    assert cells["tcp"].arguments[:2] == ("--bytes", str(layer_tables.gradient_bytes("resnet50")))
    assert cells["tfscale-sharded"].arguments[:4] == ("--model", "resnet50", "--sleep", "8.0")


def seconds_of(graph: tf.Graph, n_samples: int) -> float:
    """The seconds that all ops of a graph sleep together."""
    total = 0.0
    for op in graph.get_operations():
        if op.type == "BenchSleep":
            n_rows = op.inputs[0].shape[0] or n_samples
            total += op.get_attr("seconds") + op.get_attr("seconds_per_row") * n_rows
    return total


@pytest.mark.parametrize("name", ["resnet50", "vgg_a", "transformer"])
def test_a_step_sleeps_as_long_as_the_layers_compute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in ("matmul", "tensordot"):  # `build` replaces them
        monkeypatch.setattr(tf, function, getattr(tf, function))
    monkeypatch.setenv(SLOW_MOTION, "2")
    table = layer_tables.read()[name]
    workload = sleeping.workload(name, n_ranks=1, speed=4.0)
    model = workload.build()
    inputs, targets = make_batch(workload, rank=0, size=1)

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.abs(model(x, training=True) - y))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    traced = step.get_concrete_function(tf.constant(inputs), tf.constant(targets))
    measured = 2 / 4 * (table["forward_s"] + table["backward_s"])
    # The first layer's nap and the lines through the times of products differ a little.
    assert seconds_of(traced.graph, table["samples"]) == pytest.approx(measured, rel=0.1)
    n_bytes = sum(4 * int(np.prod(g.shape)) for g in traced.structured_outputs)
    assert n_bytes == layer_tables.gradient_bytes(name)
    assert [g.shape for g in traced.structured_outputs] == [
        v.shape for v in model.trainable_variables
    ]


def test_a_part_of_a_kernels_gradient_takes_a_part_of_the_time() -> None:
    times = {"outputs": [0.0, 0.0], "input_gradients": [0.0, 0.0], "kernel_gradient": [0.008, 0.0]}
    products = sleeping.Products({(64, 10): times, (32, 10): times})

    @tf.function(autograph=False)
    def multiply(a: tf.Tensor, of_outputs: tf.Tensor) -> tf.Tensor:
        return products.matmul(a, of_outputs, transpose_a=True)

    traced = multiply.get_concrete_function(tf.zeros((8, 16)), tf.zeros((8, 10)))
    (op,) = [op for op in traced.graph.get_operations() if op.type == "BenchSleep"]
    assert op.get_attr("seconds") == pytest.approx(0.002)
    assert multiply(tf.zeros((8, 16)), tf.zeros((8, 10))).shape == (16, 10)


def test_other_products_are_computed() -> None:
    products = sleeping.Products({})
    a, b = np.random.default_rng(1).standard_normal((2, 3, 3))
    np.testing.assert_allclose(products.matmul(a, b, transpose_b=True), a @ b.T)
    np.testing.assert_allclose(products.matmul(a, b), a @ b)


def test_busy_cores_are_measured_again_in_slow_motion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group begins again as a whole, and continues with its factor where it was cut off."""
    calls: list[tuple[str, int]] = []

    def run_cell(cell: harness.Cell, timeout_s: float, variables: dict[str, str]) -> dict[str, Any]:
        factor = int(variables[SLOW_MOTION])
        calls.append((cell.system, factor))
        idle = 0.9 if cell.system == "compute" else 0.1 * factor
        content = {"commit": harness.provenance.commit(), "load": [0.0, 0.0], "samples": {}}
        return {**content, "idle_share": idle}

    monkeypatch.setattr(harness, "run_cell", run_cell)
    cells = [
        harness.Cell("step", "resnet50 sleep-1x2@memory", system, "sleep-1x2@memory", 2, ())
        for system in ("compute", "horovod")
    ]
    path = tmp_path / "results.json"
    content = harness.measure(cells, 1, path, 1.0, lambda line: None)
    once = [("compute", 1), ("horovod", 1), ("compute", 2), ("horovod", 2)]
    assert calls == [*once, ("compute", 4), ("horovod", 4)]
    runs = [(run["system"], run["slow_motion"]) for run in content["runs"]]
    assert runs == [("compute", 4), ("horovod", 4)]
    harness.measure(cells, 2, path, 1.0, lambda line: None)
    assert calls[6:] == [("horovod", 4), ("compute", 4)]
    cells[1] = dataclasses.replace(cells[1], most_rounds=1)
    harness.measure(cells, 2, tmp_path / "others.json", 1.0, lambda line: None)
    assert calls[-3:] == [("compute", 4), ("horovod", 4), ("compute", 4)]
    path = tmp_path / "slow.json"
    harness.measure(cells, 1, path, 1.0, lambda line: None, slow_motion=4)
    assert calls[-2:] == [("compute", 4), ("horovod", 4)]


def test_a_table_has_bytes_and_what_was_under_way() -> None:
    place = "sleep-2x2@1gbit"
    asleep = {"group": f"resnet50 {place}", "place": place, "n_ranks": 4, "idle_share": 0.6}
    run: dict[str, Any] = {**asleep, "peak_bytes": 2**30, "slow_motion": 2}

    def measured(system: str, seconds: float, n_bytes: float, **facts: Any) -> dict[str, Any]:
        of_case = {"samples": {"resnet50": [seconds]}, "sent_bytes": {"resnet50": n_bytes}}
        return {**run, "system": system, **of_case, **facts}

    wire = {"wire_s": {"gradients": 1.0, "averages": 0.25}}
    runs = [
        measured("compute", 1.0, 0.0),
        measured("tcp", 2.0, 1e8),
        measured("tfscale-local8-g2-sharded", 2.5, 6.25e7, **wire),
    ]
    (text,) = sleeping_tables.tables(runs)
    assert "Times in slow motion, 2 times" in text and "idle for 60%" in text
    assert "| compute only | 1000 (1000..1000) |  |  |  |  | 1024 |" in text
    # Of all gradients' bytes on the link, and of its own.
    cells = "2500 (2500..2500) | 0.800 | 0.500 | 62.5 | 500 + 125 | 1024 |"
    assert f"| tfscale local8-g2-sharded | {cells}" in text


def medians(group: str) -> dict[str, float]:
    """Milliseconds of each system, of the committed results."""
    runs = [r for r in sessions.read(DOCS / "sleeping.json")["runs"] if r["group"] == group]
    systems = dict.fromkeys(run["system"] for run in runs)
    of = {name: [run for run in runs if run["system"] == name] for name in systems}
    return {
        name: 1e3 * statistics.median(sleeping_tables.samples_of(found))
        for name, found in of.items()
    }


def test_the_committed_page_is_up_to_date() -> None:
    """Write it again with `python -m benchmarks.sleeping_page docs/sleeping.json --output docs`."""
    page = (DOCS / "results" / "sleeping.md").read_text()
    assert page.endswith("\n" + sleeping_page.page(sessions.read(DOCS / "sleeping.json")))


def test_the_readme_has_the_committed_numbers() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    found = medians("resnet50 sleep-4x1@1gbit")
    seconds = {name: f"{ms / 1e3:.2f} s" for name, ms in found.items()}
    for text in (
        f"a step takes {seconds['tfscale-sharded']}. One process takes {seconds['compute']} for",
        f"Horovod {seconds['horovod']}",
        f"DDP {seconds['ddp']}",
    ):
        assert text in " ".join(readme.split())
    benchmarks = (DOCS / "benchmarks.md").read_text()
    for model in layer_tables.read():
        found = medians(f"{model} sleep-4x1@1gbit")
        for system in ("compute", "horovod", "ddp"):
            assert f" {found[system]:.0f} " in benchmarks
        best = [found[name] for name in found if name in BEST]
        assert f" {min(best):.0f} (" in benchmarks
