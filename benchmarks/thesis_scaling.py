"""The simulator against the published speedups: writes docs/thesis-scaling.md and .png.

    python -m benchmarks.thesis_scaling --output docs

Nothing is measured: constants are stated, residuals shown, also where they are bad.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.thesis_strategies import (
    MACHINES,
    STRATEGIES,
    chunked_2017,
    pcnn,
    per_layer_allreduce,
)
from tfscale.plan.choose import choose
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import grid
from tfscale.plan.machines import Machine
from tfscale.plan.parts import LayerPlan
from tfscale.plan.published import published
from tfscale.plan.simulate import Prediction, simulate, simulate_local_sgd

CORES = 32  # of a host of [T]
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONSTANTS = (
    "latency_s",
    "bytes_per_s",
    "mpi_s_per_byte",
    "flops_per_s",
    "memory_bytes_per_s",
    "half_batch",
    "reduce_bytes_per_s",
)
Build = Callable[[Scenario], LayerPlan]


def scenario_of(model: str, machine: str, n_ranks: int, batch: int = 256) -> Scenario:
    """Return a published model on one of Cori's machines."""
    return Scenario(published(model), MACHINES[machine], n_ranks, batch)


def speedup(scenario: Scenario, build: Build) -> tuple[float, Prediction]:
    """Return how many times faster than one node, and the step."""
    alone = replace(scenario, n_ranks=1)
    predicted = simulate(scenario, build(scenario))
    return simulate(alone, build(alone)).step_s / predicted.step_s, predicted


# The numbers that the constants are fitted to: model, strategy, machine, nodes, published speedup.
# Those of chapter 4 are multiples of a core's speed, those of chapter 3 of a node's.
_NAMED = (
    ("vgg16", "pcnn", "cori-haswell", 256, 2516.36),
    ("vgg16", "allreduce", "cori-haswell", 256, 559.12),
    ("resnet50", "pcnn", "cori-haswell", 256, 2734.25),
    ("resnet50", "allreduce", "cori-haswell", 256, 1572.01),
    ("vgg-a", "chunked", "cori-haswell-2017", 128, 62.97),
    ("vgg-a", "data parallel", "cori-haswell-2017", 128, 19.92),
)


def named_speedups(**factors: float) -> list[float]:
    """Return the six simulated speedups; constants of the machines are multiplied by `factors`."""
    found = []
    for model, name, machine, nodes, _ in _NAMED:
        scenario = scenario_of(model, machine, nodes)
        changed = {key: factor * getattr(scenario.machine, key) for key, factor in factors.items()}
        scenario = replace(scenario, machine=replace(scenario.machine, **changed))
        per_node = CORES if machine == "cori-haswell" else 1
        found.append(per_node * speedup(scenario, STRATEGIES[name])[0])
    return found


def named_rows() -> list[list[str]]:
    """Return the six speedups, published and simulated."""
    rows = []
    for (model, name, machine, nodes, value), found in zip(_NAMED, named_speedups(), strict=True):
        words = "chunked, k = 9, f = 2" if name == "chunked" else name
        at = f"{CORES * nodes} cores" if machine == "cori-haswell" else f"{nodes} nodes"
        rows.append(_row(f"{model}, {words}, {at}", value, found))
    return rows


_VARIANTS: dict[str, dict[str, float]] = {
    "as fitted": {},
    "eq. 4.7 as printed: no time per byte in MPI": {"mpi_s_per_byte": 0.0},
    "half the time per byte in MPI": {"mpi_s_per_byte": 0.5},
    "twice the bandwidth": {"bytes_per_s": 2.0},
    "half the bandwidth": {"bytes_per_s": 0.5},
    "ten times the latency": {"latency_s": 10.0},
    "full speed with few samples": {"half_batch": 0.0},
    "kernels twice as fast": {"flops_per_s": 2.0},
    "memory twice as fast": {"memory_bytes_per_s": 2.0},
    "local sums ten times as fast": {"reduce_bytes_per_s": 10.0},
}


