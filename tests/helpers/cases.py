"""Marks of the functions that `tfscale.testing.spawn` runs in tests/parallel."""

import ast
import functools
import os
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tfscale.testing import inspect

ALL_SIZES = (1, 2, 3, 4)
EXTENT = os.environ.get("RANKS", "by turns")
HAS_ALL_SIZES = EXTENT == "all"
_Function = TypeVar("_Function", bound=Callable[[], None])


def sizes(*allowed: int, timeout_s: float | None = None) -> Callable[[_Function], _Function]:
    """Restrict a case to some numbers of ranks, or give it a time limit of its own."""
    return lambda function: function


def engine_only(why: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Leave a case out on the Horovod backend."""

    def mark(function: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(function)
        def body() -> None:
            require_engine(why)
            function()

        body.engine_only = why  # type: ignore[attr-defined]
        return body

    return mark


def require_engine(why: str) -> None:
    """Leave out the case that calls this, or all cases of a module, on the Horovod backend."""
    if inspect.backend_name() == "horovod":
        raise unittest.SkipTest(f"not on Horovod: {why}")


def cases_of(module: str) -> list[str]:
    """Return the names of the cases of a module, which only ranks import."""
    source = Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")
    functions = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)]
    return [f"{module}:{f.name}" for f in functions if f.name.startswith("case_")]


def read_mark(function: ast.FunctionDef) -> tuple[tuple[int, ...], float | None]:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") == "sizes":
            allowed = tuple(ast.literal_eval(argument) for argument in mark.args)
            limits = {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
            return allowed or ALL_SIZES, limits.get("timeout_s")
    return ALL_SIZES, None


def find_cases() -> list[tuple[str, int, float | None]]:
    """Return (case, size, limit in seconds or None), sizes ascending."""
    found = []
    for file in sorted(Path(__file__).parents[1].joinpath("parallel").glob("cases_*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("case_"):
                allowed, limit_s = read_mark(node)
                case = f"tests.parallel.{file.stem}:{node.name}"
                found += [(case, size, limit_s) for size in allowed]
    return sorted(found, key=lambda item: item[1])
