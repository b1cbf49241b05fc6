"""Cells of each suite: the systems, models and places, as cells for the harness."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks import layer_tables, overlap_cases
from benchmarks.harness import Cell
from benchmarks.launch import has_ddp
from benchmarks.places import MEMORY, parse_place

QUICK, TABLE, FULL = "quick", "table", "full"
SMALL_MODELS = ("resnet20", "edsr16")
# One process beside two ranks: also models whose steps take a few milliseconds.
SPEEDUP_MODELS = ("resnet20", "edsr16", "vgg_like", "lstm", "dense512")
LARGE_MODELS = ("vgg_like", "vgg_a", "resnet50")
MODELS = (*LARGE_MODELS, *SMALL_MODELS)
# Only where they are asked for: the VGG is that of recipes/whole_runs.py.
TRAINED_MODELS = (*(f"vgg_small_{batch}" for batch in (128, 256, 512)), "lstm", "dense512")
# Whose layers have times to sleep, see `benchmarks.sleeping`.
SLEEPING_MODELS = ("resnet50", "vgg_a", "transformer", "edsr16")
EXCHANGES = ("allreduce", "chunked", "sharded", "auto")
LOCAL = ("local8", "local16", "local8-bf16", "local16-bf16", "local4-overlap", "local8-overlap")

# Steps and steps for warming up of models whose steps are so short that a few of them tell little.
_SHORT = {"resnet20": (40, 5), "edsr16": (10, 2), **dict.fromkeys(TRAINED_MODELS, (100, 5))}

# PyTorch's, which `make ddp` installs into an environment of their own.
TORCH_SYSTEMS = ("ddp-compute", "ddp", "ddp-fp16", "ddp-powersgd")
TORCH_MODELS = ("resnet50", "vgg_like")
COMPUTE_ONLY = ("compute", "ddp-compute")
SLEEPING_TORCH = ("ddp-compute", "ddp", "ddp-fsdp")
# Where layers sleep all rounds have these; two are enough to tell others from them.
_IN_ALL_ROUNDS = ("compute", "tcp", "tfscale-sharded")

# A number without an interval is enough for these, and two rounds for large models, whose systems
# are far apart, so that the tables take two hours.
_ONCE = ("mwms", *(f"tfscale-{name}" for name in LOCAL))


@dataclass(frozen=True)
class Choice:
    """The part of a suite to measure.

    Attributes:
        extent: `QUICK`, `TABLE` (what the documentation shows) or `FULL` (every cell).
        places: Only these, see `benchmarks.places`; empty for the extent's own.
        models: Only these; empty for the extent's own.
        exchanges: tfscale's, only these, for the overlap suite such cases as "b32-k7-f2"; empty for
            the extent's own.
        systems: Only these of all systems, by name; empty for all.
    """

    extent: str = TABLE
    places: Sequence[str] = ()
    models: Sequence[str] = ()
    exchanges: Sequence[str] = ()
    systems: Sequence[str] = ()


@dataclass(frozen=True)
class Local:
    """Local SGD: groups, steps between averages, steps that one may take, exchange in a group."""

    groups: int
    interval: int
    overlap: int
    within: str = "allreduce"


def parse_local(exchange: str, n_ranks: int) -> Local | None:
    """Read the name of an exchange that is local SGD, or return None.

    Args:
        exchange: As "local8", an interval of 8 and one group per rank; "local8-g2", two groups;
            "local8-g2-overlap3", whose averages may take 3 steps, without a number 7, the most;
            "local8-g2-sharded", `Sharded` within a group, so that a rank averages its part.
        n_ranks: Of all groups together.
    """
    wires = "bf16|int8|int4|sparse"
    found = re.fullmatch(
        rf"local(\d+)(?:-g(\d+))?(-overlap(\d*))?(?:-(sharded))?(?:-(?:{wires}))?", exchange
    )
    if found is None:
        return None
    interval = int(found[1])
    overlap = int(found[4] or interval - 1) if found[3] else 0
    return Local(int(found[2] or n_ranks), interval, overlap, found[5] or "allreduce")


def _blocks(system: str, n_ranks: int, repeats: int, warmup: int) -> tuple[str, ...]:
    """The arguments that say how often to measure: of local SGD only whole intervals."""
    local = parse_local(system.removeprefix("tfscale-"), n_ranks)
    block: tuple[str, ...] = ()
    if local and local.interval > 1:
        repeats, warmup = max(3, -(-repeats // local.interval)), 1
        block = ("--block", str(local.interval))
    return ("--repeats", str(repeats), "--warmup", str(warmup), *block)


def has_horovod() -> bool:
    """Return whether Horovod is installed."""
    return importlib.util.find_spec("horovod") is not None


def _baselines(*others: str) -> list[str]:
    return [*(["horovod"] if has_horovod() else []), *others]


def step_cells(choice: Choice) -> list[Cell]:
    """Return the cells of the training steps; computing alone needs no links.

    Where layers sleep, what a stream of TCP carries is measured with them: it makes the limit.
    """
    places = {QUICK: ("1gbit",), TABLE: ("1gbit", MEMORY), FULL: ("1gbit", MEMORY, "250mbit")}
    models = {QUICK: ("vgg_like", "resnet20"), TABLE: MODELS, FULL: MODELS}
    return [
        cell
        for place in choice.places or places[choice.extent]
        for model in choice.models
        or (SLEEPING_MODELS if is_asleep(place) else models[choice.extent])
        for cell in (_sleeping_steps if is_asleep(place) else _steps)(model, place, choice)
    ]


def is_asleep(place: str) -> bool:
    """True for a place where layers sleep."""
    return parse_place(place).sleep_speed is not None


def _sleeping_steps(model: str, place: str, choice: Choice) -> list[Cell]:
    """Return the cells of one model whose layers sleep."""
    if model not in SLEEPING_MODELS:
        raise ValueError(
            f"models must be among {', '.join(SLEEPING_MODELS)} where layers sleep. Received: "
            f"{model} at {place}. `python -m benchmarks.layer_times` measures the times of others."
        )
    where = parse_place(place)
    rounds = {QUICK: (5, 2), TABLE: (10, 3), FULL: (20, 3)}[choice.extent]
    asleep = ("--model", model, "--sleep", str(where.sleep_speed))
    names = [f"tfscale-{exchange}" for exchange in choice.exchanges or EXCHANGES]
    systems = ["compute", "tcp", *names, *_baselines(*(SLEEPING_TORCH if has_ddp() else ()))]
    alone = f"sleep{where.sleep_speed:g}-1x{where.n_ranks}@{MEMORY}"
    n_bytes = str(layer_tables.gradient_bytes(model))
    stream = ("--bytes", n_bytes, "--repeats", str(rounds[0]))
    cells = []
    for system in systems:
        if choice.systems and system not in choice.systems:
            continue
        step = (*asleep, *_blocks(system, where.n_ranks, *rounds))
        suite, given = ("collectives", stream) if system == "tcp" else ("step", step)
        there = alone if system in COMPUTE_ONLY else place
        most = 0 if system in _IN_ALL_ROUNDS else 2
        cells.append(Cell(suite, f"{model} {place}", system, there, where.n_ranks, given, most))
    return cells


def _steps(model: str, place: str, choice: Choice) -> list[Cell]:
    """Return the cells of one model at one place."""
    counts = {QUICK: (3, 1), TABLE: (6, 2), FULL: (10, 2)}[choice.extent]
    if model in _SHORT and choice.extent != QUICK:
        counts = _SHORT[model]
    group, n_ranks = f"{model} {place}", 2 if place == MEMORY else parse_place(place).n_ranks
    cells = []
    for system in _systems(model, place, choice):
        arguments = ("--model", model, *_blocks(system, n_ranks, *counts))
        where = MEMORY if system in COMPUTE_ONLY else place
        most = 0
        if choice.extent == TABLE and not choice.systems:
            most = 1 if system in _ONCE else 2 if model in LARGE_MODELS else 0
        cells.append(Cell("step", group, system, where, n_ranks, arguments, most))
    return cells


def _systems(model: str, place: str, choice: Choice) -> list[str]:
    """Return the systems that train a model, in the order of their turns."""
    exchanges = choice.exchanges
    others = ["mwms"]
    is_in_memory = choice.extent == TABLE and place == MEMORY
    if is_in_memory or (choice.extent == TABLE and model == "edsr16"):
        exchanges, others = exchanges or ("allreduce", "auto"), []
    elif choice.extent == TABLE and model == "resnet20":
        others = []
    elif not exchanges and model == "resnet50" and choice.extent != QUICK:
        exchanges = (*EXCHANGES, *LOCAL)
    ours = [f"tfscale-{exchange}" for exchange in exchanges or EXCHANGES]
    if "auto" in (exchanges or EXCHANGES):
        ours.append("tfscale-auto-fit")  # as users train; the others have a step of their own
    alone = ["compute", *(["in-step"] if model in SMALL_MODELS else [])]
    found = [*([] if is_in_memory else alone), *ours, *_baselines(*others)]
    if (choice.extent == FULL or choice.systems) and model in TORCH_MODELS and has_ddp():
        found += TORCH_SYSTEMS
    return [s for s in found if not choice.systems or s in choice.systems]


def fc1_cells(choice: Choice) -> list[Cell]:
    """Return the cells of VGG-16's first dense layer alone ([T] figure 4.6)."""
    places = choice.places or (("1gbit",) if choice.extent != FULL else ("1gbit", MEMORY))
    ours = ("allreduce", "sharded-weights", "sharded-partial", "chunked")
    systems = ("compute", "mpi", *(f"tfscale-{e}" for e in ours), *_baselines())
    arguments = ("--model", "fc1", "--repeats", "3", "--warmup", "1")
    return [
        Cell("step", f"fc1 {place}", s, MEMORY if s == "compute" else place, 4, arguments, 1)
        for place in places
        for s in systems
    ]


