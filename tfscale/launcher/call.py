"""A function and its results as files, and the program of the ranks that call the function.

`tfscale.run` writes the function into a folder, each rank runs `python -m tfscale.launcher.call
FOLDER`, and `tfscale.run` reads what the ranks have returned. Functions, classes and lambdas of a
program or a notebook are pickled by value, so that no rank imports the caller's script.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import importlib
import inspect
import linecache
import os
import pickle
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import cloudpickle

from tfscale.comm import process
from tfscale.config import ConfigError, environment, replace_environment
from tfscale.files import write_atomically
from tfscale.launcher.restarting import RESTART_VARIABLE

FILE = "call"
# Name the folder of the file, and the working folder, where hosts have their own.
FOLDER_VARIABLE, START_IN_VARIABLE = "TFSCALE_CALL_FOLDER", "TFSCALE_CALL_START_IN"
_PATH = "PYTHONPATH"


def write_call(
    folder: Path,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    all_output: bool,
) -> None:
    """Write a function, its arguments, and this program's sys.path and sys.argv for the ranks.

    Raises:
        ConfigError: Something cannot be pickled; the text names the variable and its function.
    """
    surroundings = {
        "sys.path": [entry for entry in sys.path if isinstance(entry, str)],
        "sys.argv": sys.argv,
        _PATH: environment().get(_PATH),
        "sources": _sources_without_file(),
        "all_output": all_output,
    }
    with (folder / FILE).open("wb") as file:
        pickle.dump(surroundings, file)
        parts = {"func": func}
        parts |= {f"args[{i}]": value for i, value in enumerate(args)}
        parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
        remedy = (
            "Make it in the function, on each rank, or send what it is made from: a path, arrays, "
            "a configuration."
        )
        _dump((func, tuple(args), dict(kwargs)), file, "func and its arguments", parts, remedy)


def read_result(folder: Path, attempt: int, rank: int) -> Any:
    """Return the function's result on a rank.

    Raises:
        FileNotFoundError: It has not returned there.
    """
    with _path_of("result", folder, attempt, rank).open("rb") as file:
        return pickle.load(file)


def read_error(folder: Path, attempt: int, rank: int) -> BaseException | None:
    """Return the exception that the function has raised on a rank; None if it cannot be read."""
    try:
        with _path_of("error", folder, attempt, rank).open("rb") as file:
            error = pickle.load(file)
    except Exception:  # its class may need more arguments than it keeps
        return None
    return error if isinstance(error, BaseException) else None


def _path_of(kind: str, folder: Path, attempt: int, rank: int) -> Path:
    return folder / f"{kind}-{attempt}-{rank}"


def _sources_without_file() -> dict[str, list[str]]:
    """Return the lines of sources that are in no file: the cells of a notebook.

    Tracebacks show them, and AutoGraph reads them.
    """
    sources = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: lines for name, lines in sources.items() if not os.path.exists(name)}


# Parts that cannot be pickled.


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, with the name of its file, which tracebacks show."""
    make, values, *_ = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _make_code, (code.co_filename, make, values)


