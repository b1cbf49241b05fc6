"""The repository's sources as syntax trees, for the tests about them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = sorted((ROOT / "tfscale").rglob("*.py"))
MODULES = [
    path
    for room in ("tfscale", "recipes", "benchmarks", "tools", "tests")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "_lib" not in path.parts
]
CPP = sorted((ROOT / "custom_ops").glob("*/*.h")) + sorted((ROOT / "custom_ops").glob("*/*.cc"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported_names(path: Path, in_functions: bool = True) -> Iterator[str]:
    """Full names of what a module imports, by default in function bodies, too."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = parse(path)
    for node in ast.walk(tree) if in_functions else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