def gather_cells(choice: Choice) -> list[Cell]:
    """Return the cells of sharded steps that do and do not hide the gather of parameters.

    What hides it is measured in steps of their own, as TensorFlow's profiler costs time.
    """
    steps = ("compute", "tfscale-sharded", "tfscale-sharded-waiting")
    cells = []
    for place in choice.places or ("1gbit",):
        for model in ("resnet50_128", "resnet50_256"):
            arguments = ("--model", model, "--repeats", "4", "--warmup", "1")
            group = f"{model} {place}"
            for system in steps:
                where = MEMORY if system == "compute" else place
                cells.append(Cell("step", group, system, where, 4, arguments))
            cells.append(Cell("gathers", group, "tfscale-sharded", place, 4, arguments))
    return cells


def single_cells(choice: Choice) -> list[Cell]:
    """Return the cells of one process with and without tfscale, which take turns inside."""
    blocks = "4" if choice.extent == QUICK else "12"
    models = choice.models or (("resnet20",) if choice.extent == QUICK else MODELS)
    return [
        Cell("single", model, "both", MEMORY, 1, ("--model", model, "--repeats", blocks), 1)
        for model in models
    ]


def speedup_cells(choice: Choice) -> list[Cell]:
    """Return the cells of two ranks with a core each, beside one process with one core, or both.

    The process with one core has half of the batch, as each of the ranks.
    """
    quick = choice.extent == QUICK
    counts = {QUICK: (10, 3), TABLE: (60, 10), FULL: (200, 20)}[choice.extent]
    ours = [f"tfscale-{name}" for name in choice.exchanges or ("allreduce", "sharded", "auto")]
    cells = []
    for model in choice.models or (("dense512",) if quick else SPEEDUP_MODELS):
        few = _SHORT.get(model, counts) if model in MODELS else counts
        common = ("--model", model, "--repeats", str(few[0]), "--warmup", str(few[1]))
        for system in ("one-core", "both-cores", "compute", "in-step", *ours, *_baselines()):
            n_ranks = 1 if system in ("one-core", "both-cores") else 2
            given = (*common, *(() if system == "both-cores" else ("--pin",)))
            if system == "one-core":
                given += ("--share", "2")
            if not choice.systems or system in choice.systems:
                cells.append(Cell("speedup", model, system, MEMORY, n_ranks, given))
    return cells


