"""Time steps of whole plans on 16 to 256 virtual ranks, beside the planner's forecast.

    python tools/simulate_steps.py --model resnet50 --ranks 16,64 --machine ethernet-10g
    python tools/simulate_steps.py --output docs/results     # all cases: table, JSON and picture

Each rank runs the engine (`custom_ops/comm`) on a simulated MPI and clock; its program is the
planner's list of tasks. Vectors have no contents: computation takes the planner's time, sums,
copies and messages that of their bytes on the planner's machine. What is compared is therefore
the engine: its messages, their order, what it waits for, and when it looks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import simulate_engine

from benchmarks.provenance import describe
from tfscale.plan import parts
from tfscale.plan.buckets import auto_bucket_bytes
from tfscale.plan.choose import plain_plan
from tfscale.plan.costs import Scenario
from tfscale.plan.forecast import grid
from tfscale.plan.machines import Machine, find_machine
from tfscale.plan.parts import LayerPlan
from tfscale.plan.published import published
from tfscale.plan.simulate import COMPUTE, Task, simulate, step_tasks

RANKS = (16, 32, 64, 128, 256)
# Samples of a rank: computation takes about as long as the exchange, or a part of it.
BATCHES = {
    "resnet50": {"ethernet-1g": 8, "ethernet-10g": 2},
    "vgg-a": {"ethernet-1g": 16, "ethernet-10g": 8},
}
LIMIT_S = 3600.0
# As in tfscale.config.Settings.
_CHUNK_BYTES, _WINDOW_BYTES, _HOST_MEMORY_BYTES = 1 << 20, 128 << 20, 512 * 1024
BEST_WAY = -1
_KINDS = {"allreduce": "r", "alltoall": "s", "gather": "g"}


@dataclass(frozen=True)
class Case:
    """One model, machine, exchange and number of ranks."""

    model: str
    machine: str
    exchange: str  # "allreduce" or "sharded"
    n_ranks: int
    ranks_per_host: int = 1

    def scenario(self) -> Scenario:
        """The planner's step, with equally many samples on each rank."""
        batch = BATCHES[self.model][self.machine] * self.n_ranks
        machine = machine_of(self.machine, self.ranks_per_host)
        return Scenario(published(self.model), machine, self.n_ranks, batch)

    def plan(self) -> LayerPlan:
        """The plan of `tfscale.Allreduce()` or `tfscale.Sharded(dense="weights")`."""
        scenario = self.scenario()
        if self.exchange == "allreduce":
            return plain_plan(scenario)
        size = auto_bucket_bytes(parts.specs_of(scenario.table))
        return parts.bucketed(scenario.table, size, "sharded")


@dataclass(frozen=True)
class Timed:
    """Seconds of a step, and what a rank sends in it."""

    step_s: float
    n_messages: float
    n_bytes: float


def machine_of(name: str, ranks_per_host: int) -> Machine:
    """The machine; with several ranks per host these have 4 GB/s and 5 us between them."""
    machine = find_machine(name)
    if ranks_per_host == 1:
        return machine
    return replace(
        machine, ranks_per_host=ranks_per_host, host_latency_s=5e-6, host_bytes_per_s=4e9
    )


def written(scenario: Scenario, plan: LayerPlan, n_steps: int, radix: int = BEST_WAY) -> str:
    """The input of the simulator: machine, options of the engine, and the tasks of a step."""
    # In one piece each: the engine cuts itself.
    tasks = step_tasks(scenario, replace(plan, piece_bytes=0))
    return _machine_lines(scenario.machine, scenario.n_ranks, radix, n_steps, len(tasks)) + "".join(
        _task_lines(scenario, plan, tasks)
    )


def allreduce_input(machine: Machine, n_ranks: int, n_bytes: int, radix: int) -> str:
    """The input for allreduces of a vector, one after another."""
    head = _machine_lines(machine, n_ranks, radix, n_steps=6, n_tasks=2)
    return f"{head}c 0 0 -1 0 0 1 1\nr 0 0 0 1 {n_bytes // 4} 1 0 0\n"


