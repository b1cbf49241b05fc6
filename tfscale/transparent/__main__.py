"""Run a program of Python after `tfscale.distribute`: `python -m tfscale.transparent train.py`.

`tfscale run --distribute` starts it; with another launcher: `mpirun -n 4 python -m
tfscale.transparent [options] train.py ...`. Instead of a script, `-m module` and `-c code` work as
in `python`.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from tfscale.exchange import EXCHANGES

_FLAGS = ("--all-output", "--help")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfscale.transparent",
        usage="%(prog)s [options] [--] train.py | -m module | -c code ...",
        description="Trains an unchanged Keras script on all ranks, see tfscale.distribute.",
        allow_abbrev=False,
    )
    add_options_of_distribute(parser.add_argument)
    return parser


def add_options_of_distribute(add: Callable[..., Any], start: str = "") -> None:
    """Add options for the arguments of `tfscale.distribute`; `start` begins their help texts."""
    what = f"{start}what ranks send (default: allreduce)"
    add("--exchange", choices=[*EXCHANGES], metavar="NAME", help=what)
    what = f"{start}statistics of BatchNormalization (default: global)"
    add("--batch-norm", choices=["global", "local"], help=what)
    what = f"{start}seed of Python, NumPy and Keras on all ranks (default: drawn)"
    add("--seed", type=int, metavar="N", help=what)
    what = f"{start}show what ranks other than 0 print, too"
    add("--all-output", action="store_true", help=what)
    what = f"{start}compare steps with those of one process: off, first, N (default: first)"
    add("--verify", type=read_verify, metavar="STEPS", help=what)
    what = f"{start}what each rank prepares of a tf.data.Dataset (default: rows)"
    add("--decode", choices=["rows", "batches"], help=what)
    what = f"{start}spread rows of Embedding layers of this size or more, 100MB, over the ranks"
    add("--shard-embeddings", metavar="SIZE", help=what)


def read_verify(text: str) -> str | int:
    """Return the value of --verify: "off", "first" or a number of steps.

    Raises:
        argparse.ArgumentTypeError: It is none of them.
    """
    if text in ("off", "first"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"off, first or a number of steps. Received: {text}")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of this module, and the program with its arguments."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("--") and arguments[at] != "--":
        at += 1 if "=" in arguments[at] or arguments[at] in _FLAGS else 2
    program = list(arguments[at:])
    return list(arguments[:at]), program[1:] if program[:1] == ["--"] else program


def run(program: Sequence[str]) -> None:
    """Run a program as `python` would: a script, ["-m", module] or ["-c", code], and arguments.

    Only what is around it differs: sys.flags, sys.orig_argv and the modules that are imported.

    Raises:
        OSError: The script cannot be read.
    """
    if program[0] == "-m":
        sys.argv = [*program[1:]]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    if program[0] == "-c":
        sys.argv, name, text, folder = ["-c", *program[2:]], "<string>", program[1].encode(), ""
    else:
        sys.argv, name = [*program], os.path.abspath(program[0])
        folder = os.path.dirname(os.path.realpath(name))
        if os.path.isdir(name):
            runpy.run_path(name, run_name="__main__")
            return
        with open(name, "rb") as file:
            text = file.read()
        module.__file__ = name
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", name)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # Python 3.10 has no safe_path
        sys.path[0] = folder
    # It stays the main module: objects of its classes may be pickled as Python exits.
    sys.modules["__main__"] = module
    # dont_inherit: __future__ imports of this file are no part of the program.
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback from the first frame of the program on."""
    launcher_files = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in launcher_files:
        trace = trace.tb_next
    return trace


def main(arguments: Sequence[str]) -> Any:
    """Distribute, then run the program; its exceptions and exit status are those of Python."""
    options, program = split(arguments)
    parser = _parser()
    settings = {n: v for n, v in vars(parser.parse_args(options)).items() if v is not None}
    if not program or (program[0] in ("-m", "-c") and len(program) == 1):
        parser.error("a script, -m module or -c code is missing")
    if program[0] not in ("-m", "-c") and not os.path.exists(program[0]):
        parser.error(f"can't open file {os.path.abspath(program[0])!r}: no such file")
    # Imported here: --help and errors above need no TensorFlow.
    from tfscale.transparent.distribute import distribute

    distribute(**settings)
    try:
        run(program)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = _without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