def sensitivity_rows() -> list[list[str]]:
    """Return the six speedups with one constant changed at a time."""
    published_row = ["published", *(f"{row[-1]:.0f}" for row in _NAMED)]
    rows = [
        [name, *(f"{found:.0f}" for found in named_speedups(**factors))]
        for name, factors in _VARIANTS.items()
    ]
    return [published_row, *rows]


def curve_rows() -> list[list[str]]:
    """Return the speedups of chapter 4 for 32 to 8,192 cores."""
    rows = []
    for model, name, machine, _, _ in _NAMED[:4]:
        found = [speedup(scenario_of(model, machine, n), STRATEGIES[name])[0] for n in NODES]
        rows.append([f"{model}, {name}", *(f"{CORES * value:.0f}" for value in found)])
    return rows


def other_rows() -> list[list[str]]:
    """Return the other printed speedups of [T] chapter 3, which had little weight in the fit."""
    rows = []
    for model, value in (("vgg-128", 54.0), ("vgg-256", 61.0), ("vgg-512", 80.0)):
        found, _ = speedup(scenario_of(model, "cori-haswell-2017", 128), chunked_2017)
        rows.append(_row(f"{model}, 128 nodes", value, found))
    for batch, value in ((128, 17.82), (512, 77.97)):
        curve = [
            speedup(scenario_of("vgg-a", "cori-haswell-2017", n, batch), chunked_2017)[0]
            for n in NODES[:8]
        ]
        rows.append(_row(f"vgg-a, {batch} samples, best of 1 to 128 nodes", value, max(curve)))
    return rows


def _row(name: str, value: float, found: float) -> list[str]:
    return [name, f"{value:.2f}", f"{found:.2f}", f"{100 * (found / value - 1):+.1f} %"]


def sweep_rows() -> list[list[str]]:
    """Return the sweeps of k and f; the paper prints which value is best."""
    scenario = scenario_of("vgg-a", "cori-haswell-2017", 128)
    ks = {k: speedup(scenario, partial(chunked_2017, k=k))[0] for k in (3, 6, 9, 12)}
    fs = {f: speedup(scenario, partial(chunked_2017, f=f))[0] for f in range(4)}
    rows = []
    for name, found, best in (("k", ks, 9), ("f", fs, 2)):
        shown = ", ".join(f"{value}: {s:.1f}" for value, s in found.items())
        own = max(found, key=lambda value: found[value])
        rows.append([name, str(best), str(own), shown])
    return rows


def exposed_rows() -> list[list[str]]:
    """Return from how many cores on communication is exposed: more than 1 % of the step."""
    rows = []
    for model, name, words in (
        ("vgg16", "allreduce", "512"),
        ("vgg16", "pcnn", "2048"),
        ("resnet50", "allreduce", "1024"),
        ("resnet50", "pcnn", "almost zero at 2048"),
    ):
        shares = {}
        for n in NODES:
            _, predicted = speedup(scenario_of(model, "cori-haswell", n), STRATEGIES[name])
            shares[CORES * n] = 100 * predicted.exposed_s / predicted.step_s
        first = next((n for n, part in shares.items() if part > 1), None)
        at_2048 = f"{shares[2048]:.1f} %"
        rows.append([f"{model}, {name}", words, str(first or "none"), at_2048])
    return rows


def auto_rows() -> list[list[str]]:
    """Return the planner's choice against the best single strategy of the thesis."""
    names = ("allreduce without overlap", "allreduce", "pcnn without overlap", "pcnn")
    rows = []
    for model in ("vgg16", "resnet50"):
        scenario = scenario_of(model, "cori-haswell", 256)
        times = {name: simulate(scenario, STRATEGIES[name](scenario)).step_s for name in names}
        best = min(times, key=lambda name: times[name])
        choice = choose(scenario)
        own_s = choice.predicted.step_s
        bound_s = max(choice.predicted.compute_s, choice.predicted.communication_s)
        rows.append(
            [
                model,
                f"{best}: {1e3 * times[best]:.1f}",
                f"{1e3 * own_s:.1f}",
                f"{times[best] / own_s:.2f}",
                f"{1e3 * bound_s:.1f}",
                choice.name,
            ]
        )
    return rows


