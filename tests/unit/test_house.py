"""The layout of the library: rooms in a written order, imports that only go down, no circles.

Reads sources only; nothing of tfscale is imported.
"""

import ast
import graphlib
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from tests.helpers.sources import ROOT, imported_names, parse

HOUSE = ROOT / "tfscale"

# From the ground up: a room imports what stands before it, and itself.
ROOMS = (
    "config",
    "missing",
    "internals",
    "files",
    "native",
    "plan",
    "comm",
    "trace",
    "start",
    "data",
    "exchange",
    "layers",
    "optimizer",
    "local_sgd",
    "measure",
    "monitor",
    "fit",
    "checkpoints",
    "callbacks",
    "transparent",
    "tune",
    "launcher",
    "ray",
    "keras",
    "testing",
)
MAX_MODULES = 20  # of a package
MIN_LINES = 100  # of a module that only one other imports


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {dotted(p): p for p in sorted(HOUSE.rglob("*.py")) if "_lib" not in p.parts}


@cache
def imports() -> dict[str, set[str]]:
    """Modules of tfscale that each module imports, inside of functions too.

    The package's own `__init__` and those that only collect names are no rooms of their own.
    """
    graph: dict[str, set[str]] = {}
    for name, path in FILES.items():
        found = {n if n in FILES else n.rpartition(".")[0] for n in imported_names(path)}
        graph[name] = (found & FILES.keys()) - {name, "tfscale"}
    del graph["tfscale"]
    return graph


# A module, or something in it, that a text names: of what a command starts, or imports later.
NAMED = re.compile(r"tfscale(?:\.\w+)+(?::\w+)?")


def named(module: str) -> set[str]:
    """Modules of tfscale that texts in a module's code name; docstrings and messages do not."""
    texts = (
        node.value.partition(":")[0]
        for node in ast.walk(parse(FILES[module]))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAMED.fullmatch(node.value)
    )
    return FILES.keys() & texts


def room_of(module: str) -> str:
    return module.split(".")[1]


def test_no_import_circles():
    graphlib.TopologicalSorter(imports()).prepare()  # its error names the circle


def test_every_module_is_in_a_room():
    unknown = {m for m in imports() if room_of(m) not in ROOMS}
    assert not unknown, "put it in a room of tests/unit/test_house.py, or write down a new one"


def test_imports_go_down():
    order = {room: floor for floor, room in enumerate(ROOMS)}
    upward = {
        f"{importer} -> {module}"
        for importer, modules in imports().items()
        for module in modules | named(importer)
        if order[room_of(module)] > order[room_of(importer)]
    }
    assert not upward


def test_packages_are_small():
    sizes = Counter(dotted(path.parent) for path in FILES.values() if path.name != "__init__.py")
    assert {name: n for name, n in sizes.items() if n > MAX_MODULES} == {}


def test_no_satellites():
    """A short module with one importer is a section of that importer."""
    importers = defaultdict(set)
    for importer, modules in imports().items():
        for module in modules:
            importers[module].add(importer)
    lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    public = (FILES["tfscale"].read_text(), FILES["tfscale.callbacks"].read_text())
    small = {
        name
        for name, path in FILES.items()
        if lines[name] < MIN_LINES
        and len(importers[name]) == 1
        and path.name != "__init__.py"
        and not any(f'"{name.removeprefix("tfscale.")}"' in text for text in public)
        and next(iter(importers[name])) != "tfscale.callbacks"
    }
    assert not small