def _make_code(name: str, make: Callable[..., types.CodeType], values: Any) -> types.CodeType:
    return make(*values).replace(co_filename=name)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = collections.ChainMap(
        {types.CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )


def _dump(value: Any, file: IO[bytes], what: str, parts: Mapping[str, Any], remedy: str) -> None:
    """Pickle a value into a file, or raise a ConfigError that names the part that cannot be.

    `parts` are those of the value by their names, and `what` is a name for all of them.
    """
    try:
        _Pickler(file).dump(value)
    except OSError:
        raise
    except Exception as error:
        culprit = next(
            filter(None, (_culprit(n, "", part, set()) for n, part in parts.items())), what
        )
        raise ConfigError(
            f"{what} must be picklable, to be sent to another process. Received: {culprit} "
            f"({type(error).__name__}: {error}). {remedy}"
        ) from error


class _Nowhere:
    """A file whose contents are not kept."""

    def write(self, data: Any) -> int:
        return len(data)


def _culprit(name: str, where: str, value: Any, seen: set[int]) -> str | None:
    """Return the innermost part of a value that cannot be pickled, and its type; None if all can.

    `name` and `where` ("of function 'train'") describe the value; `seen` are ids of others.
    """
    if id(value) in seen:
        return None
    seen.add(id(value))
    try:
        _Pickler(_Nowhere()).dump(value)
        return None
    except Exception:
        description = f"{name}{where}, of type {type(value).__module__}.{type(value).__qualname__}"
        inner = (_culprit(*part, seen) for part in _parts_of(name, where, value))
        return next(filter(None, inner), description)


# Methods by which an object chooses what pickle sends of it.
_OF_PICKLE = ("__reduce_ex__", "__reduce__", "__getstate__")


def _parts_of(name: str, where: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield what pickle would send with a value: a name, whose it is, and the part."""
    if isinstance(value, types.FunctionType):
        where = f" of function {value.__qualname__!r}"
        yield from ((f"variable {n}", where, used) for n, used in _variables_of(value).items())
    elif isinstance(value, types.MethodType):
        yield "self", f" of method {value.__qualname__!r}", value.__self__
        yield name, where, value.__func__
    elif isinstance(value, functools.partial):
        parts = {".func": value.func, ".args": value.args, ".keywords": value.keywords}
        yield from ((name + inside, where, part) for inside, part in parts.items())
    elif isinstance(value, type):
        where = f" of class {value.__qualname__!r}"
        yield from ((f"attribute {n}", where, part) for n, part in vars(value).items())
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", where, part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{i}]", where, part) for i, part in enumerate(value))
    elif all(getattr(type(value), n, None) is getattr(object, n, None) for n in _OF_PICKLE):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name}.{attribute}", where, part) for attribute, part in attributes.items())


def _variables_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables from outside that a function uses, and the defaults of its arguments."""
    names, codes = set(), [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        loads = dis.get_instructions(code)
        names |= {load.argval for load in loads if load.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    variables = {n: function.__globals__[n] for n in sorted(names) if n in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        with contextlib.suppress(ValueError):  # not assigned yet
            variables[name] = cell.cell_contents
    defaults = inspect.signature(function).parameters.values()
    variables |= {p.name: p.default for p in defaults if p.default is not p.empty}
    return variables


# The program of a rank.


def main(folder: Path) -> int:
    """Call the function on this rank and write the result; return the rank's exit status."""
    launch = process.discover(environment())
    rank = launch.rank if launch else 0
    attempt = int(environment().get(RESTART_VARIABLE, "0"))
    try:
        file = (folder / FILE).open("rb")
    except FileNotFoundError as error:
        raise ConfigError(
            f"Could not find the job's file in the working folder. Received: no {folder / FILE} "
            f"on host {socket.gethostname()}. Call tfscale.run in a folder that all hosts share: "
            "see 'Several hosts' in the documentation."
        ) from error
    with file:
        _surround(pickle.load(file), rank)
        try:
            func, args, kwargs = pickle.load(file)
            _fill_main(func)
            result = func(*args, **kwargs)
            path = _path_of("result", folder, attempt, rank)
            write_atomically(path, lambda file: _dump_result(result, file))
        except Exception as error:
            trace = error.__traceback__ and error.__traceback__.tb_next  # without this function
            path = _path_of("error", folder, attempt, rank)
            # Where it cannot be pickled the caller gets its text only.
            with contextlib.suppress(Exception), path.open("wb") as out:
                _Pickler(out).dump(error)
            # The process beside this one reports it, also where this rank is the only one.
            process.write_error("".join(traceback.format_exception(type(error), error, trace)))
            if launch and launch.size > 1:
                sys.excepthook(type(error), error.with_traceback(trace), trace)  # ends the others
            return 1
    return 0


def _dump_result(result: Any, file: IO[bytes]) -> None:
    remedy = "Return arrays, numbers or the path of a file that the function has written."
    _dump(result, file, "The result of func", {"the result": result}, remedy)


def _surround(surroundings: Mapping[str, Any], rank: int) -> None:
    """Let this process find modules and sources as the caller does, and prepare its output."""
    sys.path[:], sys.argv = surroundings["sys.path"], surroundings["sys.argv"]
    replace_environment({_PATH: surroundings[_PATH]})
    for name, lines in surroundings["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    if rank > 0 and not surroundings["all_output"]:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a line is shown when it is written, not when a buffer is full
            reconfigure(line_buffering=True)


def _fill_main(func: Callable[..., Any]) -> None:
    """Give the main module of this process what the function uses of that of the caller.

    Pickle finds classes there by their name, for example in `tfscale.broadcast_object`. There is no
    `__file__`, so that processes that multiprocessing spawns do not run the caller's script either.
    """
    while isinstance(func, functools.partial):
        func = func.func
    if getattr(func, "__module__", "") == "__main__":
        used = getattr(func, "__globals__", {})
        main_module = types.ModuleType("__main__")
        vars(main_module).update((n, v) for n, v in used.items() if not n.startswith("__"))
        sys.modules["__main__"] = main_module


if __name__ == "__main__":
    # Of this module under its name: pickles of results name functions of it.
    if len(sys.argv) == 1:
        os.chdir(environment()[START_IN_VARIABLE])
    name = sys.argv[1] if len(sys.argv) > 1 else environment()[FOLDER_VARIABLE]
    sys.exit(importlib.import_module("tfscale.launcher.call").main(Path(name)))