# Model, samples per step of synchronous SGD, batch of a group, groups, interval: [L] IV.
LOCAL_SGD = (("resnet20", 512, 128, 4, 8), ("edsr", 128, 16, 8, 4))
PROCESSES = (1, 2, 4, 8, 16, 32, 64, 128)


def local_curves(study: tuple[str, int, int, int, int]) -> dict[str, list[float]]:
    """Return speedups per number of processes of [L] figures 5 and 9."""
    model, batch, local, n_groups, interval = study
    curves: dict[str, list[float]] = {}
    base_s = 0.0
    for n in PROCESSES:
        sync = simulate(scenario_of(model, "cori-knl", n, batch), pcnn(_at(study, n, batch)))
        base_s = base_s or sync.step_s / batch
        samples = {"synchronous": batch / sync.step_s}
        for name, build in (("allreduce-based", per_layer_allreduce), ("sharded averaging", pcnn)):
            if n < n_groups:
                samples[name] = samples["synchronous"]
                continue
            group = _at(study, n // n_groups, local)
            step = simulate_local_sgd(group, build(group), n_groups, interval)
            samples[name] = n_groups * local / step.step_s
        for name, rate in samples.items():
            curves.setdefault(name, []).append(rate * base_s)
    return curves


def _at(study: tuple[str, int, int, int, int], n_ranks: int, batch: int) -> Scenario:
    return scenario_of(study[0], "cori-knl", n_ranks, batch)


def local_rows(curves: dict[str, list[float]]) -> list[list[str]]:
    """Return a curve per line."""
    return [[name, *(f"{value:.1f}" for value in curve)] for name, curve in curves.items()]


def constants_rows(machines: Sequence[Machine]) -> list[list[str]]:
    """Return a constant per line."""
    return [[name, *(f"{getattr(m, name):.3g}" for m in machines)] for name in _CONSTANTS]


def page() -> str:
    """Return the study as Markdown."""
    machines = [MACHINES[name] for name in ("cori-haswell-2017", "cori-haswell", "cori-knl")]
    text = Path(__file__).with_name("thesis_scaling.md").read_text("utf-8")
    cells = {
        "constants": grid(["name", *(m.name for m in machines)], constants_rows(machines)),
        "named": grid(["name", "published", "simulated", "residual"], named_rows()),
        "sensitivity": grid(
            ["name", *(f"{row[0]}, {row[1]}" for row in _NAMED)], sensitivity_rows()
        ),
        "curves": grid(["name", *(str(CORES * n) for n in NODES)], curve_rows()),
        "other": grid(["name", "published", "simulated", "residual"], other_rows()),
        "sweeps": grid(["name", "best published", "best simulated", "speedups"], sweep_rows()),
        "exposed": grid(["name", "published", "simulated", "exposed at 2048"], exposed_rows()),
        "auto": grid(
            ["name", "best single, ms", "auto, ms", "times faster", "its bound, ms", "made of"],
            auto_rows(),
            ("name", "made of"),
        ),
    }
    for study in LOCAL_SGD:
        head = ["name", *map(str, PROCESSES)]
        cells[study[0]] = grid(head, local_rows(local_curves(study)))
    for name, lines in cells.items():
        text = text.replace(f"{{{name}}}", "\n".join(lines))
    return text


def main() -> None:
    """Write page and picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs"))
    options = parser.parse_args()
    (options.output / "thesis-scaling.md").write_text(page(), "utf-8")
    from benchmarks.thesis_picture import draw

    draw(options.output / "thesis-scaling.png")


if __name__ == "__main__":
    main()