def _machine_lines(machine: Machine, n_ranks: int, radix: int, n_steps: int, n_tasks: int) -> str:
    latency_s = machine.latency_s if machine.host_latency_s is None else machine.host_latency_s
    inside = machine.host_bytes_per_s or machine.bytes_per_s
    rates = (machine.reduce_bytes_per_s, machine.memory_bytes_per_s)
    head = [n_ranks, machine.ranks_per_host, _ns(machine.latency_s), machine.bytes_per_s / 1e9]
    head += [_ns(latency_s), inside / 1e9, *(rate / 1e9 for rate in rates)]
    options = [_CHUNK_BYTES, _WINDOW_BYTES, _HOST_MEMORY_BYTES, radix, n_steps, n_tasks]
    return f"{' '.join(map(str, head))}\n{' '.join(map(str, options))}\n"


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _task_lines(scenario: Scenario, plan: LayerPlan, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield a line for each task: kind, priority, time, slot, tensors, and what ends before."""
    parameters = scenario.table.parameters
    counts = iter([[parameters[p].n_values for p in part.parameters] for part in plan.parts])
    # The engine's order: gradients as they become ready, then parameters, first layers first.
    sent = [i for i, task in enumerate(tasks) if task.name in _KINDS]
    order = sorted(sent, key=lambda i: (tasks[i].name == "gather", tasks[i].priority))
    own: list[int] = []
    for number, task in enumerate(tasks):
        slot, tensors = -1, []
        kind = _KINDS.get(task.name, "c" if task.stream == COMPUTE else "j")
        if kind != "c" and kind != "j":
            slot = order.index(number)
            own = next(counts) if kind != "g" else own
            tensors = own if kind != "g" else [sum(own)]
        lists = (tensors, task.after, task.after_previous)
        numbers = [str(value) for values in lists for value in (len(values), *values)]
        yield f"{kind} {task.priority} {_ns(task.duration_s)} {slot} {' '.join(numbers)}\n"


def timed(program: Path, text: str) -> Timed:
    """Run the simulator; the first step, with what precedes it, does not count."""
    done = subprocess.run(
        [str(program)], input=text, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"steps were not simulated: {done.stderr[:2000]}")
    rows = [list(map(int, line.split())) for line in done.stdout.splitlines()][1:]
    middle = [statistics.median(b[i] - a[i] for a, b in pairwise(rows)) for i in range(3)]
    return Timed(middle[0] * 1e-9, *middle[1:])


def row_of(case: Case, virtual: Timed) -> dict:
    """A simulated case, with the planner's forecast."""
    predicted = simulate(case.scenario(), case.plan())
    return {
        **asdict(case),
        **asdict(virtual),
        "compute_s": predicted.compute_s,
        "planned_s": predicted.step_s,
        "ratio": predicted.step_s / virtual.step_s,
    }


def with_forecast_of_now(row: dict) -> dict:
    """A row that was kept, with what the planner says now."""

    def made(kind: type) -> Any:
        return kind(**{field.name: row[field.name] for field in fields(kind)})

    return row_of(made(Case), made(Timed))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield what is compared, small numbers of ranks first."""
    for n_ranks in options.ranks:
        for model in options.model:
            for machine in options.machine:
                for exchange in ("allreduce", "sharded"):
                    for per_host in options.ranks_per_host:
                        yield Case(model, machine, exchange, n_ranks, per_host)


def table(rows: Sequence[dict]) -> list[str]:
    """The lines of the table in Markdown."""
    head = ["model", "machine", "per host", "exchange", "ranks", "virtual ms", "planner ms"]
    head += ["planner / virtual", "compute ms", "messages", "MB sent"]
    body = [
        [
            *(row[name] for name in ("model", "machine", "ranks_per_host", "exchange", "n_ranks")),
            *(f"{1e3 * row[name]:.0f}" for name in ("step_s", "planned_s")),
            f"{row['ratio']:.2f}",
            f"{1e3 * row['compute_s']:.0f}",
            f"{row['n_messages']:.0f}",
            f"{row['n_bytes'] / 1e6:.0f}",
        ]
        for row in rows
    ]
    return grid(head, body, ("model", "machine", "exchange"))


def draw(rows: Sequence[dict], path: Path) -> None:
    """Write the picture: a panel for each model, machine and number of ranks per host."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def panel_of(row: dict) -> tuple:
        return row["model"], row["machine"], row["ranks_per_host"]

    # A line needs two numbers of ranks.
    panels = sorted(
        {
            panel_of(row)
            for row in rows
            if len({other["n_ranks"] for other in rows if panel_of(other) == panel_of(row)}) > 1
        },
        key=lambda panel: (panel[0], panel[2], panel[1]),
    )
    if not panels:
        return
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=(4 * n_columns, 3.4 * n_rows), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, panels, strict=False):
        for color, exchange in zip(("C0", "C1"), ("allreduce", "sharded"), strict=True):
            own = [row for row in rows if panel_of(row) == panel and row["exchange"] == exchange]
            own.sort(key=lambda row: row["n_ranks"])
            ranks = [row["n_ranks"] for row in own]
            virtual = [1e3 * row["step_s"] for row in own]
            planned = [1e3 * row["planned_s"] for row in own]
            axis.plot(ranks, planned, "-", color=color, label=f"{exchange}, planner")
            axis.plot(ranks, virtual, "o", color=color, label=f"{exchange}, virtual ranks")
        own = [row for row in rows if panel_of(row) == panel]
        ranks = sorted({row["n_ranks"] for row in own})
        computed = [
            1e3 * min(row["compute_s"] for row in own if row["n_ranks"] == n) for n in ranks
        ]
        axis.plot(ranks, computed, ":", color="0.6", label="computation")
        per_host = f", {panel[2]} ranks per host" if panel[2] > 1 else ""
        axis.set_title(f"{panel[0]}, {panel[1]}{per_host}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ranks, list(map(str, ranks)))
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.set_xlabel("ranks")
        axis.set_ylabel("ms per step")
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    lines = axes.flat[0].get_legend_handles_labels()
    figure.legend(*lines, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def print_relay() -> None:
    """Print the times of allreduces of 64 KB on 64 ranks, relayed and sent directly."""
    program = simulate_engine.build(times_steps=True)
    machine = Machine("40 us, 1 Gbit/s", 40e-6, 125e6, 4e9, 1e12, 15e9)
    for name, radix in (("relayed", BEST_WAY), ("direct", 0)):
        step = timed(program, allreduce_input(machine, 64, 65536, radix))
        print(f"{name}: {1e3 * step.step_s:.2f} ms, {step.n_messages:.0f} messages")


def save(rows: Sequence[dict], path: Path) -> None:
    """Write rows in the order of the table."""
    names = ("model", "machine", "ranks_per_host", "n_ranks", "exchange")
    ordered = sorted(rows, key=lambda row: [row[name] for name in names])
    made = {**describe(), "command": ["python", "tools/simulate_steps.py", *sys.argv[1:]]}
    path.write_text(json.dumps({"provenance": made, "rows": ordered}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all cases and print them; with `--output` write JSON and a picture, too."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=_names, default=list(BATCHES), help="default: all")
    parser.add_argument("--machine", type=_names, default=["ethernet-1g", "ethernet-10g"])
    parser.add_argument("--ranks", type=_numbers, default=list(RANKS))
    parser.add_argument("--ranks-per-host", type=_numbers, default=[1])
    parser.add_argument("--steps", type=int, default=4, help="the first is not timed")
    parser.add_argument("--relay", action="store_true", help="64 KB on 64 ranks, and no steps")
    parser.add_argument("--forecast", action="store_true", help="again, of what --output holds")
    parser.add_argument("--output", type=Path, help="folder; its rows of other cases are kept")
    options = parser.parse_args(argv)
    if options.relay:
        print_relay()
        return 0
    if options.forecast and not options.output:
        parser.error("--forecast needs --output, the folder of the rows.")
    for name in {*options.machine} - {*BATCHES[next(iter(BATCHES))]}:
        parser.error(f"--machine must be one of those with a batch. Received: {name}.")
    path = options.output and options.output / "virtual-steps.json"
    rows = json.loads(path.read_text())["rows"] if path and path.exists() else []
    if options.forecast:
        rows = [with_forecast_of_now(row) for row in rows]
    else:
        program = simulate_engine.build(times_steps=True)
        for case in cases(options):
            virtual = timed(program, written(case.scenario(), case.plan(), options.steps))
            row = row_of(case, virtual)
            print(table([row])[-1], flush=True)
            key = asdict(case).items()
            rows = [old for old in rows if not key <= old.items()] + [row]
            if path:  # a case may take minutes
                save(rows, path)
    if path:
        save(rows, path)
        rows = json.loads(path.read_text())["rows"]
        draw(rows, path.with_suffix(".png"))
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