def report_cells(choice: Choice) -> list[Cell]:
    """Return the cells of steps with and without a CommunicationReport, in turn inside."""
    blocks = "4" if choice.extent == QUICK else "12"
    return [
        Cell("report", model, "both", MEMORY, 2, ("--model", model, "--repeats", blocks), 1)
        for model in choice.models or ("resnet20",)
    ]


def fit_cells(choice: Choice) -> list[Cell]:
    """Return the cells of `fit` beside `train_on_batch`."""
    quick = choice.extent == QUICK
    cells = []
    for place in choice.places or ("1gbit",):
        for model in choice.models or (("vgg_like",) if quick else ("resnet50", "vgg_a")):
            for exchange in choice.exchanges or ("allreduce", "sharded"):
                arguments = ("--model", model, "--exchange", exchange, "--repeats", "4")
                group, n_ranks = f"{model} {exchange} {place}", parse_place(place).n_ranks
                cells.append(Cell("fit", group, "both", place, n_ranks, arguments))
    return cells


def keras_cells(choice: Choice) -> list[Cell]:
    """Return the cells of `fit` on TensorFlow with tfscale, and on PyTorch with `DataParallel`."""
    systems = ["compute", "allreduce", "sharded"]
    names = [f"keras-tensorflow-{name}" for name in systems]
    names += ["keras-torch-compute", "keras-torch"] if has_ddp() else []
    return [
        Cell(
            "keras",
            f"{model} {place}",
            name,
            MEMORY if name.endswith("-compute") else place,
            parse_place(place).n_ranks,
            ("--model", model, "--repeats", "2"),
        )
        for place in choice.places or ("1gbit",)
        for model in choice.models or ("vgg_like", "resnet50")
        for name in names
        if not choice.systems or name in choice.systems
    ]


def overlap_cells(choice: Choice) -> list[Cell]:
    """Return the cells of steps under `Chunked` by batch, k and f ([T] figures 3.7 to 3.10).

    Each case has processes of its own: four ranks with a model of VGG-A's size each fill 24 GiB.
    """
    known = [str(case) for case in overlap_cases.cases()]
    chosen = choice.exchanges or (known[:1] if choice.extent == QUICK else known)
    return [
        Cell(
            "overlap",
            f"{model} {name} {place}",
            "tfscale-chunked",
            place,
            parse_place(place).n_ranks,
            ("--model", model, "--repeats", "6", "--warmup", "2", "--case", name),
            1,
        )
        for place in choice.places or ("1gbit",)
        for model in choice.models or ("vgg_a",)
        for name in chosen
    ]


SUITES: dict[str, Callable[[Choice], list[Cell]]] = {
    "step": step_cells,
    "fc1": fc1_cells,
    "gathers": gather_cells,
    "single": single_cells,
    "speedup": speedup_cells,
    "report": report_cells,
    "fit": fit_cells,
    "keras": keras_cells,
    "overlap": overlap_cells,
}


def lacks_torch(suites: Sequence[str], choice: Choice) -> bool:
    """Return whether PyTorch's systems are asked for and left out, as it is not installed."""
    is_wanted = not set(choice.systems).isdisjoint(TORCH_SYSTEMS)
    is_wanted = is_wanted or (choice.extent == FULL and not choice.systems)
    return is_wanted and "step" in suites and not has_ddp()


def cells_of(suites: Sequence[str], choice: Choice) -> list[Cell]:
    """Return the cells of several suites.

    Args:
        suites: Names among `SUITES`.
        choice: What of them is measured.

    Raises:
        ValueError: `choice.systems` has a name that none of the suites has.
    """
    everything = replace(choice, systems=())
    known = dict.fromkeys(cell.system for suite in suites for cell in SUITES[suite](everything))
    known |= dict.fromkeys(TORCH_SYSTEMS if "step" in suites else ())
    unknown = [system for system in choice.systems if system not in known]
    if unknown:
        raise ValueError(
            "systems must be among those of the suites, models, places and exchanges asked for. "
            f"Received: {', '.join(unknown)}. Choose from {', '.join(known)}; --exchanges adds "
            "others of tfscale, `make horovod` adds horovod, `make ddp` PyTorch's."
        )
    return [cell for suite in suites for cell in SUITES[suite](choice)]
